"""A disk that, at a power cut, keeps what was synced and a random part of the rest.

The model is the worst that POSIX allows. Of a file, every unsynced block survives or reverts to its
synced state (zeros if there was none), and the length is between the synced and the last one. Of a
folder, each unsynced creation or removal of a name survives or not, independently; a rename is
both. Syncing a file does not sync its name, and syncing a folder does not sync the folder's own
name in its parent.
"""

from __future__ import annotations

# ruff: noqa: SLF001 - the disk after a cut is another one of its class
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from shalekv.store.files import FileLock, FileStatus, FileSystem, FolderEntry, ListedFile

BLOCK_BYTES = 64  # small, so that small objects have many
WRITE_BYTES_MAX = 100  # `write` may write less than it is asked to
DEVICE = 1
START_MS = 1_700_000_000_000


@dataclass(slots=True, eq=False)
class File:
    inode: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    links: int = 1
    modified_ms: int = 0

    def after_cut(self, random: Random) -> bytes:
        lengths = (len(self.synced), len(self.data))
        left = bytearray(random.choice((*lengths, random.randint(min(lengths), max(lengths)))))
        for first in range(0, len(left), BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, len(left))
            if last <= len(self.synced):
                left[first:last] = self.synced[first:last]
                new = self.data[first:last]
                if len(new) == last - first and left[first:last] != new and random.random() < 0.5:
                    left[first:last] = new
            elif random.random() < 0.5:
                left[first:last] = self.data[first:last]
        return bytes(left)


@dataclass(slots=True, eq=False)
class Folder:
    inode: int
    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    unsynced: list[tuple[str, File | Folder | None]] = field(default_factory=list)

    def change(self, name: str, node: File | Folder | None) -> None:
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node
        self.unsynced.append((name, node))

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.unsynced.clear()

    def after_cut(self, random: Random) -> dict[str, File | Folder]:
        left = dict(self.synced)
        for name, node in self.unsynced:
            if random.random() < 0.5:
                continue
            if node is None:
                left.pop(name, None)
            else:
                left[name] = node
        return left


class CrashingDisk(FileSystem):
    """A file system in memory. `before_call` gets the name of each call first, and may raise."""

    def __init__(self, before_call: Callable[[str], None] = lambda _: None) -> None:
        self.before_call = before_call
        self._inodes = 0
        self._root = Folder(self._new_inode())
        self._open: dict[int, File | Folder] = {}
        self._now_ms = START_MS

    def after_cut(
        self, random: Random, before_call: Callable[[str], None] = lambda _: None
    ) -> CrashingDisk:
        """The disk as it is found when the power is back."""
        disk = type(self)(before_call)
        files: dict[int, File] = {}

        def survivor(node: File | Folder) -> File | Folder:
            if isinstance(node, Folder):
                left = Folder(disk._new_inode())
                left.synced = {n: survivor(e) for n, e in node.after_cut(random).items()}
                left.entries = dict(left.synced)
                return left
            if node.inode not in files:
                data = node.after_cut(random)
                files[node.inode] = File(disk._new_inode(), bytearray(data), data, links=0)
            files[node.inode].links += 1
            return files[node.inode]

        root = survivor(self._root)
        assert isinstance(root, Folder)
        disk._root = root
        return disk

    def create(self, path: Path) -> int:
        self.before_call("create")
        folder = self._folder(path.parent)
        if path.name in folder.entries:
            raise _error(errno.EEXIST, path)
        folder.change(path.name, File(self._new_inode(), modified_ms=self._now_ms))
        return self._opened(folder.entries[path.name])

    def open(self, path: Path) -> int:
        self.before_call("open")
        return self._opened(self._node(path))

    def open_update(self, path: Path) -> int:
        self.before_call("open_update")
        return self._opened(self._node(path))

    def open_folder(self, path: Path) -> int:
        self.before_call("open_folder")
        return self._opened(self._folder(path))

    def write(self, descriptor: int, data: memoryview) -> int:
        self.before_call("write")
        written = data[:WRITE_BYTES_MAX]
        file = self._file(descriptor)
        file.data += written
        file.modified_ms = self._now_ms
        return len(written)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        self.before_call("pread")
        return bytes(self._file(descriptor).data[offset : offset + length])

    def pread_now(self, descriptor: int, length: int, offset: int) -> bytes | None:
        return self.pread(descriptor, length, offset)

    def fsync(self, descriptor: int) -> None:
        self.before_call("fsync")
        node = self._open[descriptor]
        if isinstance(node, File):
            node.synced = bytes(node.data)
        else:
            node.sync()

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.before_call("pwrite")
        written = data[:WRITE_BYTES_MAX]
        file = self._file(descriptor)
        file.data.extend(bytes(max(0, offset - len(file.data))))
        file.data[offset : offset + len(written)] = written
        return len(written)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self.before_call("allocate")
        file = self._file(descriptor)
        file.data.extend(bytes(max(0, size_bytes - len(file.data))))

    def sync_data(self, descriptor: int) -> None:
        self.before_call("sync_data")
        file = self._file(descriptor)
        file.synced = bytes(file.data)

    def drop_cached(self, descriptor: int) -> None:
        self.before_call("drop_cached")
        assert descriptor in self._open

    def close(self, descriptor: int) -> None:
        self.before_call("close")
        del self._open[descriptor]

    def link(self, existing: Path, new: Path) -> None:
        self.before_call("link")
        file = self._node(existing)
        folder = self._folder(new.parent)
        if new.name in folder.entries:
            raise _error(errno.EEXIST, new)
        assert isinstance(file, File)
        file.links += 1
        folder.change(new.name, file)

    def unlink(self, path: Path) -> None:
        self.before_call("unlink")
        file = self._node(path)
        if isinstance(file, Folder):
            raise _error(errno.EISDIR, path)
        file.links -= 1
        self._folder(path.parent).change(path.name, None)

    def rename(self, existing: Path, new: Path) -> None:
        self.before_call("rename")
        node = self._node(existing)
        self._folder(existing.parent).change(existing.name, None)
        self._folder(new.parent).change(new.name, node)

    def rmdir(self, path: Path) -> None:
        self.before_call("rmdir")
        if self._folder(path).entries:
            raise _error(errno.ENOTEMPTY, path)
        self._folder(path.parent).change(path.name, None)

    def try_lock(self, path: Path) -> FileLock | None:
        self.touch(path)
        return FileLock(-1)  # there is one process

    def list_files(self, path: Path) -> list[ListedFile]:
        self.before_call("list_files")
        entries = self._folder(path).entries.items()
        files = [(name, at) for name, at in entries if isinstance(at, File)]
        return [ListedFile(name, len(at.data), at.modified_ms) for name, at in files]

    def bytes_of(self, path: Path) -> bytearray:
        file = self._node(path)
        assert isinstance(file, File)
        return file.data

    def mkdir(self, path: Path) -> None:
        self.before_call("mkdir")
        parent = self._folder(path.parent)
        if path.name in parent.entries:
            raise _error(errno.EEXIST, path)
        parent.change(path.name, Folder(self._new_inode()))

    def may_write(self, folder: Path) -> bool:
        return self._folder(folder) is not None

    def stat(self, path: Path) -> FileStatus:
        self.before_call("stat")
        return self._status(self._node(path))

    def stat_folder(self, path: Path) -> FileStatus:
        self.before_call("stat_folder")
        return self._status(self._folder(path))

    def fstat(self, descriptor: int) -> FileStatus:
        self.before_call("fstat")
        return self._status(self._open[descriptor])

    def touch(self, path: Path) -> FileStatus:
        self.before_call("touch")
        folder = self._folder(path.parent)
        if path.name not in folder.entries:
            folder.change(path.name, File(self._new_inode()))
        file = self._node(path)
        assert isinstance(file, File)
        self._now_ms += 1
        file.modified_ms = self._now_ms
        return self._status(file)

    def list_folder(self, path: Path) -> list[FolderEntry]:
        self.before_call("list_folder")
        entries = self._folder(path).entries
        return [FolderEntry(name, isinstance(at, Folder)) for name, at in entries.items()]

    def _new_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _opened(self, node: File | Folder) -> int:
        descriptor = self._new_inode()
        self._open[descriptor] = node
        return descriptor

    def _node(self, path: Path) -> File | Folder:
        node: File | Folder = self._root
        for name in path.parts[1:]:
            if isinstance(node, File):
                raise _error(errno.ENOTDIR, path)
            if name not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        return node

    def _file(self, descriptor: int) -> File:
        node = self._open[descriptor]
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, descriptor)
        return node

    def _status(self, node: File | Folder) -> FileStatus:
        if isinstance(node, Folder):
            return FileStatus(False, 0, 0, 1, DEVICE, node.inode)
        return FileStatus(True, len(node.data), node.modified_ms, node.links, DEVICE, node.inode)


def _error(number: int, where: object) -> OSError:
    return OSError(number, os.strerror(number), str(where))
