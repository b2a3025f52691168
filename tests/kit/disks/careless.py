"""File systems that leave out one call that durability rests on: what the tests must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shalekv.store.api import TEMP_SUFFIX
from shalekv.store.files import FileStatus, FileSystem


class ForwardingFileSystem(FileSystem):
    """Passes every call on to `inner`, and remembers what is open."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self.open_folders: dict[int, Path] = {}
        self.open_files: dict[int, Path] = {}  # files that are read or overwritten

    def open(self, path: Path) -> int:
        descriptor = self.inner.open(path)
        self.open_files[descriptor] = path
        return descriptor

    def open_update(self, path: Path) -> int:
        descriptor = self.inner.open_update(path)
        self.open_files[descriptor] = path
        return descriptor

    def open_folder(self, path: Path) -> int:
        descriptor = self.inner.open_folder(path)
        self.open_folders[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_folders.pop(descriptor, None)
        self.open_files.pop(descriptor, None)
        self.inner.close(descriptor)


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: getattr(self.inner, name)(*arguments)


for _name in {*vars(FileSystem)} - {*vars(ForwardingFileSystem)}:
    if not _name.startswith("_"):
        setattr(ForwardingFileSystem, _name, _forwarded(_name))


class Careless(ForwardingFileSystem):
    """A file system that omits each sync for which `omits(folder)` is true; None: of a file.

    The sets hold the folders in which this process has done something.
    """

    def __init__(self, inner: FileSystem, omits: Callable[[Careless, Path | None], bool]) -> None:
        super().__init__(inner)
        self._omits = omits
        self.linked: set[Path] = set()
        self.made: set[Path] = set()
        self.met: set[Path] = set()  # an object of a rival
        self.deleted: set[Path] = set()

    def link(self, existing: Path, new: Path) -> None:
        try:
            super().link(existing, new)
        except FileExistsError:
            self.met.add(new.parent)
            raise
        self.linked.add(new.parent)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.made.add(path.parent)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path.suffix != TEMP_SUFFIX:
            self.deleted.add(path.parent)

    def fsync(self, descriptor: int) -> None:
        if not self._omits(self, self.open_folders.get(descriptor)):
            super().fsync(descriptor)


class WithoutSecondLinks(ForwardingFileSystem):
    """Shows no second link, and so no file whose folder its creator has not synced yet."""

    def stat(self, path: Path) -> FileStatus:
        return replace(super().stat(path), links=1)

    def fstat(self, descriptor: int) -> FileStatus:
        return replace(super().fstat(descriptor), links=1)


def _once(folders: set[Path], folder: Path | None) -> bool:
    if folder not in folders:
        return False
    folders.remove(folder)
    return True


def _of_a_rival(at: Careless, folder: Path | None) -> bool:
    return folder is not None and folder not in at.made | at.linked | at.met


_OMITTED: Mapping[str, Callable[[Careless, Path | None], bool]] = {
    "of a file": lambda _, folder: folder is None,
    "of the folder of a link": lambda at, folder: _once(at.linked, folder),
    "of a folder in which one was made": lambda at, folder: folder in at.made,
    "of a folder in which a rival made one": _of_a_rival,
    "before a name is said to exist": lambda at, folder: _once(at.met, folder),
    "after a delete": lambda at, folder: _once(at.deleted, folder),
}
MUTANTS: Mapping[str, Callable[[FileSystem], FileSystem]] = {
    "before a second link is shown": WithoutSecondLinks,
    **{name: partial(Careless, omits=omits) for name, omits in _OMITTED.items()},
}
