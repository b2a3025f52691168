"""File systems that leave out one call that durability rests on: what the tests must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shalekv.store.arguments import TEMP_SUFFIX
from shalekv.store.filesystem import FileLock, FileStatus, FileSystem, FolderEntry, ListedFile


class ForwardingFileSystem(FileSystem):
    """Passes every call on to `inner`, and remembers which folders are open."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self.open_folders: dict[int, Path] = {}
        self.open_files: dict[int, Path] = {}  # those that are overwritten

    def open_update(self, path: Path) -> int:
        descriptor = self.inner.open_update(path)
        self.open_files[descriptor] = path
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        return self.inner.pwrite(descriptor, data, offset)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self.inner.allocate(descriptor, size_bytes)

    def sync_data(self, descriptor: int) -> None:
        self.inner.sync_data(descriptor)

    def drop_cached(self, descriptor: int) -> None:
        self.inner.drop_cached(descriptor)

    def rename(self, existing: Path, new: Path) -> None:
        self.inner.rename(existing, new)

    def rmdir(self, path: Path) -> None:
        self.inner.rmdir(path)

    def list_files(self, path: Path) -> list[ListedFile]:
        return self.inner.list_files(path)

    def try_lock(self, path: Path) -> FileLock | None:
        return self.inner.try_lock(path)

    def create(self, path: Path) -> int:
        return self.inner.create(path)

    def open(self, path: Path) -> int:
        return self.inner.open(path)

    def open_folder(self, path: Path) -> int:
        descriptor = self.inner.open_folder(path)
        self.open_folders[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        return self.inner.write(descriptor, data)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        return self.inner.pread(descriptor, length, offset)

    def fsync(self, descriptor: int) -> None:
        self.inner.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        self.open_folders.pop(descriptor, None)
        self.open_files.pop(descriptor, None)
        self.inner.close(descriptor)

    def link(self, existing: Path, new: Path) -> None:
        self.inner.link(existing, new)

    def unlink(self, path: Path) -> None:
        self.inner.unlink(path)

    def mkdir(self, path: Path) -> None:
        self.inner.mkdir(path)

    def may_write(self, folder: Path) -> bool:
        return self.inner.may_write(folder)

    def stat(self, path: Path) -> FileStatus:
        return self.inner.stat(path)

    def stat_folder(self, path: Path) -> FileStatus:
        return self.inner.stat_folder(path)

    def fstat(self, descriptor: int) -> FileStatus:
        return self.inner.fstat(descriptor)

    def touch(self, path: Path) -> FileStatus:
        return self.inner.touch(path)

    def list_folder(self, path: Path) -> list[FolderEntry]:
        return self.inner.list_folder(path)


class WithoutFileSync(ForwardingFileSystem):
    def fsync(self, descriptor: int) -> None:
        if descriptor in self.open_folders:
            super().fsync(descriptor)


class WithoutFolderSync(ForwardingFileSystem):
    """Leaves out the sync of the folder that an object was linked in."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._unsynced: set[Path] = set()

    def link(self, existing: Path, new: Path) -> None:
        super().link(existing, new)
        self._unsynced.add(new.parent)

    def fsync(self, descriptor: int) -> None:
        folder = self.open_folders.get(descriptor)
        if folder in self._unsynced:
            self._unsynced.remove(folder)
        else:
            super().fsync(descriptor)


class WithoutParentSync(ForwardingFileSystem):
    """Leaves out the sync of a folder in which this process made another one."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self.made_in: set[Path] = set()

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.made_in.add(path.parent)

    def fsync(self, descriptor: int) -> None:
        if self.open_folders.get(descriptor) not in self.made_in:
            super().fsync(descriptor)


class WithoutRivalsParentSync(WithoutParentSync):
    """Leaves out the sync of a folder in which another process made one."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._linked_in: set[Path] = set()

    def link(self, existing: Path, new: Path) -> None:
        self._linked_in.add(new.parent)
        super().link(existing, new)

    def fsync(self, descriptor: int) -> None:
        folder = self.open_folders.get(descriptor)
        if folder is None or folder in self.made_in or folder in self._linked_in:
            self.inner.fsync(descriptor)


class WithoutSyncBeforeExists(ForwardingFileSystem):
    """Leaves out the sync of the folder after a rival's object was met there."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._met: set[Path] = set()

    def link(self, existing: Path, new: Path) -> None:
        try:
            super().link(existing, new)
        except FileExistsError:
            self._met.add(new.parent)
            raise

    def fsync(self, descriptor: int) -> None:
        folder = self.open_folders.get(descriptor)
        if folder in self._met:
            self._met.remove(folder)
        else:
            super().fsync(descriptor)


class WithoutSecondLinks(ForwardingFileSystem):
    """Shows no second link, and so no file whose folder its creator has not synced yet."""

    def stat(self, path: Path) -> FileStatus:
        return replace(super().stat(path), links=1)

    def fstat(self, descriptor: int) -> FileStatus:
        return replace(super().fstat(descriptor), links=1)


class WithoutSyncAfterDelete(ForwardingFileSystem):
    """Leaves out the sync of the folder that an object was deleted from."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._unsynced: set[Path] = set()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path.suffix != TEMP_SUFFIX:
            self._unsynced.add(path.parent)

    def fsync(self, descriptor: int) -> None:
        folder = self.open_folders.get(descriptor)
        if folder in self._unsynced:
            self._unsynced.remove(folder)
        else:
            super().fsync(descriptor)


MUTANTS: tuple[Callable[[FileSystem], FileSystem], ...] = (
    WithoutFileSync,
    WithoutFolderSync,
    WithoutParentSync,
    WithoutRivalsParentSync,
    WithoutSyncBeforeExists,
    WithoutSecondLinks,
    WithoutSyncAfterDelete,
)
