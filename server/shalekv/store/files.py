"""The calls to the operating system that local stores and caches make.

A test can stand below them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NEW_FILE_MODE = 0o666  # the umask of the process decides
NEW_FOLDER_MODE = 0o777  # as above

# 64 MiB in one write took up to five times as long as in such pieces, presumably because the page
# cache wants larger blocks then. After each piece the thread has to wait for the GIL: not smaller.
WRITE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What the file system says about a file or folder."""

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
    """A file that is locked until `release`, or until nobody holds this, or the process ends."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Unlock it, once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FileSystem:
    """The operating system's files. Every method blocks and raises what `os` raises.

    Paths are absolute. A descriptor that is opened here is closed with `close`.
    """

    def create(self, path: Path) -> int:
        """A descriptor that writes to a new, empty file; `FileExistsError` if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags, NEW_FILE_MODE)

    def open(self, path: Path) -> int:
        """A descriptor that reads a file; a symbolic link is not followed."""
        # Without O_NONBLOCK, a pipe that somebody left in the folder would block for ever.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_update(self, path: Path) -> int:
        """A descriptor that reads and writes an existing file; no symbolic link is followed."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_folder(self, path: Path) -> int:
        """A descriptor that syncs a folder."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`: how many bytes."""
        return os.write(descriptor, data[:WRITE_BYTES_MAX])

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        """At most `length` bytes from `offset` on; none at the end of the file."""
        return os.pread(descriptor, length, offset)

    def fsync(self, descriptor: int) -> None:
        """Make a file's bytes, or a folder's entries, survive a power cut."""
        if sys.platform == "darwin":  # whose fsync leaves the data in the cache of the drive
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at `offset`: how many bytes."""
        return os.pwrite(descriptor, data[:WRITE_BYTES_MAX], offset)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Extend a file to this size with zeros, and take the space for them on the disk."""
        if sys.platform == "darwin":  # which has no call for it
            zeros = memoryview(bytes(WRITE_BYTES_MAX))
            offset = os.fstat(descriptor).st_size
            while offset < size_bytes:
                offset += os.pwrite(descriptor, zeros[: size_bytes - offset], offset)
        else:
            os.posix_fallocate(descriptor, 0, size_bytes)

    def sync_data(self, descriptor: int) -> None:
        """Make a file's bytes survive a power cut, and of its status what it takes to read them."""
        if sys.platform == "darwin":
            self.fsync(descriptor)
        else:
            os.fdatasync(descriptor)

    def drop_cached(self, descriptor: int) -> None:
        """Have the next reads of a file come from the disk, where the system allows it."""
        if sys.platform != "darwin":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def link(self, existing: Path, new: Path) -> None:
        """Give a file a second name, atomically; `FileExistsError` if the name is taken."""
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
        """Whether this process may make entries in a folder."""
        return os.access(folder, os.W_OK)

    def stat(self, path: Path) -> FileStatus:
        """What the file system says about the file of this name; a link is not followed."""
        return _status(path.stat(follow_symlinks=False))

    def stat_folder(self, path: Path) -> FileStatus:
        """What the file system says about a folder; a symbolic link to one is followed."""
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return _status(status)

    def fstat(self, descriptor: int) -> FileStatus:
        """What the file system says about an open file."""
        return _status(os.fstat(descriptor))

    def touch(self, path: Path) -> FileStatus:
        """Set the modification time of a file, which is made if need be, to the present."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, NEW_FILE_MODE)
        try:
            os.utime(descriptor)
            return _status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def touch_open(self, descriptor: int) -> None:
        """Set the modification time of an open file to the present."""
        os.utime(descriptor)

    def rename(self, existing: Path, new: Path) -> None:
        """Give a file another name, atomically; who has that name loses it."""
        existing.replace(new)

    def append(self, path: Path, data: bytes) -> FileStatus:
        """Add `data` to the end of an existing file, in one piece whoever else does."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, data)
            return _status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def resize(self, path: Path, size_bytes: int) -> None:
        """Cut a file, or extend it with zeros; it is made if need be."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, NEW_FILE_MODE)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """What may still be allocated on the file system of a file or folder."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def try_lock(self, path: Path) -> FileLock | None:
        """The lock of a file, which is made if need be; None: somebody else has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, NEW_FILE_MODE)
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
        """The present, by the clock that sets modification times on a disk of this machine."""
        return time.time_ns() // 1_000_000

    def list_files(self, path: Path) -> list[ListedFile]:
        """The regular files in a folder, in no order; those that vanish meanwhile are left out."""
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
        """The names in a folder, in no order, and read piece by piece: others may change it
        between two pieces.
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
