"""A store that counts the requests to another one, by operation and folder.

It costs a few microseconds for a request, so every process that serves has one.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from shalekv.clock import Clock, MachineClock
from shalekv.errors import ObjectNotFound, StoreBroken, StoreRefused, StoreUnavailable
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Recovered,
    StoredObject,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.reachability import Reachability


class Operation(enum.StrEnum):
    """The methods of a store."""

    CREATE = "create"
    GET = "get"
    GET_RANGE = "get_range"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"
    NOW_MS = "now_ms"
    RECOVER = "recover"


@dataclass(slots=True)
class Count:
    """Totals of one operation."""

    requests: int = 0  # calls begun; a list counts once, however many pages it has
    failures: int = 0  # calls that ended without an answer: unavailable, broken, unknown
    objects: int = 0  # objects created, read, listed, or requested to be deleted
    transferred_bytes: int = 0  # contents sent by creates and received by reads

    def add(self, other: Count) -> None:
        """Add the totals of `other`."""
        self.requests += other.requests
        self.failures += other.failures
        self.objects += other.objects
        self.transferred_bytes += other.transferred_bytes


_READS = frozenset({Operation.GET, Operation.GET_RANGE, Operation.HEAD, Operation.LIST})
FOLDERS = tuple(name.rstrip("/") for name in (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER))


class CountingStore(ObjectStore):
    """Passes all calls on to `inner`, and counts them; `reads` tracks whether reads succeed."""

    def __init__(self, inner: ObjectStore, clock: Clock | None = None) -> None:
        self.reads = Reachability(clock or MachineClock())
        self.url = inner.url
        self.sent = inner.sent
        self.cas_mode = inner.cas_mode
        self._inner = inner
        self._counts = {operation: Count() for operation in Operation}
        self._by_folder: dict[tuple[Operation, str], Count] = {}
        self._creates_in_flight: dict[str, int] = {}
        self._most_creates_in_flight: dict[str, int] = {}

    @property
    def counts(self) -> Mapping[Operation, Count]:
        """Totals of each operation so far."""
        return MappingProxyType(self._counts)

    @property
    def counts_by_folder(self) -> Mapping[tuple[Operation, str], Count]:
        """Totals by operation and folder; "" for other names, or names of several folders."""
        return MappingProxyType(self._by_folder)

    @property
    def most_creates_in_flight(self) -> Mapping[str, int]:
        """For each folder, the greatest number of creates in flight at once."""
        return MappingProxyType(self._most_creates_in_flight)

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        with self._request(Operation.CREATE, name) as count, self._in_flight(name):
            count.transferred_bytes += len(data)
            outcome = await self._inner.create(name, data, metadata)
            if isinstance(outcome, Unknown):
                count.failures += 1
            else:
                count.objects += 1
            return outcome

    async def get(self, name: str) -> StoredObject:
        with self._request(Operation.GET, name) as count:
            found = await self._inner.get(name)
            count.objects += 1
            count.transferred_bytes += len(found.data)
            return found

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        with self._request(Operation.GET_RANGE, name) as count:
            data = await self._inner.get_range(name, offset, length)
            count.objects += 1
            count.transferred_bytes += len(data)
            return data

    async def head(self, name: str) -> ObjectInfo:
        with self._request(Operation.HEAD, name) as count:
            info = await self._inner.head(name)
            count.objects += 1
            return info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        with self._request(Operation.LIST, prefix) as count:
            async for info in self._inner.list(prefix, start_after=start_after):
                count.objects += 1
                self.reads.succeed()
                yield info

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        with self._request(Operation.DELETE, *doomed) as count:
            count.objects += len(doomed)
            await self._inner.delete(doomed)

    async def now_ms(self) -> int:
        with self._request(Operation.NOW_MS):
            return await self._inner.now_ms()

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        with self._request(Operation.RECOVER) as count:
            recovered = await self._inner.repair(is_collected)
            count.objects += recovered.completed
            return recovered

    async def close(self) -> None:
        await self._inner.close()

    @contextmanager
    def _request(self, operation: Operation, *names: str) -> Iterator[Count]:
        folders = {name.partition("/")[0] for name in names}
        folder = folders.pop() if len(folders) == 1 else ""
        key = (operation, folder if folder in FOLDERS else "")
        kept = (self._counts[operation], self._by_folder.setdefault(key, Count()))
        for count in kept:
            count.requests += 1
        seen = Count()
        number = self.reads.begin() if operation in _READS else None
        try:
            yield seen
            if number is not None:
                self.reads.succeed()
        except ObjectNotFound:
            self.reads.succeed()
            raise
        except (StoreUnavailable, StoreBroken, StoreRefused) as error:
            seen.failures += not isinstance(error, StoreRefused)
            if number is not None:
                self.reads.fail(number, error)
            raise
        finally:
            if number is not None:
                self.reads.end(number)
            for count in kept:
                count.add(seen)

    @contextmanager
    def _in_flight(self, name: str) -> Iterator[None]:
        folder = name.rpartition("/")[0]
        now = self._creates_in_flight.get(folder, 0) + 1
        self._creates_in_flight[folder] = now
        self._most_creates_in_flight[folder] = max(now, self._most_creates_in_flight.get(folder, 0))
        try:
            yield
        finally:
            self._creates_in_flight[folder] -= 1
