"""An object store in a folder of a local file system, for many processes at once.

An object is a file of the same name. It is created in these steps. After a power cut, each step
that was not synced may or may not have happened, whatever came before or after it:

    make the folder, sync every folder above it        so that the folder survives
    write <name>.<random>.tmp in the folder, sync it   so that no half object gets a name
    link it to <name>                                  the compare-and-swap: one process wins
    sync the folder                                    so that the name survives
    remove <name>.<random>.tmp                         last: see `LocalStore._sync_seen`

The store's clock is that of the file system: the modification time which it gives to a file that
is touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from shalekv.errors import InvalidUrl, ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.format.names import LEVELS_FOLDER
from shalekv.runtime import Runtime
from shalekv.store.api import (
    NO_METADATA,
    TEMP_SUFFIX,
    Created,
    CreateOutcome,
    Exists,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Repaired,
    RequestCounts,
    RequestKind,
    StoredObject,
    Unknown,
    byte_range,
    check_name,
    check_new_name,
    check_prefix,
    nothing_is_collected,
)
from shalekv.store.files import REAL_FILE_SYSTEM, DurableFiles, FileStatus, FileSystem, FolderEntry

PAGE_NAMES = 1_000  # files that one call of a worker reads the status of, or deletes
KEPT_FILES_MAX = 128  # open SSTs: a process may often have no more than 1,024 open files
SWEEP_INTERVAL_MS = 5_000  # between two searches for open SSTs that were deleted
SCANS_MAX = 3  # how often a folder is read for one list while it keeps changing
TIME_STEP_MS = 1_000  # coarsest resolution of times on file systems with hard links
RANDOM_BITS = 64  # in the name of a temporary file; a clash would only mean another attempt
READS_OF_ONE = frozenset({"get", "get_range", "head"})
CLOCK_FILE = "clock"  # beside the folders of objects, and so in no list

# Errors that no retry fixes, and what does.
_ADVICE: Mapping[int, str] = MappingProxyType(
    {
        errno.EACCES: "this user must be able to read and write there",
        errno.EPERM: "the system allows no writes there",
        errno.EROFS: "mount it for writing, or choose another folder",
        errno.ENOTDIR: "there is a file where the folder must be",
        errno.EOPNOTSUPP: "choose another folder",
        errno.ENAMETOOLONG: "choose a shorter path",
        errno.ELOOP: "choose a path without such links",
    }
)
# Errors of `open` when the name is no file: missing, below a file, a link, a socket, too long.
NO_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG})

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

Names = tuple[str, ...]


class LocalStore(ObjectStore):
    """A store in the folder `root`, an absolute path, which the first write creates.

    After a failed sync or an I/O error, nothing more is written: see `DurableFiles`. A full disk
    does not count as such a failure if a write or a link reports it, which then has done nothing. A
    full disk that only the sync reports does, since it is unknown what was kept.

    A list shows every file, also those of other programs and temporary ones that a crash left
    behind, so that a collector can delete them. User metadata is not kept.
    """

    def __init__(
        self, root: Path, runtime: Runtime, *, filesystem: FileSystem = REAL_FILE_SYSTEM
    ) -> None:
        if not root.is_absolute() or ".." in root.parts:
            raise InvalidUrl(f"{root} is not an absolute path")
        self.url = f"file://{quote(str(root))}"
        self.sent = RequestCounts()
        self._root = root
        self._runtime = runtime
        self._filesystem = filesystem
        self._files = DurableFiles(filesystem, self.url)
        self._kept = _KeptFiles(filesystem)
        self._seen_synced: set[tuple[Path, int]] = set()

    async def create(
        self,
        name: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,  # noqa: ARG002  (not kept: see the class)
    ) -> CreateOutcome:
        check_new_name(name)
        self.sent.add(RequestKind.WRITE)
        random_part = f"{self._runtime.random.getrandbits(RANDOM_BITS):016x}"
        temp_name = f"{name}.{random_part}{TEMP_SUFFIX}"
        return await self._runtime.workers.run(self._create, name, temp_name, data)

    async def get(self, name: str) -> StoredObject:
        check_name(name)
        self.sent.add(RequestKind.READ)
        return await self._runtime.workers.run(self._get, name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        check_name(name)
        self.sent.add(RequestKind.READ)
        return await self._runtime.workers.run(self._get_range, name, offset, length)

    reads_now = True

    def get_range_now(self, name: str, offset: int, length: int) -> bytes | None:
        kept = self._kept.find(name)
        if kept is None:
            return None
        first, taken = byte_range(kept.size_bytes, offset, length)
        data = self._filesystem.pread_now(kept.descriptor, taken, first)
        if data is not None:
            self.sent.add(RequestKind.READ)
        return data

    async def head(self, name: str) -> ObjectInfo:
        check_name(name)
        self.sent.add(RequestKind.READ)
        return await self._runtime.workers.run(self._head, name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        names = await self._runtime.workers.run(self._names, prefix, start_after)
        self.sent.add(RequestKind.LIST, max(1, -(-len(names) // PAGE_NAMES)))
        last, gone = start_after, frozenset[str]()
        while names:
            page = names[:PAGE_NAMES]
            found, missing = await self._runtime.workers.run(self._page, page)
            if missing - gone:
                # This process may have stalled since the names were read, until all of them were
                # deleted and replaced by others. A page must show the state at one moment: that
                # there is a manifest at all although it is always replaced, and which is the newest
                # (rule F2).
                gone |= missing
                names = await self._runtime.workers.run(self._names, prefix, last)
                continue
            for info in found:
                yield info
            last, names = page[-1], names[PAGE_NAMES:]

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        for first in range(0, len(doomed), PAGE_NAMES):
            page = doomed[first : first + PAGE_NAMES]
            self.sent.add(RequestKind.DELETE)
            await self._runtime.workers.run(self._delete, page)

    async def now_ms(self) -> int:
        self.sent.add(RequestKind.READ)
        return await self._runtime.workers.run(self._now_ms)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:  # noqa: ARG002
        return Repaired()

    async def close(self) -> None:
        """Close the files that stay open between calls. The workers belong to the runtime."""
        self._kept.clear()

    # The methods below block, and run in workers.

    def _create(self, name: str, temp_name: str, data: bytes) -> CreateOutcome:
        path, temp_path = self._path(name), self._path(temp_name)
        self._files.check("create", path)
        with self._store_errors("create", name):
            try:
                return self._create_file(path, temp_path, data)
            except OSError as error:
                if error.errno == errno.EIO:
                    self._files.fail_unknown("create", path, error)
                if error.errno == errno.ENOENT:  # the folder or the temporary file was removed
                    self._files.forget_folders()
                raise

    def _create_file(self, path: Path, temp_path: Path, data: bytes) -> CreateOutcome:
        """Create a file at `path` if there is none. Raises `OSError` when nothing was created."""
        self._files.ensure_folder(path.parent)
        # Opened before the link, so that an error in writing the link back is reported to this
        # descriptor, and so that nothing is linked that cannot be synced.
        folder_descriptor = self._filesystem.open_folder(path.parent)
        try:
            self._write(temp_path, data)
            return self._link(temp_path, path, folder_descriptor)
        finally:
            with contextlib.suppress(OSError):  # the outcome does not depend on it
                self._filesystem.close(folder_descriptor)

    def _write(self, path: Path, data: bytes) -> None:
        descriptor = self._filesystem.create(path)
        try:
            try:
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[self._filesystem.write(descriptor, unwritten) :]
                self._files.sync(descriptor, path)
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
                problem = "the file system has no hard links: use another"
                self._files.fail("create", path, problem, error)
            if error.errno in _LINK_REFUSALS:
                self._discard(temp_path)
                raise
            if error.errno == errno.EIO:
                raise
            return Unknown(str(error))  # the temporary name stays: see `_sync_seen`
        # Before `Exists` too: the winner may not have synced yet, and the caller is about to read
        # its object and act on it.
        self._files.sync(folder_descriptor, path)
        self._discard(temp_path)
        return outcome

    def _discard(self, temp_path: Path) -> None:
        # If a temporary file stays, lists show it, and the collector deletes it when it is old.
        with contextlib.suppress(OSError):
            self._filesystem.unlink(temp_path)

    def _sync_seen(self, files: Mapping[Path, FileStatus]) -> None:
        """Make files, by path, durable before a reader sees them.

        A creator removes the temporary name after it has synced the folder. So a file that still
        has a second name may vanish in a power cut, and a reader of it would later see the
        database go back (I6): the folder of such a file is synced first. Other files cost
        nothing. A file that has a second name because of a backup is synced once, as a rule.
        """
        linked = {(path, file.inode) for path, file in files.items() if file.links > 1}
        fresh = linked - self._seen_synced
        for folder in {path.parent for path, _ in fresh}:
            self._files.try_sync_folder(folder)
        if len(self._seen_synced) + len(fresh) > SEEN_SYNCED_MAX_COUNT:
            self._seen_synced = linked
        else:
            self._seen_synced |= fresh

    def _get(self, name: str) -> StoredObject:
        with self._opened("get", name) as (descriptor, status):
            data = self._files.pread(descriptor, 0, status.size_bytes)
            return StoredObject(_info(name, status), data)

    def _get_range(self, name: str, offset: int, length: int) -> bytes:
        if name.startswith(LEVELS_FOLDER):
            with self._store_errors("get_range", name):
                kept = self._kept.find(name) or self._keep_open(name)
                first, taken = byte_range(kept.size_bytes, offset, length)
                return self._files.pread(kept.descriptor, first, taken)
        with self._opened("get_range", name) as (descriptor, status):
            first, taken = byte_range(status.size_bytes, offset, length)
            return self._files.pread(descriptor, first, taken)

    def _keep_open(self, name: str) -> _KeptFile:
        """Open an SST of the levels, and keep it open: more of it will be read."""
        path = self._path(name)
        kept = _KeptFile(self._filesystem, self._filesystem.open(path))
        status = self._filesystem.fstat(kept.descriptor)
        self._check_seen(path, status)
        kept.size_bytes = status.size_bytes
        self._kept.add(name, kept)
        return kept

    def _head(self, name: str) -> ObjectInfo:
        with self._opened("head", name) as (_, status):
            return _info(name, status)

    def _names(self, prefix: str, start_after: str) -> Names:
        found: set[str] = set()
        folders = [prefix]
        with self._store_errors("list", prefix):
            while folders:
                folder = folders.pop()
                try:
                    entries = self._entries(self._path(folder))
                except (FileNotFoundError, NotADirectoryError):
                    continue  # not made yet, or removed since
                folders.extend(f"{folder}{at.name}/" for at in entries if at.is_folder)
                found.update(f"{folder}{at.name}" for at in entries if not at.is_folder)
        first = os.fsencode(start_after)
        return tuple(sorted((at for at in found if os.fsencode(at) > first), key=os.fsencode))

    def _entries(self, folder: Path) -> set[FolderEntry]:
        """Return all entries of the folder at one moment, and maybe some from before or after it.

        A folder is read piece by piece. A process that stalls between two pieces may miss an
        object that is deleted from a later piece and also its successor, if that appears in an
        earlier piece. So a folder that has changed meanwhile is read again, at most `SCANS_MAX`
        times, and the entries of all scans count. The folder's modification time shows a change,
        unless it is so recent that another change would not move it.
        """
        found: set[FolderEntry] = set()
        for scan in range(SCANS_MAX):
            changed_ms = self._filesystem.stat_folder(folder).modified_ms
            shows_changes = scan > 0 or changed_ms < self._filesystem.now_ms() - TIME_STEP_MS
            found.update(self._filesystem.list_folder(folder))
            if shows_changes and self._filesystem.stat_folder(folder).modified_ms == changed_ms:
                break
        return found

    def _page(self, names: Names) -> tuple[tuple[ObjectInfo, ...], frozenset[str]]:
        """Read the status of these files; also return the objects that are no longer there."""
        self._kept.drop_deleted()
        files: dict[str, FileStatus] = {}
        missing: set[str] = set()
        with self._store_errors("list", names[0]):
            for name in names:
                try:
                    status = self._filesystem.stat(self._path(name))
                except (FileNotFoundError, NotADirectoryError):
                    if not name.endswith(TEMP_SUFFIX):  # these come and go with every create
                        missing.add(name)
                    continue
                if status.is_file:
                    files[name] = status
            self._sync_seen({self._path(name): status for name, status in files.items()})
        found = tuple(_info(name, status) for name, status in files.items())
        return found, frozenset(missing)

    def _delete(self, names: Names) -> None:
        self._files.check("delete", self._path(names[0]))
        self._kept.drop(names)
        # The second name of a file says that its folder may not be synced (see `_sync_seen`), so
        # it is removed after the folder was synced.
        temporary = {_folder(name) for name in names if name.endswith(TEMP_SUFFIX)}
        with self._store_errors("delete", names[0]):
            self._sync_folders(temporary)
            for name in names:
                try:
                    self._filesystem.unlink(self._path(name))
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    continue  # no object has this name
            self._sync_folders({_folder(name) for name in names})

    def _sync_folders(self, folders: set[str]) -> None:
        for folder in sorted(folders):
            try:
                self._files.try_sync_folder(self._path(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue  # without a folder, there was nothing to delete

    def _now_ms(self) -> int:
        with self._store_errors("touch", CLOCK_FILE):
            self._files.ensure_folder(self._root)
            return self._filesystem.touch(self._path(CLOCK_FILE)).modified_ms

    @contextmanager
    def _opened(self, operation: str, name: str) -> Iterator[tuple[int, FileStatus]]:
        path = self._path(name)
        with self._store_errors(operation, name):
            descriptor = self._filesystem.open(path)
            try:
                status = self._filesystem.fstat(descriptor)
                self._check_seen(path, status)
                yield descriptor, status
            finally:
                self._filesystem.close(descriptor)

    def _check_seen(self, path: Path, status: FileStatus) -> None:
        """Make what was opened durable. Raises `FileNotFoundError` if it is no file."""
        if not status.is_file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._sync_seen({path: status})

    @contextmanager
    def _store_errors(self, operation: str, name: str) -> Iterator[None]:
        """Raise each `OSError` as a `StoreError`."""
        try:
            yield
        except OSError as error:
            if operation in READS_OF_ONE and error.errno in NO_OBJECT:
                problem = "no object has this name"
                raise ObjectNotFound(self.url, operation, name, problem) from error
            problem = error.strerror or str(error)
            advice = _ADVICE.get(error.errno or 0)
            if advice is not None:
                raise StoreRefused(self.url, operation, name, f"{problem}: {advice}") from error
            raise StoreUnavailable(self.url, operation, name, problem) from error

    def _path(self, name: str) -> Path:
        return self._root / name


class _KeptFile:
    """An open file, which is closed when nothing refers to it any more."""

    __slots__ = ("_filesystem", "descriptor", "size_bytes", "was_used")

    def __init__(self, filesystem: FileSystem, descriptor: int) -> None:
        """Own `descriptor` from now on; its user sets the size."""
        self._filesystem = filesystem
        self.descriptor = descriptor
        self.size_bytes = 0
        self.was_used = False  # since an eviction has considered it

    def __del__(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._filesystem.close(self.descriptor)


class _KeptFiles:
    """SSTs that stay open, so that a read of a part need not open the file.

    They never change, so an open file has what its name has. Workers add and drop files; the event
    loop only looks them up, which needs no lock. The space of a deleted file is not free before it
    is closed: files that any process has deleted are closed now and then, with a list or an open.
    """

    def __init__(self, filesystem: FileSystem) -> None:
        """Begin without files."""
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._next_sweep_ms = 0  # by the clock of the file system
        self._files: dict[str, _KeptFile] = {}  # in the order in which they were added or spared

    def find(self, name: str) -> _KeptFile | None:
        """Return the file if it is open; it stays open as long as the caller refers to it."""
        found = self._files.get(name)
        if found is not None:
            found.was_used = True
        return found

    def add(self, name: str, file: _KeptFile) -> None:
        """Keep a file open."""
        self.drop_deleted()
        with self._lock:
            while len(self._files) >= KEPT_FILES_MAX:
                self._evict()
            self._files[name] = file

    def drop(self, names: Iterable[str]) -> None:
        """Close these files."""
        with self._lock:
            for name in names:
                self._files.pop(name, None)

    def drop_deleted(self) -> None:
        """Close the files that were deleted, if it was not done a moment ago."""
        now_ms = self._filesystem.now_ms()
        with self._lock:
            if not self._files or now_ms < self._next_sweep_ms:
                return
            self._next_sweep_ms = now_ms + SWEEP_INTERVAL_MS
            kept = [*self._files.items()]
        self.drop([n for n, at in kept if not self._filesystem.fstat(at.descriptor).links])

    def clear(self) -> None:
        """Close all files."""
        with self._lock:
            self._files.clear()

    def _evict(self) -> None:
        """Drop the oldest file, or spare it and make it the newest if it was used meanwhile."""
        oldest = next(iter(self._files))
        kept = self._files.pop(oldest)
        if kept.was_used:
            kept.was_used = False
            self._files[oldest] = kept


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _info(name: str, status: FileStatus) -> ObjectInfo:
    return ObjectInfo(name, status.size_bytes, status.modified_ms)
