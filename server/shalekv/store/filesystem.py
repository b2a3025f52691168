"""The calls to the operating system that a local store makes, so that a test can stand below it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A name in a folder."""

    name: str
    is_folder: bool


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

    def list_folder(self, path: Path) -> list[FolderEntry]:
        """The names in a folder, in no order."""
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
