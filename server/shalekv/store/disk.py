"""Files that survive a power cut: the order of writes and syncs that a local store rests on.

An object is created in these steps; after a power cut, each unsynced one may or may not have
happened, whatever came before or after it:

    make the folder, sync every folder above it        so that the folder survives
    write <name>.<random>.tmp in the folder, sync it   so that no half object gets a name
    link it to <name>                                  the compare-and-swap: one process wins
    sync the folder                                    so that the name survives
    remove <name>.<random>.tmp                         last: see `sync_seen`
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from shalekv.errors import StoreBroken
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from shalekv.store.files import FileStatus, FileSystem

# What `link` says when it did nothing; any other error leaves open whether the name exists.
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
# Files with a second name whose folders were synced, of which no more are kept in mind unless one
# list shows more: some 2 MB. What is forgotten costs another sync of its folder.
SEEN_SYNCED_MAX_COUNT = 4_096
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


class Disk:
    """Creates files and folders durably, and refuses to after a failed sync.

    After a failed sync the kernel may have dropped the data and call it clean: a second sync
    would succeed and mean nothing. So nothing is written any more until the process is started
    again and reads what is really there. An error of input or output (EIO) counts the same.
    A full disk does not where a write or a link tells it and does nothing; a file system that
    tells it at the sync leaves nobody knowing what it kept.
    """

    def __init__(self, filesystem: FileSystem, url: str) -> None:
        self._filesystem = filesystem
        self._url = url
        self._problem: str | None = None  # why nothing more may be written
        self._durable_folders: set[Path] = set()
        self._seen_synced: set[tuple[Path, int]] = set()

    def check(self, operation: str, path: Path) -> None:
        """Raise `StoreBroken` if nothing more may be written."""
        if self._problem is not None:
            raise StoreBroken(self._url, operation, str(path), self._problem)

    def create(self, path: Path, temp_path: Path, data: bytes) -> CreateOutcome:
        """Create a file if there is none at `path`, by way of `temp_path` in the same folder.

        Raises `OSError` when nothing was created, and `StoreBroken`, after which the file may
        exist or not.
        """
        self.check("create", path)
        folder = path.parent
        try:
            self._ensure_folder(folder)
            # Opened before the link, so that an error in writing the link back is told to this
            # descriptor, and so that nothing is linked that cannot be synced.
            folder_descriptor = self._filesystem.open_folder(folder)
            try:
                self._write(temp_path, data)
                return self._link(temp_path, path, folder_descriptor)
            finally:
                with contextlib.suppress(OSError):  # it says nothing about what was done
                    self._filesystem.close(folder_descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                self._break("create", path, _told(error), error)
            if error.errno == errno.ENOENT:  # somebody removed the folder or the temporary file
                self._durable_folders.clear()
            raise

    def sync_folder(self, folder: Path) -> None:
        """Make the present entries of a folder survive a power cut."""
        descriptor = self._filesystem.open_folder(folder)
        try:
            self._sync(descriptor, folder)
        finally:
            self._filesystem.close(descriptor)

    def sync_seen(self, files: Mapping[Path, FileStatus]) -> None:
        """Make files, by path, durable before they are shown to anybody.

        A creator removes the temporary name after it has synced the folder. So a file that has
        a second name may vanish in a power cut, and whoever was told of it would see time go
        backwards (I6): its folder is synced first. This costs nothing for all other files, and
        for those that a backup gave a second name it happens once, as a rule.
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
        """Make a folder and those above it, so that they survive a power cut."""
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
        # Folders that were there before are synced too: another process may have made them a
        # moment ago. This ends at the root of the file system.
        if self._filesystem.stat_folder(parent).device == status.device:
            self._make_durable(parent)
        self._durable_folders.add(folder)

    def _make_folder(self, folder: Path) -> None:
        try:
            self._filesystem.mkdir(folder)
        except FileExistsError:
            return  # somebody else was faster
        except FileNotFoundError as error:
            self._filesystem.stat_folder(folder.parent)  # it may have been removed meanwhile
            # As /proc does, which exists and takes no folders.
            problem = f"no folder can be made in {folder.parent}"
            raise OSError(errno.EOPNOTSUPP, problem) from error

    def _make_durable(self, parent: Path) -> None:
        try:
            self.sync_folder(parent)
        except PermissionError:
            if self._filesystem.may_write(parent):
                raise  # what is made in there cannot be made durable
            return  # whoever made it had other rights, and long ago
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
        # Before `Exists` too: the winner may not have got this far yet, and what it wrote is
        # about to be read and acted upon.
        self._sync(folder_descriptor, path)
        self._discard(temp_path)
        return outcome

    def _sync(self, descriptor: int, path: Path) -> None:
        self.check("fsync", path)
        try:
            self._filesystem.fsync(descriptor)
        except OSError as error:
            self._break("fsync", path, _told(error), error)

    def _discard(self, temp_path: Path) -> None:
        # A temporary file that stays is listed under its own name, and collected when it is old.
        with contextlib.suppress(OSError):
            self._filesystem.unlink(temp_path)

    def _break(self, operation: str, path: Path, problem: str, error: OSError) -> NoReturn:
        message = f"nothing is written any more since {operation} of {path}: {problem}"
        self._problem = self._problem or message
        raise StoreBroken(self._url, operation, str(path), message) from error


def _told(error: OSError) -> str:
    return f"{error.strerror}; what is on the disk is unknown: check it, then start again"
