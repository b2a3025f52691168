"""Calls to the file system that logs rest on; after a failed one nothing is written any more.

After a failed sync the kernel may have dropped the data and call it clean: another sync would
succeed and mean nothing. A write that failed has left nobody knows what. So both end the process,
and the next one reads what is really there. The taking of space may fail: nothing rests on a file
that was never used. So may reading: what cannot be read is lost, as if its bits had rotted.
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

# What says that there is no room: on the disk, or for another file.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})


class Files:
    """The files of all members of a node, which share the fate of their disk.

    Everything blocks, and may be called by several threads.
    """

    def __init__(self, filesystem: FileSystem, name: str, *, free_bytes_min: int = 0) -> None:
        """`name` is what errors call the disk. So much of it is to be left free."""
        self.filesystem = filesystem
        self._free_bytes_min = free_bytes_min
        self._name = name
        self._problem: str | None = None

    def check(self, operation: str, path: Path) -> None:
        """Raise `StoreBroken` if nothing more may be written."""
        if self._problem is not None:
            raise StoreBroken(self._name, operation, str(path), self._problem)

    def give_up(self, operation: str, path: Path, problem: str) -> NoReturn:
        """Have everything fail from now on."""
        message = f"nothing is written any more since {operation} of {path}: {problem}"
        self._problem = self._problem or message
        raise StoreBroken(self._name, operation, str(path), message)

    @contextmanager
    def changing(self, operation: str, path: Path) -> Iterator[None]:
        """Whatever fails in here leaves the disk unknown."""
        self.check(operation, path)
        try:
            yield
        except OSError as error:
            problem = (
                f"{error.strerror}; what is on the disk is unknown: check it, then start again"
            )
            self.give_up(operation, path, problem)

    def open(self, path: Path) -> OpenFile:
        """A file to read and to write. Raises `FileNotFoundError`."""
        with self._reading("open", path):
            return OpenFile(self, path, self.filesystem.open_update(path))

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Bytes of a file, fewer at its end. Raises `FileNotFoundError`, `LogDamaged`."""
        with self._reading_bytes(path):
            descriptor = self.filesystem.open(path)
            try:
                return self._pread(descriptor, offset, length)
            finally:
                self.filesystem.close(descriptor)

    def allocate(self, path: Path, size_bytes: int) -> bool:
        """Make a file of zeros that has its space on the disk; False: there is no room.

        Neither it nor its name is durable.
        """
        self.check("allocate", path)
        try:
            descriptor = self.filesystem.create(path)
        except OSError as error:
            self._excuse("allocate", path, error)
            return False
        try:
            try:
                self.filesystem.allocate(descriptor, size_bytes)
            finally:
                self.filesystem.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # found and removed at the next start
                self.filesystem.unlink(path)
            self._excuse("allocate", path, error)
            return False
        return True

    def leaves_enough(self, folder: Path, size_bytes: int) -> bool:
        """Whether enough of the disk stays free when so much more of it is taken."""
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
        """Remove a file, if it is there."""
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
        """The files in a folder, by name."""
        with self._reading("list", folder):
            return sorted(self.filesystem.list_files(folder))

    def list_folders(self, folder: Path) -> list[str]:
        """The names of the folders in a folder, in order."""
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

    def _excuse(self, operation: str, path: Path, error: OSError) -> None:
        if error.errno not in _NO_ROOM:
            self.give_up(operation, path, str(error.strerror))

    @contextmanager
    def _reading_bytes(self, path: Path) -> Iterator[None]:
        """A sector that is lost concerns one member."""
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
                self.give_up(operation, path, "the disk cannot read it")
            raise


class OpenFile:
    """A file that is read and written in place. It is used by one thread at a time."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        """`Files.open` makes it."""
        self.path = path
        self._files = files
        self._descriptor = descriptor

    @property
    def size_bytes(self) -> int:
        """Its length."""
        with self._files._reading("stat", self.path):  # noqa: SLF001  (two halves of one thing)
            return self._files.filesystem.fstat(self._descriptor).size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of it, fewer at its end. Raises `LogDamaged`."""
        with self._files._reading_bytes(self.path):  # noqa: SLF001
            return self._files._pread(self._descriptor, offset, length)  # noqa: SLF001

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite bytes; they need not be durable."""
        with self._files.changing("write", self.path):
            unwritten = memoryview(data)
            while unwritten:
                count = self._files.filesystem.pwrite(self._descriptor, unwritten, offset)
                unwritten = unwritten[count:]
                offset += count

    def reserve(self, size_bytes: int) -> bool:
        """See to it that the space of its first bytes is there; False: there is no room."""
        self._files.check("allocate", self.path)
        try:
            self._files.filesystem.allocate(self._descriptor, size_bytes)
        except OSError as error:
            self._files._excuse("allocate", self.path, error)  # noqa: SLF001
            return False
        return True

    def sync(self) -> None:
        """Make its bytes durable."""
        with self._files.changing("fdatasync", self.path):
            self._files.filesystem.sync_data(self._descriptor)

    def settle(self) -> None:
        """Make durable what is left from an earlier process, and read from the disk from now on.

        What a failed sync has dropped may still be in memory, and look as if it were written.
        """
        self.sync()
        with contextlib.suppress(OSError):  # a wish; a disk that cannot read will say so
            self._files.filesystem.drop_cached(self._descriptor)

    def close(self) -> None:
        """Give it back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # what counts was synced
                self._files.filesystem.close(descriptor)
