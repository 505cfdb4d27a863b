"""Hashes against hashlib, and a cache that may be wrong, broken or missing without any harm."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sqlite3
import threading
import warnings
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from safetensors.numpy import save_file

from lib_merge.errors import FileError
from lib_merge.files import hashes
from lib_merge.files.hashes import HashCache, cache_folder, combined, legacy_hash, sha256_file
from lib_merge.files.open import open_model

pytestmark = pytest.mark.portable

CHUNK = 4 << 20


@pytest.fixture
def cache(tmp_path):
    return HashCache(tmp_path / "cache")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    return path


@pytest.fixture
def reads(monkeypatch):
    """Paths whose contents were hashed."""
    read, real = [], hashes.sha256_file
    monkeypatch.setattr(hashes, "sha256_file", lambda path, *rest: read.append(path) or real(path, *rest))
    return read


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100_000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_sha256(tmp_path, size):
    content = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(content)
    assert sha256_file(tmp_path / "x") == sha(content)


@pytest.mark.parametrize("size", [0, 5, 0x100000, 0x100000 + 7, 0x110000, 0x110000 + 9])
def test_the_old_hash_of_the_web_uis(tmp_path, size):
    content = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(content)
    assert legacy_hash(tmp_path / "x") == sha(content[1 << 20 : (1 << 20) + (1 << 16)])[:8]


def test_missing_files_are_named(tmp_path, cache):
    for work in (sha256_file, legacy_hash, cache.compute):
        with pytest.raises(FileError, match="cannot read") as caught:
            work(tmp_path / "missing")
        assert caught.value.file == str(tmp_path / "missing")
    assert cache.get(tmp_path / "missing") is None


def test_cancelling(tmp_path, cache):
    path = tmp_path / "x"
    path.write_bytes(bytes(3 * CHUNK))
    asked = []
    assert sha256_file(path, lambda: len(asked) == 2 or asked.append(1)) == ""
    assert len(asked) == 2
    assert cache.compute(path, lambda: True) == ""
    assert cache.get(path) is None  # half a hash is not remembered
    assert cache.compute(path) == sha(bytes(3 * CHUNK))


def test_a_hash_is_computed_once(cache, file, reads):
    assert cache.get(file) is None
    assert [cache.compute(file) for _ in range(3)] == [sha(b"first")] * 3
    assert reads == [file]
    assert cache.get(file) == sha(b"first")
    assert HashCache(cache.path.parent).get(file) == sha(b"first")


def test_a_changed_file_is_hashed_again(cache, file):
    cache.compute(file)
    before = file.stat()
    file.write_bytes(b"other")  # same size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert cache.get(file) is None
    assert cache.compute(file) == sha(b"other")
    file.write_bytes(b"longer")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # same time
    assert cache.get(file) is None
    assert cache.compute(file) == sha(b"longer")


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(cache, file, monkeypatch):
    real = hashes.sha256_file

    def slow(path, stop):
        digest = real(path, stop)
        file.write_bytes(b"somebody wrote this meanwhile")
        return digest

    monkeypatch.setattr(hashes, "sha256_file", slow)
    assert cache.compute(file) == sha(b"first")
    monkeypatch.undo()
    assert cache.get(file) is None
    assert cache.compute(file) == sha(b"somebody wrote this meanwhile")


def test_a_link_is_the_file_it_leads_to(cache, file, tmp_path, reads):
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "sub").mkdir()
    cache.compute(file)
    for other in (tmp_path / "link", tmp_path / "sub" / ".." / "file"):
        assert cache.compute(other) == sha(b"first")
    assert reads == [file]


@pytest.mark.parametrize("name", ["ünïcode 🦊", "it's; DROP TABLE hashes --", "new\nline", b"not utf-8 \xff\xfe"])
def test_odd_names(cache, tmp_path, name, reads):
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(b"x")
    assert [cache.compute(path), cache.compute(path)] == [sha(b"x")] * 2
    assert len(reads) == 1


def damage(cache, how):
    cache.path.parent.mkdir(exist_ok=True, parents=True)
    if how == "no database":
        cache.path.write_bytes(b"this is not a database, it only stands here" * 100)
    elif how == "cut off":
        cache.compute(Path(__file__))
        cache.path.write_bytes(cache.path.read_bytes()[:5000])
    elif how == "another table":
        with sqlite3.connect(cache.path) as database:
            database.execute("CREATE TABLE hashes (a TEXT)")
        database.close()
    elif how == "a folder":
        cache.path.mkdir()
    elif how == "folder is a file":
        cache.path.parent.rmdir()
        cache.path.parent.write_bytes(b"")
    elif how == "locked":
        database = sqlite3.connect(cache.path)
        database.execute("BEGIN EXCLUSIVE")
        return database
    return None


@pytest.mark.parametrize("how", ["no database", "cut off", "another table", "a folder", "folder is a file"])
def test_a_broken_cache_is_as_good_as_none(cache, file, how, open_files):
    damage(cache, how)
    before = open_files()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(file) is None
        assert cache.compute(file) == cache.compute(file) == sha(b"first")
        gc.collect()
    assert open_files() == before


def test_a_cache_that_another_program_holds(cache, file, monkeypatch):
    real = sqlite3.connect
    held = damage(cache, "locked")
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: real(path, timeout=0))
    assert cache.compute(file) == sha(b"first")
    held.close()


def test_a_cache_folder_that_cannot_be_made(file, tmp_path, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", denied)
    monkeypatch.setattr(type(tmp_path), "mkdir", denied)
    cache = HashCache(tmp_path / "not" / "there")
    assert cache.get(file) is None
    assert cache.compute(file) == sha(b"first")


def test_a_cache_that_cannot_be_written(cache, file):
    cache.compute(file)
    other = file.with_name("other")
    other.write_bytes(b"other")
    cache.path.chmod(0o444)
    cache.path.parent.chmod(0o555)
    try:
        assert cache.get(file) == sha(b"first")
        assert cache.compute(other) == sha(b"other")
    finally:
        cache.path.parent.chmod(0o755)


def test_threads_share_a_cache(cache, tmp_path):
    files = [tmp_path / f"f{n}" for n in range(12)]
    for path in files:
        path.write_bytes(path.name.encode())
    wrong = []

    def work():
        wrong.extend(path for path in files if cache.compute(path) != sha(path.name.encode()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_stays_open(cache, file, open_files):
    cache.compute(file)
    before = open_files()
    for _ in range(5):
        cache.get(file)
        file.write_bytes(os.urandom(9))
        cache.compute(file)
    assert open_files() == before


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("LIB_MERGE_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    assert HashCache().path.parent == tmp_path / "here"
    assert not (tmp_path / "here").exists()
    for empty in (lambda: monkeypatch.setenv("LIB_MERGE_CACHE", ""), lambda: monkeypatch.delenv("LIB_MERGE_CACHE")):
        empty()
        assert str(cache_folder()) == platformdirs.user_cache_dir("lib_merge", appauthor=False)


# Whole models.


def test_a_file_has_its_own_hash(cache, tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": np.ones(3)}, path)
    source = open_model(path)
    assert cache.get_source(source) is None
    assert cache.compute_source(source) == sha(path.read_bytes())
    assert cache.get_source(source) == sha(path.read_bytes())


def test_a_folder_is_hashed_by_its_weights_and_their_names(cache, tmp_path, reads):
    root = tmp_path / "pipe"
    for name in ("unet", "vae"):
        (root / name).mkdir(parents=True)
        save_file({name: np.full(3, len(name))}, root / name / "model.safetensors")
    (root / "model_index.json").write_text("{}")
    digests = {name: sha((root / name / "model.safetensors").read_bytes()) for name in ("vae", "unet")}
    lines = sorted(f"{digest}  {name}/model.safetensors\n" for name, digest in digests.items())
    expected = sha("".join(lines).encode())
    source = open_model(root)
    assert cache.get_source(source) is None
    assert cache.compute_source(source, lambda: True) == ""
    reads.clear()
    assert cache.compute_source(source) == expected
    assert len(reads) == 2
    assert cache.get_source(source) == cache.compute_source(source) == expected
    assert len(reads) == 2
    (root / "model_index.json").write_text('{"other": 1}')
    assert cache.get_source(open_model(root)) == expected
    os.utime(root / "vae" / "model.safetensors", ns=(1, 1))
    assert cache.get_source(source) is None


def test_the_order_of_files_does_not_matter():
    pairs = [("b", "1" * 64), ("a", "2" * 64), ("c", "0" * 64)]
    expected = sha(f"{'0' * 64}  c\n{'1' * 64}  b\n{'2' * 64}  a\n".encode())
    assert combined(pairs) == combined(pairs[::-1]) == expected
    assert combined([("a", "1" * 64)]) != combined([("b", "1" * 64)])
