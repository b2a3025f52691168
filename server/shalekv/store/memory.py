"""An object store in the memory of one process: for trials, tests and the simulation.

It reads no clock of its own, starts no thread and never waits, so that what runs on it depends
on its arguments alone.
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
    ObjectInfo,
    ObjectStore,
    StoredObject,
)
from shalekv.store.arguments import byte_range, check_name, check_new_name, check_prefix

PAGE_NAMES = 1_000  # as many as object stores answer at once


class MemoryObjects:
    """The objects of one database, shared by all stores that are opened on it."""

    def __init__(self) -> None:
        """Without objects."""
        self._by_name: dict[str, StoredObject] = {}
        self._names: list[str] = []  # sorted; these are ASCII, so this is their order by bytes

    def add(self, added: StoredObject) -> bool:
        """Add an object; False if there is one with its name."""
        name = added.info.name
        if name in self._by_name:
            return False
        self._by_name[name] = added
        insort(self._names, name)
        return True

    def find(self, name: str) -> StoredObject | None:
        """The object with this name."""
        return self._by_name.get(name)

    def remove(self, name: str) -> None:
        """Remove the object with this name, if there is one."""
        if self._by_name.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

    def page(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        """The first objects whose names begin with `prefix` and come after `after`."""
        first = max(bisect_right(self._names, after), bisect_left(self._names, prefix))
        names = self._names[first : first + PAGE_NAMES]
        return tuple(self._by_name[name].info for name in names if name.startswith(prefix))


_NAMED: dict[str, MemoryObjects] = {}


def named_objects(name: str) -> MemoryObjects:
    """The objects of ``memory://name``: the same ones for all who ask in this process."""
    return _NAMED.setdefault(name, MemoryObjects())


class MemoryStore(ObjectStore):
    """A store whose objects end with the process.

    `clock_ms` is the store's clock: milliseconds since the Unix epoch, never going back.
    Stores that are given the same `objects` are views of one database.
    """

    def __init__(
        self,
        clock_ms: Callable[[], int],
        *,
        name: str = "unnamed",
        objects: MemoryObjects | None = None,
    ) -> None:
        self.url = f"memory://{name}"
        self._clock_ms = clock_ms
        self._objects = MemoryObjects() if objects is None else objects

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        check_new_name(name)
        info = ObjectInfo(name, len(data), self._clock_ms())
        added = StoredObject(info, bytes(data), MappingProxyType(dict(metadata)))
        return Created() if self._objects.add(added) else Exists()

    async def get(self, name: str) -> StoredObject:
        return self._find("get", name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        data = self._find("get_range", name).data
        first, taken = byte_range(len(data), offset, length)
        return data[first : first + taken]

    async def head(self, name: str) -> ObjectInfo:
        return self._find("head", name).info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        page = self._objects.page(prefix, start_after)
        while page:
            for info in page:
                yield info
            page = self._objects.page(prefix, page[-1].name)

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        for name in doomed:
            self._objects.remove(name)

    async def now_ms(self) -> int:
        return self._clock_ms()

    async def close(self) -> None:
        """Nothing is held: the objects live on for whoever opens them again."""

    def _find(self, operation: str, name: str) -> StoredObject:
        check_name(name)
        found = self._objects.find(name)
        if found is None:
            raise ObjectNotFound(self.url, operation, name, "no object has this name")
        return found
