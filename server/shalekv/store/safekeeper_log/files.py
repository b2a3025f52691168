"""The file system for logs of members; after a failed change nothing is written any more.

After a failed sync the kernel may have dropped the data and marked it clean: another sync would
succeed without effect. A failed write leaves unknown contents. So both end the process, and the
next one reads what is really on the disk. The allocation of space may fail, since no record rests
on a file that was never used. A read may fail, too: an unreadable part counts as lost, as if its
bits had rotted.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shalekv.errors import LogDamaged, StoreBroken
from shalekv.store.files import FileSystem, ListedFile

# Errors that say that there is no space on the disk, or for another file.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})


class Files:
    """The files of all members of a node: if the disk fails for one, it fails for all.

    Everything blocks, and may be called by several threads.
    """

    def __init__(self, filesystem: FileSystem, name: str, *, free_bytes_min: int = 0) -> None:
        """`name` is the disk's name in errors. At least `free_bytes_min` of it is left free."""
        self.filesystem = filesystem
        self._free_bytes_min = free_bytes_min
        self._name = name
        self._problem: str | None = None

    def check(self, operation: str, path: Path) -> None:
        """Raise `StoreBroken` if nothing may be written any more."""
        if self._problem is not None:
            raise StoreBroken(self._name, operation, str(path), self._problem)

    def fail(self, operation: str, path: Path, problem: str) -> NoReturn:
        """Raise `StoreBroken`, and refuse all changes from now on."""
        message = f"nothing is written any more since {operation} of {path}: {problem}"
        self._problem = self._problem or message
        raise StoreBroken(self._name, operation, str(path), message)

    @contextmanager
    def changing(self, operation: str, path: Path) -> Iterator[None]:
        """Treat any `OSError` in this context as a failure of the disk: see `fail`."""
        self.check(operation, path)
        try:
            yield
        except OSError as error:
            problem = (
                f"{error.strerror}; what is on the disk is unknown: check it, then start again"
            )
            self.fail(operation, path, problem)

    def open(self, path: Path) -> OpenFile:
        """Open a file to read and to write. Raises `FileNotFoundError`."""
        with self._reading("open", path):
            return OpenFile(self, path, self.filesystem.open_update(path))

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Read bytes of a file, fewer at its end. Raises `FileNotFoundError`, `LogDamaged`."""
        with self._reading_bytes(path):
            descriptor = self.filesystem.open(path)
            try:
                return self._pread(descriptor, offset, length)
            finally:
                self.filesystem.close(descriptor)

    def allocate(self, path: Path, size_bytes: int) -> bool:
        """Create a file of zeros with allocated space; return False if there is no space.

        Neither it nor its name is durable.
        """
        self.check("allocate", path)
        try:
            descriptor = self.filesystem.create(path)
        except OSError as error:
            self._check_full("allocate", path, error)
            return False
        try:
            try:
                self.filesystem.allocate(descriptor, size_bytes)
            finally:
                self.filesystem.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next start finds and removes it
                self.filesystem.unlink(path)
            self._check_full("allocate", path, error)
            return False
        return True

    def leaves_enough(self, folder: Path, size_bytes: int) -> bool:
        """Whether enough of the disk stays free when `size_bytes` more of it are used."""
        if not self._free_bytes_min:
            return True
        with self._reading("statvfs", folder):
            free_bytes = self.filesystem.free_bytes(folder)
        return free_bytes - size_bytes >= self._free_bytes_min

    def rename(self, existing: Path, new: Path) -> None:
        """Give a file or folder another name."""
        with self.changing("rename", existing):
            self.filesystem.rename(existing, new)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        with self.changing("unlink", path), contextlib.suppress(FileNotFoundError):
            self.filesystem.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        with self.changing("rmdir", path):
            self.filesystem.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        with self.changing("fsync", path):
            descriptor = self.filesystem.open_folder(path)
            try:
                self.filesystem.fsync(descriptor)
            finally:
                self.filesystem.close(descriptor)

    def list_files(self, folder: Path) -> list[ListedFile]:
        """List the files in a folder, by name."""
        with self._reading("list", folder):
            return sorted(self.filesystem.list_files(folder))

    def list_folders(self, folder: Path) -> list[str]:
        """List the names of the folders in a folder, in order."""
        with self._reading("list", folder):
            entries = self.filesystem.list_folder(folder)
        return sorted(entry.name for entry in entries if entry.is_folder)

    def _pread(self, descriptor: int, offset: int, length: int) -> bytes:
        pieces = []
        while length > 0:
            piece = self.filesystem.pread(descriptor, length, offset)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _check_full(self, operation: str, path: Path, error: OSError) -> None:
        """Fail for good unless `error` only says that there is no space."""
        if error.errno not in _NO_SPACE:
            self.fail(operation, path, str(error.strerror))

    @contextmanager
    def _reading_bytes(self, path: Path) -> Iterator[None]:
        """Raise `LogDamaged` for an unreadable sector, which concerns only one member."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.EIO:
                raise LogDamaged(f"{path}: the disk cannot read it") from error
            raise

    @contextmanager
    def _reading(self, operation: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EIO:
                self.fail(operation, path, "the disk cannot read it")
            raise


class OpenFile:
    """A file that is read and written in place. It is used by one thread at a time."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        """Use `Files.open` instead."""
        self.path = path
        self._files = files
        self._descriptor = descriptor

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        with self._files._reading("stat", self.path):  # noqa: SLF001  (two halves of one thing)
            return self._files.filesystem.fstat(self._descriptor).size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes, fewer at the end of the file. Raises `LogDamaged`."""
        with self._files._reading_bytes(self.path):  # noqa: SLF001
            return self._files._pread(self._descriptor, offset, length)  # noqa: SLF001

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at `offset`; they are durable after `sync`."""
        with self._files.changing("write", self.path):
            unwritten = memoryview(data)
            while unwritten:
                count = self._files.filesystem.pwrite(self._descriptor, unwritten, offset)
                unwritten = unwritten[count:]
                offset += count

    def allocate(self, size_bytes: int) -> bool:
        """Allocate the space of the first `size_bytes`; return False if there is no space."""
        self._files.check("allocate", self.path)
        try:
            self._files.filesystem.allocate(self._descriptor, size_bytes)
        except OSError as error:
            self._files._check_full("allocate", self.path, error)  # noqa: SLF001
            return False
        return True

    def sync(self) -> None:
        """Make the file's bytes durable."""
        with self._files.changing("fdatasync", self.path):
            self._files.filesystem.sync_data(self._descriptor)

    def sync_and_drop_cache(self) -> None:
        """Sync writes of an earlier process, and drop the page cache, so that reads use the disk.

        Bytes that a failed sync has dropped may still be in the page cache as if they were written.
        """
        self.sync()
        with contextlib.suppress(OSError):  # optional; a failing disk is detected by reads
            self._files.filesystem.drop_cached(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # everything that matters was synced
                self._files.filesystem.close(descriptor)
