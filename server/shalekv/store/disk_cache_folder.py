"""The folder of a cache on disk, which processes share without asking each other.

    <path>/shalekv-parts/xx/<name>      a part (see `shalekv.store.disk_cache_part`)
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from shalekv.store.disk_cache_ages import Ages, Cut
from shalekv.store.disk_cache_part import (
    PAGE_BYTES,
    TEMP_SUFFIX,
    Part,
    from_file,
    is_ours,
    on_disk,
    to_file,
)
from shalekv.store.files import REAL_FILE_SYSTEM, FileLock, FileSystem, ListedFile

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

    def read(self, parts: Sequence[Part]) -> Looked:
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

    def delete(self, parts: Sequence[Part]) -> None:
        """Delete these, if they are here and may be deleted."""
        for part in parts:
            with contextlib.suppress(OSError):
                self._filesystem.unlink(self._path(part))

    def write(self, batch: Sequence[tuple[Part, bytes]], bytes_max: int) -> int | None:
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

    def _path(self, part: Part) -> Path:
        name = part.file_name
        return self._root / name[:2] / name
