"""A real file system of which a test makes chosen calls fail."""

from __future__ import annotations

import os
from pathlib import Path

from shalekv.store.filesystem import FileStatus, FileSystem, ListedFile


class FailingFileSystem(FileSystem):
    """Raises `OSError` from the calls that `fail` was told about; all others work."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._failures: dict[str, tuple[int, int]] = {}  # call: errno, and after how many

    def fail(self, call: str, error: int, *, after: int = 0) -> None:
        """Have this call fail from now on, after so many good ones."""
        self._failures[call] = (error, after)

    def recover(self) -> None:
        """Have no call fail any more."""
        self._failures.clear()

    def create(self, path: Path) -> int:
        self._call("create")
        return super().create(path)

    def open(self, path: Path) -> int:
        self._call("open")
        return super().open(path)

    def open_folder(self, path: Path) -> int:
        self._call("open_folder")
        return super().open_folder(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._call("write")
        return super().write(descriptor, data[:1000])

    def open_update(self, path: Path) -> int:
        self._call("open_update")
        return super().open_update(path)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._call("pwrite")
        return super().pwrite(descriptor, data[:1000], offset)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._call("allocate")
        super().allocate(descriptor, size_bytes)

    def sync_data(self, descriptor: int) -> None:
        self._call("sync_data")
        super().sync_data(descriptor)

    def fsync(self, descriptor: int) -> None:
        self._call("fsync")
        super().fsync(descriptor)

    def link(self, existing: Path, new: Path) -> None:
        self._call("link")
        super().link(existing, new)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._call("mkdir")
        super().mkdir(path)

    def rename(self, existing: Path, new: Path) -> None:
        self._call("rename")
        super().rename(existing, new)

    def append(self, path: Path, data: bytes) -> FileStatus:
        self._call("append")
        return super().append(path, data)

    def touch(self, path: Path) -> FileStatus:
        self._call("touch")
        return super().touch(path)

    def touch_open(self, descriptor: int) -> None:
        self._call("touch_open")
        super().touch_open(descriptor)

    def list_files(self, path: Path) -> list[ListedFile]:
        self._call("list_files")
        return super().list_files(path)

    def may_write(self, folder: Path) -> bool:
        return "may_write" not in self._failures and super().may_write(folder)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        self._call("pread")
        return super().pread(descriptor, min(length, 1000), offset)

    def _call(self, call: str) -> None:
        self.calls.append(call)
        error, after = self._failures.get(call, (0, 0))
        if not error:
            return
        if after:
            self._failures[call] = (error, after - 1)
            return
        raise OSError(error, os.strerror(error))
