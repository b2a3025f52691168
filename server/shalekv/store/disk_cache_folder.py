"""The folder of a cache on disk, which processes share without asking each other.

    <path>/shalekv-parts/xx/<name>      a part (see `shalekv.store.disk_cache_folder`)
    <path>/shalekv-parts/tally          has a byte for each page that all parts take, about
    <path>/shalekv-parts/lock           locked by who deletes; its time is that of the last scan

A part is written under a temporary name and then renamed, so nobody meets half of one while its
writer runs; nothing is synced, so a power cut may leave one, which nobody believes. Readers lock
nothing. Before parts are written their pages are appended to the tally: its size tells every
process how much all of them keep, with one system call, and a scan sets it right.

Everything here blocks, and runs in workers. Files of other names are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

from shalekv.format.coding import crc32c
from shalekv.store.files import REAL_FILE_SYSTEM, FileLock, FileSystem, ListedFile

# --- disk_cache_part
# A part of an SST as a file of the cache on disk: how it is named, and when it is believed.
#
#     0   magic 8
#     8   database id 16, SST id 16
#     40  offset u64, length u64 of the part in the SST
#     56  CRC-32C u32 of bytes 0 to 55 and of the part
#     60  the part
#
# Numbers are stored least significant byte first. The name is a hash of bytes 8 to 55: so a file
# says itself what it is, and one that was cut, changed or put under another name is not believed.


MAGIC = b"ShalePrt"
NAME_BYTES = 16
HEADER_BYTES = 60
PAGE_BYTES = 4096  # what files are rounded up to on most disks

# Folders, in groups that are scanned by one call of a worker; the names in them begin with theirs.
SHARDS = tuple(tuple(f"{first:x}{second:x}" for second in range(16)) for first in range(16))
TEMP_SUFFIX = ".tmp"

_KEY = struct.Struct("<16s16sQQ")
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+-[0-9a-f]+\.tmp)?", re.ASCII)


class CachedPart(NamedTuple):
    """`length` bytes of an SST from byte `offset` on. Ids are never used again, so they stay."""

    database_id: bytes
    sst_id: bytes
    offset: int
    length: int

    @property
    def file_name(self) -> str:
        """The name of its file; the first two letters are its shard, too."""
        return blake2b(_KEY.pack(*self), digest_size=NAME_BYTES).hexdigest()

    @property
    def file_bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.length


def to_file(part: CachedPart, data: bytes) -> bytes:
    """The contents of the file that keeps `data`."""
    head = MAGIC + _KEY.pack(*part)
    return b"".join((head, crc32c(data, crc32c(head)).to_bytes(4, "little"), data))


def from_file(part: CachedPart, contents: bytes) -> bytes | None:
    """The part that `to_file` was given; None: these are not its bytes."""
    head = MAGIC + _KEY.pack(*part)
    if len(contents) != part.file_bytes or not contents.startswith(head):
        return None
    data = contents[HEADER_BYTES:]
    expected = int.from_bytes(contents[len(head) : HEADER_BYTES], "little")
    return data if crc32c(data, crc32c(head)) == expected else None


def is_ours(name: str) -> bool:
    """Whether a file of this name was written by a cache: others are left alone."""
    return _OURS.fullmatch(name) is not None


def on_disk(size_bytes: int) -> int:
    """What a file of this size takes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


# --- disk_cache_ages
# How old the files of a cache are, in little memory: which to delete to make room.


CLASSES_MAX = 16_384


@dataclass(slots=True)
class Cut:
    """Files before `from_ms` go, and of those before `until_ms` what `left_bytes` asks for."""

    from_ms: int
    until_ms: int
    left_bytes: int

    def takes(self, used_ms: int, size_bytes: int) -> bool:
        """Whether this file goes."""
        if used_ms < self.from_ms:
            return True
        if used_ms >= self.until_ms or self.left_bytes <= 0:
            return False
        self.left_bytes -= size_bytes
        return True


class Ages:
    """Bytes by the time of their last use, in classes that get longer as they get many."""

    def __init__(self, classes_max: int = CLASSES_MAX) -> None:
        self._classes_max = classes_max
        self._shift = 0  # a class is 2 to the power of this, in milliseconds
        self._bytes: dict[int, int] = {}
        self.total_bytes = 0

    @property
    def class_ms(self) -> int:
        """How exactly times are told apart."""
        return 1 << self._shift

    def add(self, used_ms: int, size_bytes: int) -> None:
        """Count a file."""
        self.total_bytes += size_bytes
        self._add(used_ms >> self._shift, size_bytes)
        while len(self._bytes) > self._classes_max:
            finer, self._bytes = self._bytes, {}
            self._shift += 1
            for number, sum_bytes in finer.items():
                self._add(number >> 1, sum_bytes)

    def cut(self, size_bytes: int) -> Cut:
        """What to delete so that so many bytes are free: what was used longest ago."""
        left_bytes = size_bytes
        for number in sorted(self._bytes):
            if left_bytes <= self._bytes[number]:
                return Cut(number << self._shift, number + 1 << self._shift, left_bytes)
            left_bytes -= self._bytes[number]
        end_ms = max(self._bytes, default=0) + 1 << self._shift
        return Cut(end_ms, end_ms, 0)

    def _add(self, number: int, size_bytes: int) -> None:
        self._bytes[number] = self._bytes.get(number, 0) + size_bytes


# --- disk_cache_folder


FOLDER = "shalekv-parts"
EPOCH_READS = 64  # between two looks at when the last scan was
TEMP_LIFE_MS = 3_600_000  # then its writer is dead

# What opening a part says when there is none: nothing, a folder gone, something else in its place.
_NO_PART = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})


@dataclass(slots=True)
class Looked:
    """What looking for parts came to."""

    found: list[bytes | None]
    damaged: int = 0  # files that were not what their names say, and are deleted
    error: OSError | None = None  # one of those that reading met


class PartFolder:
    """Reads, writes and deletes parts. `token` tells processes and their threads apart."""

    def __init__(
        self, path: Path, token: str, *, filesystem: FileSystem = REAL_FILE_SYSTEM
    ) -> None:
        self._root = path / FOLDER
        self._tally = self._root / "tally"
        self._lock = self._root / "lock"
        self._token = token
        self._numbers = count()
        self._filesystem = filesystem
        self._reads = 0
        self._scanned_ms = 0  # what was not used since then is marked as used when it is

    def read(self, parts: Sequence[CachedPart]) -> Looked:
        """The parts that are here. Raises nothing: what cannot be read is not here."""
        looked = Looked([])
        if self._reads % EPOCH_READS == 0:
            self._see_scan()
        self._reads += 1
        for part in parts:
            path = self._path(part)
            data = None
            try:
                contents = self._contents(path, part.file_bytes)
                data = from_file(part, contents)
                if data is None:
                    looked.damaged += 1
                    self._filesystem.unlink(path)
            except OSError as error:
                if error.errno not in _NO_PART:
                    looked.error = error
            looked.found.append(data)
        return looked

    def _contents(self, path: Path, size_bytes: int) -> bytes:
        """The file, and a byte more if it is longer."""
        filesystem = self._filesystem
        descriptor = filesystem.open(path)
        try:
            status = filesystem.fstat(descriptor)
            pieces, have_bytes = [], 0
            while have_bytes <= size_bytes:
                piece = filesystem.pread(descriptor, size_bytes + 1 - have_bytes, have_bytes)
                if not piece:
                    break
                pieces.append(piece)
                have_bytes += len(piece)
            if status.modified_ms < self._scanned_ms:
                with contextlib.suppress(OSError):  # others may read it and not change it
                    filesystem.touch_open(descriptor)
        finally:
            filesystem.close(descriptor)
        return b"".join(pieces)

    def delete(self, parts: Sequence[CachedPart]) -> None:
        """Delete these, if they are here and may be deleted."""
        for part in parts:
            with contextlib.suppress(OSError):
                self._filesystem.unlink(self._path(part))

    def write(self, batch: Sequence[tuple[CachedPart, bytes]], bytes_max: int) -> int | None:
        """Keep these parts: bytes that are kept by all now, about. Raises `OSError`.

        None: nothing was written, because there is no room, or nobody knows whether there is.
        """
        new_bytes = sum(on_disk(part.file_bytes) for part, _ in batch)
        kept_bytes = self.kept_bytes()
        if kept_bytes is None or kept_bytes + new_bytes > bytes_max:
            return None
        try:
            tally = self._filesystem.append(self._tally, bytes(new_bytes // PAGE_BYTES))
        except FileNotFoundError:
            return None
        for part, data in batch:
            self._write(self._path(part), to_file(part, data))
        self._see_scan()
        return tally.size_bytes * PAGE_BYTES

    def kept_bytes(self) -> int | None:
        """What all processes keep here, about; None: it takes a scan to know."""
        try:
            return self._filesystem.stat(self._tally).size_bytes * PAGE_BYTES
        except FileNotFoundError:
            return None

    def _write(self, path: Path, contents: bytes) -> None:
        filesystem = self._filesystem
        temp_path = path.with_name(
            f"{path.name}.{self._token}-{next(self._numbers):x}{TEMP_SUFFIX}"
        )
        try:
            descriptor = filesystem.create(temp_path)
        except FileNotFoundError:
            self._make(path.parent)
            descriptor = filesystem.create(temp_path)
        try:
            try:
                unwritten = memoryview(contents)
                while unwritten:
                    unwritten = unwritten[filesystem.write(descriptor, unwritten) :]
            finally:
                filesystem.close(descriptor)
            filesystem.rename(temp_path, path)
        except OSError:
            with contextlib.suppress(OSError):
                filesystem.unlink(temp_path)
            raise

    def _make(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else was faster
                self._filesystem.mkdir(each)

    def try_lock(self) -> FileLock | None:
        """The right to delete; None: another process has it. Raises `OSError`."""
        try:
            return self._filesystem.try_lock(self._lock)
        except FileNotFoundError:
            self._make(self._root)
            return self._filesystem.try_lock(self._lock)

    def begin_scan(self) -> int:
        """Note that a scan begins now. What the tally says: see `end_scan`."""
        self._scanned_ms = self._filesystem.touch(self._lock).modified_ms
        return self.kept_bytes() or 0

    def end_scan(self, found_bytes: int, kept_before_bytes: int) -> int:
        """Set the tally right: found, and written meanwhile. What it says now."""
        meanwhile_bytes = max((self.kept_bytes() or 0) - kept_before_bytes, 0)
        kept_bytes = found_bytes + meanwhile_bytes
        self._filesystem.resize(self._tally, kept_bytes // PAGE_BYTES)
        return kept_bytes

    def look(self, shards: Sequence[str], ages: Ages) -> None:
        """Add the files of these shards to `ages`; what dead writers have left goes."""
        for path, file in self._files(shards):
            is_old = file.modified_ms < self._scanned_ms - TEMP_LIFE_MS
            if is_old and file.name.endswith(TEMP_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.unlink(path / file.name)
            else:
                ages.add(file.modified_ms, on_disk(file.size_bytes))

    def evict(self, shards: Sequence[str], cut: Cut) -> tuple[int, int]:
        """Delete what `cut` takes of these shards: how many files, and their bytes."""
        files = freed_bytes = 0
        for path, file in self._files(shards):
            size_bytes = on_disk(file.size_bytes)
            if not cut.takes(file.modified_ms, size_bytes):
                continue
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.unlink(path / file.name)
            files += 1
            freed_bytes += size_bytes
        return files, freed_bytes

    def _files(self, shards: Sequence[str]) -> Iterator[tuple[Path, ListedFile]]:
        """Our files in these shards, each with its folder."""
        for shard in shards:
            path = self._root / shard
            try:
                files = self._filesystem.list_files(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for file in files:
                if is_ours(file.name):
                    yield path, file

    def _see_scan(self) -> None:
        with contextlib.suppress(OSError):  # then the last one that was seen counts
            self._scanned_ms = self._filesystem.stat(self._lock).modified_ms

    def _path(self, part: CachedPart) -> Path:
        name = part.file_name
        return self._root / name[:2] / name
