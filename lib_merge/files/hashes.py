"""sha256 of model files, remembered by (path, size, modification time) so that a file is read for it once."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import platformdirs

from ..errors import FileError
from .source import Source

_CHUNK_BYTES = 4 << 20
CACHE_VARIABLE = "LIB_MERGE_CACHE"
_Key = tuple[str, int, int]
_TABLE = """CREATE TABLE IF NOT EXISTS hashes
            (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT)"""


def cache_folder() -> Path:
    """Where hashes are remembered: $LIB_MERGE_CACHE, or the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("lib_merge", appauthor=False))


def sha256_file(path: Path, stop: Callable[[], bool] = lambda: False) -> str:
    """Lower-case hex sha256 of a file; empty when `stop()` turned true on the way."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                if stop():
                    return ""
                digest.update(buffer[:count])
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    return digest.hexdigest()


def combined(names_and_hashes: list[tuple[str, str]]) -> str:
    """Hash of a model folder: sha256 over the sorted lines `sha256  relative/name` of its weights files."""
    lines = sorted(f"{digest}  {name}\n" for name, digest in names_and_hashes)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class HashCache:
    """Remembered hashes in one small database; a cache that cannot be used is as good as an empty one.

    Args:
        folder: where the database lies; None for `cache_folder()`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / "hashes.sqlite"

    def get(self, path: Path) -> str | None:
        """The remembered hash of a file, or None when it is unknown or the file has changed."""
        key = _key(path)
        if key is None:
            return None
        try:
            with closing(self._database()) as database:
                row = database.execute("SELECT sha256 FROM hashes WHERE path=? AND size=? AND mtime_ns=?", key)
                found: tuple[str] | None = row.fetchone()
        except (OSError, sqlite3.Error):
            return None
        return found[0] if found else None

    def _put(self, key: _Key, sha256: str) -> None:
        with suppress(OSError, sqlite3.Error), closing(self._database()) as database:
            database.execute("INSERT OR REPLACE INTO hashes VALUES (?,?,?,?)", (*key, sha256))
            database.commit()

    def compute(self, path: Path, stop: Callable[[], bool] = lambda: False) -> str:
        """The hash of a file, computed and remembered where it is not yet; empty when stopped."""
        if remembered := self.get(path):
            return remembered
        key = _key(path)  # of before: a file that is written to meanwhile must not keep this hash
        digest = sha256_file(path, stop)
        if digest and key:
            self._put(key, digest)
        return digest

    def get_source(self, source: Source) -> str | None:
        """The remembered hash of a whole model, or None when one of its files is unknown."""
        found = [(_relative(source, file), self.get(file)) for file in source.files]
        known = [(name, digest) for name, digest in found if digest]
        return _of_model(source, known) if len(known) == len(found) else None

    def compute_source(self, source: Source, stop: Callable[[], bool] = lambda: False) -> str:
        """Hash of a whole model, computed where it is not remembered; empty when stopped."""
        digests = []
        for file in source.files:
            digest = self.compute(file, stop)
            if not digest:
                return ""
            digests.append((_relative(source, file), digest))
        return _of_model(source, digests)

    def _database(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.path, timeout=5)
        try:
            database.execute(_TABLE)
        except sqlite3.Error:
            database.close()
            raise
        return database


def _key(path: Path) -> _Key | None:
    """What a hash is remembered by; None where the file cannot be looked at."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    # Names of other encodings come as half surrogate pairs, which the database does not take.
    name = os.fsencode(os.path.realpath(path)).decode("utf-8", "backslashreplace")
    return (name, stat.st_size, stat.st_mtime_ns)


def _relative(source: Source, file: Path) -> str:
    return file.relative_to(source.path).as_posix() if source.kind == "folder" else file.name


def _of_model(source: Source, digests: list[tuple[str, str]]) -> str:
    return combined(digests) if source.kind == "folder" else digests[0][1]


def legacy_hash(path: Path) -> str:
    """The web UIs' old short hash: first 8 hex digits of sha256 over 64 KiB at offset 1 MiB."""
    try:
        with path.open("rb") as stream:
            stream.seek(0x100000)
            return hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
