"""Positioned reads, writes and copies: the fast calls and their portable twins, and calls that do less than asked."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
import threading

import pytest

from lib_merge.files import calls

pytestmark = pytest.mark.portable

BYTES = bytes(random.Random(5).randbytes(300_000))


@pytest.fixture
def files(tmp_path):
    """Descriptors of a file that holds BYTES, and of an empty one."""
    (tmp_path / "in").write_bytes(BYTES)
    source, target = calls.open_read(tmp_path / "in"), calls.open_write(tmp_path / "out")
    yield source, target
    os.close(source)
    os.close(target)


def all_of(fd):
    os.lseek(fd, 0, os.SEEK_SET)
    return os.read(fd, 1 << 24)


def read(fd, offset, count):
    buffer = bytearray(count)
    calls.CALLS.read_at(fd, memoryview(buffer), offset)
    return bytes(buffer)


def failing(monkeypatch, name, number, times=1):
    """The next `times` calls of an os function fail; the ones after them work."""
    real, left = getattr(os, name), [times]

    def call(*args):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, call)


def shortened(monkeypatch, name, sizes):
    """An os function that does a few bytes at a time, as systems may."""
    real, sizes = getattr(os, name), itertools.cycle(sizes)

    def call(*args):
        size = next(sizes)
        if name == "preadv":
            return real(args[0], [args[1][0][:size]], args[2])
        if name == "copy_file_range":
            return real(args[0], args[1], min(args[2], size), *args[3:])
        return real(args[0], min(args[1], size) if name == "read" else args[1][:size], *args[2:])

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("offset", "count"), [(0, 300_000), (0, 0), (17, 1), (299_999, 1), (4_095, 123_456), (300_000, 0)]
)
def test_reading_anywhere(file_calls, files, offset, count):
    assert read(files[0], offset, count) == BYTES[offset : offset + count]


@pytest.mark.parametrize(("offset", "count"), [(300_000, 1), (299_999, 2), (0, 300_001), (10**9, 5)])
def test_reading_past_the_end_is_an_end_of_file(file_calls, files, offset, count):
    with pytest.raises(EOFError):
        read(files[0], offset, count)


def test_writing_anywhere(file_calls, files):
    for offset, count in ((7, 13), (100_000, 65_536), (0, 3), (299_000, 1_000), (5, 0)):
        calls.CALLS.write_at(files[1], memoryview(BYTES[offset : offset + count]), offset)
    found = all_of(files[1])
    assert len(found) == 300_000
    for offset, count in ((7, 13), (100_000, 65_536), (0, 3), (299_000, 1_000)):
        assert found[offset : offset + count] == BYTES[offset : offset + count]
    assert found[3:7] == bytes(4)


@pytest.mark.parametrize(("at", "to", "count"), [(0, 0, 300_000), (5, 9, 270_000), (299_999, 0, 1), (0, 3, 0)])
def test_copying_anywhere(file_calls, files, at, to, count):
    calls.CALLS.copy_range(files[0], at, files[1], to, count)
    assert all_of(files[1]) == (bytes(to) + BYTES[at : at + count] if count else b"")


def test_a_copy_larger_than_its_buffer(file_calls, files, monkeypatch):
    monkeypatch.setattr(calls, "_BUFFER_BYTES", 1000)
    calls.CALLS.copy_range(files[0], 1, files[1], 0, 123_457)
    assert all_of(files[1]) == BYTES[1:123_458]


@pytest.mark.parametrize("count", [300_001, 2])
def test_copying_past_the_end_is_an_end_of_file(file_calls, files, count):
    with pytest.raises(EOFError):
        calls.CALLS.copy_range(files[0], 300_001 - count if count > 2 else 299_999, files[1], 0, count)


def test_calls_that_do_a_part_only(file_calls, files, monkeypatch):
    for name in ("read", "write", "preadv", "pwrite", "copy_file_range"):
        if hasattr(os, name):
            shortened(monkeypatch, name, [1, 4_096, 7, 50_000])
    assert read(files[0], 3, 150_000) == BYTES[3:150_003]
    calls.CALLS.write_at(files[1], memoryview(BYTES[:150_000]), 0)
    calls.CALLS.copy_range(files[0], 150_000, files[1], 150_000, 150_000)
    monkeypatch.undo()
    assert all_of(files[1]) == BYTES


def test_no_call_asks_for_more_than_systems_take(file_calls, files, monkeypatch):
    # macOS answers EINVAL to 2 GiB and more; here the limit is small and a call over it fails.
    monkeypatch.setattr(calls, "_MOST_BYTES", 1_000)
    monkeypatch.setattr(calls, "_BUFFER_BYTES", 1_000)
    sizes = {
        "read": lambda fd, count: count,
        "write": lambda fd, view: len(view),
        "preadv": lambda fd, views, offset: sum(map(len, views)),
        "pwrite": lambda fd, view, offset: len(view),
        "copy_file_range": lambda source, target, count, *offsets: count,
    }
    for name, size in sizes.items():
        if hasattr(os, name):
            real = getattr(os, name)

            def call(*args, real=real, size=size):
                if size(*args) > 1_000:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return real(*args)

            monkeypatch.setattr(os, name, call)
    assert read(files[0], 0, 5_500) == BYTES[:5_500]
    calls.CALLS.write_at(files[1], memoryview(BYTES[:5_500]), 0)
    calls.CALLS.copy_range(files[0], 5_500, files[1], 5_500, 5_500)
    monkeypatch.undo()
    assert all_of(files[1]) == BYTES[:11_000]


def test_threads_do_not_disturb_each_other(file_calls, files):
    pieces = [(offset, min(3_001, 300_000 - offset)) for offset in range(0, 300_000, 3_001)]
    random.Random(1).shuffle(pieces)
    wrong = []

    def work(mine):
        for offset, count in mine:
            if count % 2:
                calls.CALLS.copy_range(files[0], offset, files[1], offset, count)
            else:
                part = read(files[0], offset, count)
                calls.CALLS.write_at(files[1], memoryview(part), offset)
            if read(files[0], offset, count) != BYTES[offset : offset + count]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(pieces[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all_of(files[1]) == BYTES


CANNOT = ("EXDEV", "ENOSYS", "EINVAL", "EOPNOTSUPP", "EPERM", "ETXTBSY")


@pytest.mark.parametrize("name", CANNOT)
def test_where_the_kernel_cannot_copy_memory_does(files, monkeypatch, name):
    monkeypatch.setattr(os, "copy_file_range", None, raising=False)
    failing(monkeypatch, "copy_file_range", getattr(errno, name), times=-1)
    calls.choose().copy_range(files[0], 10, files[1], 3, 200_000)
    assert all_of(files[1]) == bytes(3) + BYTES[10:200_010]


@pytest.mark.parametrize("name", CANNOT)
def test_the_kernel_may_stop_half_way(files, monkeypatch, name):
    answers = iter([1_000, 0, OSError(getattr(errno, name), "")])

    def call(source, target, count, source_at, target_at):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        os.pwrite(target, os.pread(source, answer, source_at), target_at)
        return answer

    monkeypatch.setattr(os, "copy_file_range", call, raising=False)
    copy = calls.choose().copy_range
    copy(files[0], 10, files[1], 0, 200_000)  # the second call does nothing: memory does the rest
    assert all_of(files[1]) == BYTES[10:200_010]
    copy(files[0], 0, files[1], 0, 5_000)
    assert all_of(files[1])[:5_000] == BYTES[:5_000]


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_other_errors_of_a_copy_are_not_hidden(files, monkeypatch, name):
    monkeypatch.setattr(os, "copy_file_range", None, raising=False)
    failing(monkeypatch, "copy_file_range", getattr(errno, name), times=-1)
    with pytest.raises(OSError) as caught:
        calls.choose().copy_range(files[0], 0, files[1], 0, 100)
    assert caught.value.errno == getattr(errno, name)
    assert not isinstance(caught.value, calls.UnreadableError)


def broken(monkeypatch, file_calls, side):
    """Reading or writing fails as on a dying disk; a copy in the kernel fails without saying which."""
    name = {"fast": {"in": "preadv", "out": "pwrite"}, "portable": {"in": "read", "out": "write"}}[file_calls][side]
    failing(monkeypatch, name, errno.EIO, times=-1)
    if hasattr(os, "copy_file_range"):
        failing(monkeypatch, "copy_file_range", errno.EIO, times=-1)


def test_a_copy_says_which_side_failed(file_calls, files, monkeypatch):
    broken(monkeypatch, file_calls, "in")
    with pytest.raises(calls.UnreadableError) as caught:
        calls.CALLS.copy_range(files[0], 0, files[1], 0, 100)
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()


def test_a_copy_whose_target_fails_is_a_plain_error(file_calls, files, monkeypatch):
    broken(monkeypatch, file_calls, "out")
    with pytest.raises(OSError) as caught:
        calls.CALLS.copy_range(files[0], 0, files[1], 0, 100)
    assert not isinstance(caught.value, calls.UnreadableError)
    assert caught.value.errno == errno.EIO


def test_early_write_back_is_a_hint_that_cannot_fail(file_calls, files):
    calls.CALLS.write_at(files[1], memoryview(BYTES), 0)
    calls.CALLS.start_writeback(files[1], 0, 300_000)
    calls.CALLS.start_writeback(-1, 0, 300_000)
    assert all_of(files[1]) == BYTES


def test_a_new_file_must_be_new(tmp_path):
    (tmp_path / "there").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        calls.open_write(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        calls.open_write(tmp_path / "link")
    assert (tmp_path / "there").read_bytes() == b"kept"
    assert not (tmp_path / "nowhere").exists()


def test_the_fast_calls_are_chosen_where_the_system_has_them(file_calls):
    chosen = (calls.CALLS.read_at.__name__, calls.CALLS.write_at.__name__)
    if file_calls == "portable":
        assert chosen == ("_seek_read", "_seek_write")
    elif sys.platform.startswith("linux"):
        assert chosen == ("_preadv", "_pwrite")
