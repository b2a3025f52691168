"""The folder of a cache on disk, which processes share without talking to each other.

    <path>/shalekv-parts/xx/<name>      a part
    <path>/shalekv-parts/tally          one byte for each page that all parts occupy, about
    <path>/shalekv-parts/lock           locked by the process that evicts; its modification time
                                        is the time of the last scan

A part is written under a temporary name and then renamed, so no reader sees half of one while its
writer runs. Nothing is synced, so a power cut may leave half of one, which its checksum shows.
Readers lock nothing. Before parts are written, their pages are appended to the tally: its size
says with one system call how much all processes keep, and a scan corrects it.

A part of an SST is a file of this format, with numbers in little-endian order:

    0   magic 8
    8   database id 16, SST id 16
    40  offset u64, length u64 of the part in the SST
    56  CRC-32C u32 of bytes 0 to 55 and of the part
    60  the part

Its name is a hash of bytes 8 to 55. So each file identifies itself: one that was cut, changed or
renamed is detected and not used.

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

FOLDER = "shalekv-parts"
MAGIC = b"ShalePrt"
NAME_BYTES = 16
HEADER_BYTES = 60
PAGE_BYTES = 4096  # most file systems allocate whole pages of this size

# Subfolders, in groups that one call of a worker scans. The name of a file begins with the name of
# its subfolder.
SHARDS = tuple(tuple(f"{first:x}{second:x}" for second in range(16)) for first in range(16))
TEMP_SUFFIX = ".tmp"

AGE_CLASSES_MAX = 16_384
SCAN_CHECK_READS = 64  # reads between two checks of the time of the last scan
TEMP_LIFE_MS = 3_600_000  # the writer of an older temporary file is dead

# Errors of opening a part that is not there: no file, no folder, something else in its place.
_NO_PART = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})

_KEY = struct.Struct("<16s16sQQ")
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+-[0-9a-f]+\.tmp)?", re.ASCII)


class CachedPart(NamedTuple):
    """`length` bytes of an SST from byte `offset`. They never change: ids are never reused."""

    database_id: bytes
    sst_id: bytes
    offset: int
    length: int

    @property
    def file_name(self) -> str:
        """The name of its file; the first two letters are the name of its shard."""
        return blake2b(_KEY.pack(*self), digest_size=NAME_BYTES).hexdigest()

    @property
    def file_bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.length


def encode_part(part: CachedPart, data: bytes) -> bytes:
    """Encode the file of a part with the contents `data`."""
    head = MAGIC + _KEY.pack(*part)
    return b"".join((head, crc32c(data, crc32c(head)).to_bytes(4, "little"), data))


def decode_part(part: CachedPart, contents: bytes) -> bytes | None:
    """Decode and verify the file of a part; return None if it is not the file of this part."""
    head = MAGIC + _KEY.pack(*part)
    if len(contents) != part.file_bytes or not contents.startswith(head):
        return None
    data = contents[HEADER_BYTES:]
    expected = int.from_bytes(contents[len(head) : HEADER_BYTES], "little")
    return data if crc32c(data, crc32c(head)) == expected else None


def is_ours(name: str) -> bool:
    """Return whether a cache writes files of such names; others are left alone."""
    return _OURS.fullmatch(name) is not None


def size_on_disk(size_bytes: int) -> int:
    """Return the space that a file of this size occupies."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def batch_on_disk(batch: Sequence[tuple[CachedPart, bytes]]) -> int:
    """Return the space that the files of these parts occupy."""
    return sum(size_on_disk(part.file_bytes) for part, _ in batch)


@dataclass(slots=True)
class Eviction:
    """Selects the files to evict, by the time of their last use.

    All files used before `from_ms` are evicted. Of those used from then until before `until_ms`,
    files are evicted until they amount to `left_bytes`.
    """

    from_ms: int
    until_ms: int
    left_bytes: int

    def includes(self, used_ms: int, size_bytes: int) -> bool:
        """Return whether to evict this file; if so, its size is subtracted from what is left to
        free.
        """
        if used_ms < self.from_ms:
            return True
        if used_ms >= self.until_ms or self.left_bytes <= 0:
            return False
        self.left_bytes -= size_bytes
        return True


class Ages:
    """Histogram of bytes by the time of their last use, in bounded memory.

    When there are more than `classes_max` classes, their width is doubled.
    """

    def __init__(self, classes_max: int = AGE_CLASSES_MAX) -> None:
        self._classes_max = classes_max
        self._shift = 0  # the width of a class is 2 to the power of this, in milliseconds
        self._bytes: dict[int, int] = {}
        self.total_bytes = 0

    @property
    def class_ms(self) -> int:
        """The width of a class in milliseconds."""
        return 1 << self._shift

    def add(self, used_ms: int, size_bytes: int) -> None:
        """Add a file."""
        self.total_bytes += size_bytes
        self._add(used_ms >> self._shift, size_bytes)
        while len(self._bytes) > self._classes_max:
            finer, self._bytes = self._bytes, {}
            self._shift += 1
            for number, sum_bytes in finer.items():
                self._add(number >> 1, sum_bytes)

    def eviction(self, size_bytes: int) -> Eviction:
        """Select the least recently used files, so that evicting them frees `size_bytes`."""
        left_bytes = size_bytes
        for number in sorted(self._bytes):
            if left_bytes <= self._bytes[number]:
                return Eviction(number << self._shift, number + 1 << self._shift, left_bytes)
            left_bytes -= self._bytes[number]
        end_ms = max(self._bytes, default=0) + 1 << self._shift
        return Eviction(end_ms, end_ms, 0)

    def _add(self, number: int, size_bytes: int) -> None:
        self._bytes[number] = self._bytes.get(number, 0) + size_bytes


@dataclass(slots=True)
class ReadResult:
    """Result of reading parts, in the order of the request."""

    found: list[bytes | None]
    damaged: int = 0  # files that were not the part of their name, and were deleted
    error: OSError | None = None  # the last error of reading, other than a missing part


class PartFolder:
    """Reads, writes and deletes parts. `token` is unique to the cache: part of temporary names."""

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
        self._scanned_ms = 0  # last scan: the first use of a part after it is recorded

    def read(self, parts: Sequence[CachedPart]) -> ReadResult:
        """Read parts. Never raises: a part that cannot be read counts as missing."""
        result = ReadResult([])
        if self._reads % SCAN_CHECK_READS == 0:
            self._load_scan_time()
        self._reads += 1
        for part in parts:
            path = self._path(part)
            data = None
            try:
                contents = self._contents(path, part.file_bytes)
                data = decode_part(part, contents)
                if data is None:
                    result.damaged += 1
                    self._filesystem.unlink(path)
            except OSError as error:
                if error.errno not in _NO_PART:
                    result.error = error
            result.found.append(data)
        return result

    def _contents(self, path: Path, size_bytes: int) -> bytes:
        """Read a file of `size_bytes`, and one byte more if it is longer; record its use."""
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
                with contextlib.suppress(OSError):  # this process may lack the permission
                    filesystem.touch_open(descriptor)
        finally:
            filesystem.close(descriptor)
        return b"".join(pieces)

    def delete(self, parts: Sequence[CachedPart]) -> None:
        """Delete these parts, as far as they exist and can be deleted."""
        for part in parts:
            with contextlib.suppress(OSError):
                self._filesystem.unlink(self._path(part))

    def write(self, batch: Sequence[tuple[CachedPart, bytes]], bytes_max: int) -> int | None:
        """Write these parts; return the bytes that all processes keep now, about.

        None: nothing was written, because it would exceed `bytes_max`, or there is no tally. Raises
        `OSError`.
        """
        new_bytes = batch_on_disk(batch)
        kept_bytes = self.kept_bytes()
        if kept_bytes is None or kept_bytes + new_bytes > bytes_max:
            return None
        try:
            tally = self._filesystem.append(self._tally, bytes(new_bytes // PAGE_BYTES))
        except FileNotFoundError:
            return None
        for part, data in batch:
            self._write(self._path(part), encode_part(part, data))
        self._load_scan_time()
        return tally.size_bytes * PAGE_BYTES

    def kept_bytes(self) -> int | None:
        """Return the bytes that all processes keep, about; None: only a scan can say."""
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
            self._make_folder(path.parent)
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

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                self._filesystem.mkdir(each)

    def try_lock(self) -> FileLock | None:
        """Lock the folder for a scan; return None if another process has it. Raises `OSError`."""
        try:
            return self._filesystem.try_lock(self._lock)
        except FileNotFoundError:
            self._make_folder(self._root)
            return self._filesystem.try_lock(self._lock)

    def begin_scan(self) -> int:
        """Record that a scan begins now; return the tally in bytes, for `end_scan`."""
        self._scanned_ms = self._filesystem.touch(self._lock).modified_ms
        return self.kept_bytes() or 0

    def end_scan(self, found_bytes: int, kept_before_bytes: int) -> int:
        """Set the tally to the bytes found plus those written meanwhile; return it."""
        meanwhile_bytes = max((self.kept_bytes() or 0) - kept_before_bytes, 0)
        kept_bytes = found_bytes + meanwhile_bytes
        self._filesystem.resize(self._tally, kept_bytes // PAGE_BYTES)
        return kept_bytes

    def collect_ages(self, shards: Sequence[str], ages: Ages) -> None:
        """Add the files of these shards to `ages`; delete old temporary files of dead writers."""
        for path, file in self._files(shards):
            is_old = file.modified_ms < self._scanned_ms - TEMP_LIFE_MS
            if is_old and file.name.endswith(TEMP_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.unlink(path / file.name)
            else:
                ages.add(file.modified_ms, size_on_disk(file.size_bytes))

    def evict(self, shards: Sequence[str], eviction: Eviction) -> tuple[int, int]:
        """Delete the files of `eviction` in these shards; return their number and bytes."""
        files = freed_bytes = 0
        for path, file in self._files(shards):
            size_bytes = size_on_disk(file.size_bytes)
            if not eviction.includes(file.modified_ms, size_bytes):
                continue
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.unlink(path / file.name)
            files += 1
            freed_bytes += size_bytes
        return files, freed_bytes

    def _files(self, shards: Sequence[str]) -> Iterator[tuple[Path, ListedFile]]:
        """Iterate over the files of caches in these shards, each with its folder."""
        for shard in shards:
            path = self._root / shard
            try:
                files = self._filesystem.list_files(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for file in files:
                if is_ours(file.name):
                    yield path, file

    def _load_scan_time(self) -> None:
        with contextlib.suppress(OSError):  # then the previous value stays
            self._scanned_ms = self._filesystem.stat(self._lock).modified_ms

    def _path(self, part: CachedPart) -> Path:
        name = part.file_name
        return self._root / name[:2] / name
