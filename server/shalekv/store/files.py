"""Files on a local disk: the calls to the operating system, and files that survive a power cut.

`FileSystem` makes the system calls of local stores, caches and logs; a test can replace it.
`Disk` creates the objects of a local store in these steps. After a power cut, each step that was
not synced may or may not have happened, whatever came before or after it:

    make the folder, sync every folder above it        so that the folder survives
    write <name>.<random>.tmp in the folder, sync it   so that no half object gets a name
    link it to <name>                                  the compare-and-swap: one process wins
    sync the folder                                    so that the name survives
    remove <name>.<random>.tmp                         last: see `Disk.sync_seen`
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from shalekv.errors import StoreBroken
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown

NEW_FILE_MODE = 0o666  # the umask of the process decides
NEW_FOLDER_MODE = 0o777  # as above

# Writing 64 MiB in one call took up to five times as long as in pieces of this size, presumably
# because the page cache then needs larger blocks. The pieces are not smaller, because the thread
# has to wait for the GIL after each.
WRITE_BYTES_MAX = 1 << 20

# Files with a second name whose folders were synced: the most that is remembered, unless one list
# shows more; some 2 MB. A file that is forgotten costs another sync of its folder.
SEEN_SYNCED_MAX_COUNT = 4_096

# Errors of `link` after which it has done nothing; after any other the name may exist.
_LINK_REFUSALS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EMLINK,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EROFS,
    }
)
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


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
        """Whether this process may make entries in a folder."""
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
        """Give a file another name, atomically; a file that had the name is replaced."""
        existing.replace(new)

    def append(self, path: Path, data: bytes) -> FileStatus:
        """Append `data` to an existing file in one piece, also beside appends of others."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, data)
            return _status(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def resize(self, path: Path, size_bytes: int) -> None:
        """Cut a file to this size, or extend it with zeros; create it if it is missing."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, NEW_FILE_MODE)
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


class Disk:
    """Creates files and folders durably, and refuses to write after a failed sync.

    After a failed sync the kernel may have dropped the data and marked it clean: a second sync
    would succeed without effect. So nothing is written until the process is started again and
    reads what is really on the disk. An I/O error (EIO) counts the same. A full disk does not, if
    a write or a link reports it, which then has done nothing. A full disk that only the sync
    reports counts as a failed sync, since it is unknown what was kept.
    """

    def __init__(self, filesystem: FileSystem, url: str) -> None:
        self._filesystem = filesystem
        self._url = url
        self._problem: str | None = None  # why nothing more may be written
        self._durable_folders: set[Path] = set()
        self._seen_synced: set[tuple[Path, int]] = set()

    def check(self, operation: str, path: Path) -> None:
        """Raise `StoreBroken` if nothing may be written any more."""
        if self._problem is not None:
            raise StoreBroken(self._url, operation, str(path), self._problem)

    def create(self, path: Path, temp_path: Path, data: bytes) -> CreateOutcome:
        """Create a file at `path` if there is none; `temp_path` is a new name in the same folder.

        Raises `OSError` when nothing was created, and `StoreBroken`, after which the file may
        exist or not.
        """
        self.check("create", path)
        folder = path.parent
        try:
            self._ensure_folder(folder)
            # Opened before the link, so that an error in writing the link back is reported to this
            # descriptor, and so that nothing is linked that cannot be synced.
            folder_descriptor = self._filesystem.open_folder(folder)
            try:
                self._write(temp_path, data)
                return self._link(temp_path, path, folder_descriptor)
            finally:
                with contextlib.suppress(OSError):  # the outcome does not depend on it
                    self._filesystem.close(folder_descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                self._break("create", path, _disk_unknown(error), error)
            if error.errno == errno.ENOENT:  # the folder or the temporary file was removed
                self._durable_folders.clear()
            raise

    def sync_folder(self, folder: Path) -> None:
        """Make the current entries of a folder survive a power cut."""
        descriptor = self._filesystem.open_folder(folder)
        try:
            self._sync(descriptor, folder)
        finally:
            self._filesystem.close(descriptor)

    def sync_seen(self, files: Mapping[Path, FileStatus]) -> None:
        """Make files, by path, durable before a reader sees them.

        A creator removes the temporary name after it has synced the folder. So a file that still
        has a second name may vanish in a power cut, and a reader of it would later see the
        database go back (I6): the folder of such a file is synced first. Other files cost
        nothing. A file that has a second name because of a backup is synced once, as a rule.
        """
        linked = {(path, file.inode) for path, file in files.items() if file.links > 1}
        fresh = linked - self._seen_synced
        for folder in {path.parent for path, _ in fresh}:
            self.sync_folder(folder)
        if len(self._seen_synced) + len(fresh) > SEEN_SYNCED_MAX_COUNT:
            self._seen_synced = linked
        else:
            self._seen_synced |= fresh

    def ensure_folder(self, folder: Path) -> None:
        """Make a folder and those above it, durably."""
        self.check("mkdir", folder)
        self._ensure_folder(folder)

    def _ensure_folder(self, folder: Path) -> None:
        parent = folder.parent
        if folder in self._durable_folders or folder == parent:
            return
        try:
            status = self._filesystem.stat_folder(folder)
        except FileNotFoundError:
            self._ensure_folder(parent)
            self._make_folder(folder)
            status = self._filesystem.stat_folder(folder)
        # The parents of existing folders are synced too: another process may have made them a
        # moment ago. The recursion ends at the root of the file system.
        if self._filesystem.stat_folder(parent).device == status.device:
            self._make_durable(parent)
        self._durable_folders.add(folder)

    def _make_folder(self, folder: Path) -> None:
        try:
            self._filesystem.mkdir(folder)
        except FileExistsError:
            return  # another process was faster
        except FileNotFoundError as error:
            self._filesystem.stat_folder(folder.parent)  # it may have been removed meanwhile
            # Some file systems, such as /proc, accept no new folders.
            problem = f"no folder can be made in {folder.parent}"
            raise OSError(errno.EOPNOTSUPP, problem) from error

    def _make_durable(self, parent: Path) -> None:
        try:
            self.sync_folder(parent)
        except PermissionError:
            if self._filesystem.may_write(parent):
                raise  # entries of this folder cannot be made durable
            return  # this process cannot have made it: it was made with other rights, long ago
        self._ensure_folder(parent)

    def _write(self, path: Path, data: bytes) -> None:
        descriptor = self._filesystem.create(path)
        try:
            try:
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[self._filesystem.write(descriptor, unwritten) :]
                self._sync(descriptor, path)
            finally:
                self._filesystem.close(descriptor)
        except OSError:
            self._discard(path)
            raise

    def _link(self, temp_path: Path, path: Path, folder_descriptor: int) -> CreateOutcome:
        try:
            self._filesystem.link(temp_path, path)
            outcome: CreateOutcome = Created()
        except FileExistsError:
            outcome = Exists()
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                self._discard(temp_path)
                self._break("create", path, "the file system has no hard links: use another", error)
            if error.errno in _LINK_REFUSALS:
                self._discard(temp_path)
                raise
            if error.errno == errno.EIO:
                raise
            return Unknown(str(error))  # the temporary name stays: see `sync_seen`
        # Before `Exists` too: the winner may not have synced yet, and the caller is about to read
        # its object and act on it.
        self._sync(folder_descriptor, path)
        self._discard(temp_path)
        return outcome

    def _sync(self, descriptor: int, path: Path) -> None:
        self.check("fsync", path)
        try:
            self._filesystem.fsync(descriptor)
        except OSError as error:
            self._break("fsync", path, _disk_unknown(error), error)

    def _discard(self, temp_path: Path) -> None:
        # If a temporary file stays, lists show it, and the collector deletes it when it is old.
        with contextlib.suppress(OSError):
            self._filesystem.unlink(temp_path)

    def _break(self, operation: str, path: Path, problem: str, error: OSError) -> NoReturn:
        message = f"nothing is written any more since {operation} of {path}: {problem}"
        self._problem = self._problem or message
        raise StoreBroken(self._url, operation, str(path), message) from error


def _disk_unknown(error: OSError) -> str:
    return f"{error.strerror}; what is on the disk is unknown: check it, then start again"
