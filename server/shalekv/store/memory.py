"""An object store in the memory of one process: for trials, tests and the simulation.

It reads no clock of its own, starts no thread and never waits, so its behaviour depends on the
arguments alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType

from shalekv.errors import ObjectNotFound
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    IsCollected,
    ObjectInfo,
    PlainStore,
    Repaired,
    RequestCounts,
    RequestKind,
    StoredObject,
    byte_range,
    check_name,
    check_new_name,
    check_prefix,
    nothing_is_collected,
)

PAGE_NAMES = 1_000  # as many as object stores answer at once
_ABOVE_ALL = "\x7f"  # in no name: a prefix with this sorts after all names that begin with it


class MemoryObjects:
    """The objects of one database, shared by all stores that are opened on it."""

    def __init__(self) -> None:
        """Start without objects."""
        self._by_name: dict[str, StoredObject] = {}
        self._names: list[str] = []  # sorted; these are ASCII, so this is their order by bytes

    def add(self, added: StoredObject) -> bool:
        """Add an object; return False if there is one with its name."""
        name = added.info.name
        if name in self._by_name:
            return False
        self._by_name[name] = added
        insort(self._names, name)
        return True

    def replace(self, added: StoredObject) -> None:
        """Add an object, replacing one of the same name."""
        self.remove(added.info.name)
        self.add(added)

    def find(self, name: str) -> StoredObject | None:
        """Return the object with this name, or None."""
        return self._by_name.get(name)

    def remove(self, name: str) -> None:
        """Remove the object with this name, if there is one."""
        if self._by_name.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

    def page(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        """Return the first objects whose names begin with `prefix` and sort after `after`."""
        first = max(bisect_right(self._names, after), bisect_left(self._names, prefix))
        last = bisect_left(self._names, prefix + _ABOVE_ALL, first)
        names = self._names[first : min(last, first + PAGE_NAMES)]
        return tuple([self._by_name[name].info for name in names])


_NAMED: dict[str, MemoryObjects] = {}


def named_objects(name: str) -> MemoryObjects:
    """Return the objects of ``memory://name``: one set for each name in this process."""
    return _NAMED.setdefault(name, MemoryObjects())


class MemoryStore(PlainStore):
    """A store whose objects end with the process.

    `clock_ms` is the store's clock: milliseconds since the Unix epoch, never decreasing.
    Stores with the same `objects` are views of one database.
    """

    def __init__(
        self,
        clock_ms: Callable[[], int],
        *,
        name: str = "unnamed",
        objects: MemoryObjects | None = None,
    ) -> None:
        self.url = f"memory://{name}"
        self.sent = RequestCounts()
        self._clock_ms = clock_ms
        self._objects = MemoryObjects() if objects is None else objects

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        check_new_name(name)
        self.sent.add(RequestKind.WRITE)
        added = self._new(name, data, metadata)
        return Created() if self._objects.add(added) else Exists()

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        check_new_name(name)
        self.sent.add(RequestKind.WRITE)
        self._objects.replace(self._new(name, data, metadata))

    async def copy(self, source: str, destination: str) -> None:
        check_new_name(destination)
        self.sent.add(RequestKind.WRITE)
        found = self._find("copy", source)
        self._objects.replace(self._new(destination, found.data, found.metadata))

    async def get(self, name: str) -> StoredObject:
        self.sent.add(RequestKind.READ)
        return self._find("get", name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        self.sent.add(RequestKind.READ)
        data = self._find("get_range", name).data
        first, taken = byte_range(len(data), offset, length)
        return data[first : first + taken]

    async def head(self, name: str) -> ObjectInfo:
        self.sent.add(RequestKind.READ)
        return self._find("head", name).info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        is_last = False
        while not is_last:
            self.sent.add(RequestKind.LIST)
            page = self._objects.page(prefix, start_after)
            is_last = len(page) < PAGE_NAMES
            for info in page:
                yield info
            start_after = page[-1].name if page else start_after

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        self.sent.add(RequestKind.DELETE)
        for name in doomed:
            self._objects.remove(name)

    async def now_ms(self) -> int:
        self.sent.add(RequestKind.READ)
        return self._clock_ms()

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:  # noqa: ARG002
        return Repaired()

    async def close(self) -> None:
        """Do nothing: the objects stay, for other stores with the same `objects`."""

    def _new(self, name: str, data: bytes, metadata: Mapping[str, str]) -> StoredObject:
        info = ObjectInfo(name, len(data), self._clock_ms())
        return StoredObject(info, bytes(data), MappingProxyType(dict(metadata)))

    def _find(self, operation: str, name: str) -> StoredObject:
        check_name(name)
        found = self._objects.find(name)
        if found is None:
            raise ObjectNotFound(self.url, operation, name, "no object has this name")
        return found
