"""Files on a local disk: the calls to the operating system, and changes that survive a power cut.

`FileSystem` makes the system calls of local stores, caches and logs; a test can replace it.
`DurableFiles` makes the changes of a local store and of the logs of a safekeeper durable, and
refuses all changes after a failed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from shalekv.errors import LogDamaged, StoreBroken

NEW_FILE_MODE = 0o666  # the umask of the process decides
NEW_FOLDER_MODE = 0o777  # as above

# A symbolic link is never followed: it might lead to a file of somebody else.
_NEW_OR_OLD = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

# Writing 64 MiB in one call took up to five times as long as in pieces of this size, presumably
# because the page cache then needs larger blocks. The pieces are not smaller, because the thread
# has to wait for the GIL after each.
WRITE_BYTES_MAX = 1 << 20

_NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # on Linux

# Errors that say that there is no space on the disk, or for another file.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, slots=True)
class FileStatus:
    """Status of a file or folder."""

    is_file: bool  # a regular file: not a folder, link, pipe or device
    size_bytes: int
    modified_ms: int
    links: int  # names that this file has
    device: int
    inode: int


class FolderEntry(NamedTuple):
    """A name in a folder."""

    name: str
    is_folder: bool


class ListedFile(NamedTuple):
    """A regular file in a folder."""

    name: str
    size_bytes: int
    modified_ms: int


class FileLock:
    """A lock on a file. It ends with `release`, with the last reference to this, or the process."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Unlock the file; another call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FileSystem:
    """The operating system's files. Every method blocks and raises `OSError` as `os` does.

    Paths are absolute. The caller closes with `close` each descriptor that it opens here.
    """

    def create(self, path: Path) -> int:
        """Open a new, empty file for writing. Raises `FileExistsError` if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags, NEW_FILE_MODE)

    def open(self, path: Path) -> int:
        """Open a file for reading; a symbolic link is not followed."""
        # Without O_NONBLOCK, a pipe in the folder would block forever.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_update(self, path: Path) -> int:
        """Open an existing file for reading and writing; a symbolic link is not followed."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_folder(self, path: Path) -> int:
        """Open a folder, to sync it."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`; return how many bytes."""
        return os.write(descriptor, data[:WRITE_BYTES_MAX])

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        """Read at most `length` bytes from `offset`; none at the end of the file."""
        return os.pread(descriptor, length, offset)

    def pread_now(self, descriptor: int, length: int, offset: int) -> bytes | None:
        """Read at most `length` bytes that are in the page cache; None: not all of them may be.

        It never waits for the disk.
        """
        if _NO_WAIT is None:
            return None
        buffer = bytearray(length)
        try:
            count = os.preadv(descriptor, (buffer,), offset, _NO_WAIT)
        except OSError:  # it would wait, or this file system cannot tell
            return None
        return bytes(buffer) if count == length else None

    def fsync(self, descriptor: int) -> None:
        """Make a file's bytes, or a folder's entries, survive a power cut."""
        if sys.platform == "darwin":  # whose fsync leaves the data in the cache of the drive
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at `offset`; return how many bytes."""
        return os.pwrite(descriptor, data[:WRITE_BYTES_MAX], offset)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Extend a file to this size with zeros, and allocate the space for them on the disk."""
        if sys.platform == "darwin":  # which has no call for it
            zeros = memoryview(bytes(WRITE_BYTES_MAX))
            offset = os.fstat(descriptor).st_size
            while offset < size_bytes:
                offset += os.pwrite(descriptor, zeros[: size_bytes - offset], offset)
        else:
            os.posix_fallocate(descriptor, 0, size_bytes)

    def sync_data(self, descriptor: int) -> None:
        """Make a file's bytes survive a power cut, with only the metadata needed to read them."""
        if sys.platform == "darwin":
            self.fsync(descriptor)
        else:
            os.fdatasync(descriptor)

    def drop_cached(self, descriptor: int) -> None:
        """Drop a file from the page cache, where the system can, so that reads go to the disk."""
        if sys.platform != "darwin":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def link(self, existing: Path, new: Path) -> None:
        """Give a file a second name, atomically. Raises `FileExistsError` if the name is taken."""
        os.link(existing, new)

    def unlink(self, path: Path) -> None:
        """Remove a name of a file."""
        path.unlink()

    def mkdir(self, path: Path) -> None:
        """Make a folder in an existing one."""
        path.mkdir(NEW_FOLDER_MODE)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def may_write(self, folder: Path) -> bool:
        """Return whether this process may make entries in a folder."""
        return os.access(folder, os.W_OK)

    def stat(self, path: Path) -> FileStatus:
        """Read the status of the file of this name; a symbolic link is not followed."""
        return _status(path.stat(follow_symlinks=False))

    def stat_folder(self, path: Path) -> FileStatus:
        """Read the status of a folder; a symbolic link to one is followed."""
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return _status(status)

    def fstat(self, descriptor: int) -> FileStatus:
        """Read the status of an open file."""
        return _status(os.fstat(descriptor))

    def touch(self, path: Path) -> FileStatus:
        """Set the modification time of a file to the present; create it if it is missing."""
        descriptor = os.open(path, os.O_WRONLY | _NEW_OR_OLD, NEW_FILE_MODE)
        try:
            os.utime(descriptor)
            return _status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def touch_open(self, descriptor: int) -> None:
        """Set the modification time of an open file to the present."""
        os.utime(descriptor)

    def rename(self, existing: Path, new: Path) -> None:
        """Give a file another name, atomically; a file that had the name is replaced."""
        existing.replace(new)

    def append(self, path: Path, data: bytes) -> FileStatus:
        """Append `data` to an existing file in one piece, also beside appends of others."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(descriptor, data)
            return _status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def resize(self, path: Path, size_bytes: int) -> None:
        """Cut a file to this size, or extend it with zeros; create it if it is missing."""
        descriptor = os.open(path, os.O_WRONLY | _NEW_OR_OLD, NEW_FILE_MODE)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that can still be allocated on the file system of this path."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def try_lock(self, path: Path) -> FileLock | None:
        """Lock a file, created if it is missing; return None if it is locked elsewhere."""
        descriptor = os.open(path, os.O_RDWR | _NEW_OR_OLD, NEW_FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return FileLock(descriptor)

    def now_ms(self) -> int:
        """Return the time, by the clock that sets modification times on disks of this machine."""
        return time.time_ns() // 1_000_000

    def list_files(self, path: Path) -> list[ListedFile]:
        """List the regular files in a folder, in no order, without those that vanish meanwhile."""
        files = []
        with os.scandir(path) as entries:
            for at in entries:
                with contextlib.suppress(FileNotFoundError):
                    if at.is_file(follow_symlinks=False):
                        status = at.stat(follow_symlinks=False)
                        modified_ms = status.st_mtime_ns // 1_000_000
                        files.append(ListedFile(at.name, status.st_size, modified_ms))
        return files

    def list_folder(self, path: Path) -> list[FolderEntry]:
        """List the names in a folder, in no order.

        The folder is read piece by piece: others may change it between two pieces.
        """
        with os.scandir(path) as entries:
            return [FolderEntry(at.name, at.is_dir(follow_symlinks=False)) for at in entries]


def _status(status: os.stat_result) -> FileStatus:
    return FileStatus(
        is_file=stat.S_ISREG(status.st_mode),
        size_bytes=status.st_size,
        modified_ms=status.st_mtime_ns // 1_000_000,
        links=status.st_nlink,
        device=status.st_dev,
        inode=status.st_ino,
    )


REAL_FILE_SYSTEM = FileSystem()


class DurableFiles:
    """The files of one disk: none is changed any more once a sync or a write in place has failed.

    After a failed sync the kernel may have dropped the data and marked it clean: a second sync
    would succeed without effect. A failed write in place leaves unknown contents. So nothing is
    written until the process is started again and reads what is really on the disk.

    Two failures do not count: that of an allocation, since nothing was written to the new space
    yet, and that of a read, since an unreadable part of a log counts as lost, like corrupt bytes.

    Everything blocks, and may be called by several threads.
    """

    def __init__(self, filesystem: FileSystem, name: str, *, free_bytes_min: int = 0) -> None:
        """`name` is the disk's name in errors. At least `free_bytes_min` of it is left free."""
        self.filesystem = filesystem
        self._name = name
        self._free_bytes_min = free_bytes_min
        self._problem: str | None = None  # why nothing more may be written
        self._durable_folders: set[Path] = set()

    def check(self, operation: str, path: Path) -> None:
        """Raise `StoreBroken` if nothing may be written any more."""
        if self._problem is not None:
            raise StoreBroken(self._name, operation, str(path), self._problem)

    def fail(
        self, operation: str, path: Path, problem: str, cause: OSError | None = None
    ) -> NoReturn:
        """Raise `StoreBroken`, and refuse all changes from now on."""
        message = f"nothing is written any more since {operation} of {path}: {problem}"
        self._problem = self._problem or message
        raise StoreBroken(self._name, operation, str(path), message) from cause

    def fail_unknown(self, operation: str, path: Path, error: OSError) -> NoReturn:
        """Fail for good, since after `error` the contents of the disk are unknown: see `fail`."""
        problem = f"{error.strerror}; what is on the disk is unknown: check it, then start again"
        self.fail(operation, path, problem, error)

    @contextmanager
    def changing(self, operation: str, path: Path) -> Iterator[None]:
        """Treat any `OSError` in this context as a failure of the disk: see `fail`."""
        self.check(operation, path)
        try:
            yield
        except OSError as error:
            self.fail_unknown(operation, path, error)

    # Folders.

    def ensure_folder(self, folder: Path) -> None:
        """Make a folder and those above it, durably. Raises `OSError` when it cannot be made."""
        self.check("mkdir", folder)
        parent = folder.parent
        if folder in self._durable_folders or folder == parent:
            return
        try:
            status = self.filesystem.stat_folder(folder)
        except FileNotFoundError:
            self.ensure_folder(parent)
            self._make_folder(folder)
            status = self.filesystem.stat_folder(folder)
        # The parents of existing folders are synced too: another process may have made them a
        # moment ago. The recursion ends at the root of the file system.
        if self.filesystem.stat_folder(parent).device == status.device:
            self._make_durable(parent)
        self._durable_folders.add(folder)

    def forget_folders(self) -> None:
        """Forget which folders are durable, since one has been removed: see `ensure_folder`."""
        self._durable_folders.clear()

    def _make_folder(self, folder: Path) -> None:
        try:
            self.filesystem.mkdir(folder)
        except FileExistsError:
            return  # another process was faster
        except FileNotFoundError as error:
            self.filesystem.stat_folder(folder.parent)  # it may have been removed meanwhile
            # Some file systems, such as /proc, accept no new folders.
            problem = f"no folder can be made in {folder.parent}"
            raise OSError(errno.EOPNOTSUPP, problem) from error

    def _make_durable(self, parent: Path) -> None:
        try:
            self.try_sync_folder(parent)
        except PermissionError:
            if self.filesystem.may_write(parent):
                raise  # entries of this folder cannot be made durable
            return  # this process cannot have made it: it was made with other rights, long ago
        self.ensure_folder(parent)

    def sync(self, descriptor: int, path: Path) -> None:
        """Make an open file, or the names in an open folder, survive a power cut."""
        self.check("fsync", path)
        try:
            self.filesystem.fsync(descriptor)
        except OSError as error:
            self.fail_unknown("fsync", path, error)

    def try_sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable. Raises `OSError` when it cannot be opened."""
        descriptor = self.filesystem.open_folder(folder)
        try:
            self.sync(descriptor, folder)
        finally:
            self.filesystem.close(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable; fail for good when it cannot be opened."""
        with self.changing("fsync", folder):
            self.try_sync_folder(folder)

    def list_files(self, folder: Path) -> list[ListedFile]:
        """List the files in a folder, by name."""
        with self.reading("list", folder):
            return sorted(self.filesystem.list_files(folder))

    def list_folders(self, folder: Path) -> list[str]:
        """List the names of the folders in a folder, in order."""
        with self.reading("list", folder):
            entries = self.filesystem.list_folder(folder)
        return sorted(entry.name for entry in entries if entry.is_folder)

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

    # Files.

    def open(self, path: Path) -> OpenFile:
        """Open a file to read and to write. Raises `FileNotFoundError`."""
        with self.reading("open", path):
            return OpenFile(self, path, self.filesystem.open_update(path))

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Read bytes of a file, fewer at its end. Raises `FileNotFoundError`, `LogDamaged`."""
        with reading_bytes(path):
            descriptor = self.filesystem.open(path)
            try:
                return self.pread(descriptor, offset, length)
            finally:
                self.filesystem.close(descriptor)

    def pread(self, descriptor: int, offset: int, length: int) -> bytes:
        """Read bytes of an open file, fewer at its end. Raises `OSError`."""
        pieces = []
        while length > 0:
            piece = self.filesystem.pread(descriptor, length, offset)
            if not piece:
                break  # the file may have been cut meanwhile: the checksums inside it show that
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return b"".join(pieces)

    def allocate(self, path: Path, size_bytes: int) -> bool:
        """Create a file of zeros with allocated space; return False if there is no space.

        Neither it nor its name is durable.
        """
        self.check("allocate", path)
        try:
            descriptor = self.filesystem.create(path)
        except OSError as error:
            self.check_full("allocate", path, error)
            return False
        try:
            try:
                self.filesystem.allocate(descriptor, size_bytes)
            finally:
                self.filesystem.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next start finds and removes it
                self.filesystem.unlink(path)
            self.check_full("allocate", path, error)
            return False
        return True

    def leaves_enough(self, folder: Path, size_bytes: int) -> bool:
        """Return whether enough of the disk stays free when `size_bytes` more of it are used."""
        if not self._free_bytes_min:
            return True
        with self.reading("statvfs", folder):
            free_bytes = self.filesystem.free_bytes(folder)
        return free_bytes - size_bytes >= self._free_bytes_min

    def check_full(self, operation: str, path: Path, error: OSError) -> None:
        """Fail for good unless `error` only says that there is no space."""
        if error.errno not in _NO_SPACE:
            self.fail(operation, path, str(error.strerror), error)

    @contextmanager
    def reading(self, operation: str, path: Path) -> Iterator[None]:
        """Fail for good when the disk cannot read in this context; pass other errors on."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.EIO:
                self.fail(operation, path, "the disk cannot read it", error)
            raise


@contextmanager
def reading_bytes(path: Path) -> Iterator[None]:
    """Raise `LogDamaged` for an unreadable sector, which concerns only one log."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise LogDamaged(f"{path}: the disk cannot read it") from error
        raise


class OpenFile:
    """A file that is read and written in place. It is used by one thread at a time."""

    def __init__(self, files: DurableFiles, path: Path, descriptor: int) -> None:
        """Use `DurableFiles.open` instead."""
        self.path = path
        self._files = files
        self._descriptor = descriptor

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        with self._files.reading("stat", self.path):
            return self._files.filesystem.fstat(self._descriptor).size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes, fewer at the end of the file. Raises `LogDamaged`."""
        with reading_bytes(self.path):
            return self._files.pread(self._descriptor, offset, length)

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
            self._files.check_full("allocate", self.path, error)
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
