"""Processes that share a plain store and records, and run one request at a time.

They are coroutines without an event loop: each stops before every request, and a test chooses which
one continues. The second half of a copy, in which the store writes what it has read, is a step of
its own, a landing. It may come at any later time, also after the process that requested the copy
has crashed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import count
from random import Random
from typing import Any

from shalekv.errors import StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.runtime import Runtime
from shalekv.store.api import NO_METADATA, ObjectInfo, Repaired, RequestKind, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.records import InsertOutcome, InsertUnknown
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.inline_runtime import InlineClock, InlineWorkers, finish
from tests.kit.memory_records import MemoryRecords, Table


class Fate(Enum):
    """The outcome of a request."""

    ANSWERED = auto()
    REQUEST_LOST = auto()  # no answer, and nothing was done
    REPLY_LOST = auto()  # no answer, and it was done
    LATE = auto()  # no answer, and it will be done later, or never


# Chooses the fate of a request by its name, such as "copy".
Fates = Callable[[str], Fate]


def all_answered(_request: str) -> Fate:
    return Fate.ANSWERED


class Turn:
    """Awaited before a request: returns control to the code that runs the processes."""

    def __init__(self, request: str) -> None:
        self.request = request

    def __await__(self) -> Generator[Turn, None, None]:
        yield self


@dataclass(slots=True)
class Landing:
    """The second half of a copy, in which `found` is written to `destination`."""

    destination: str
    found: StoredObject
    has_landed: bool = False


@dataclass(slots=True)
class Cluster:
    """The state that all processes share."""

    objects: MemoryObjects = field(default_factory=MemoryObjects)
    table: Table = field(default_factory=dict)
    landings: list[Landing] = field(default_factory=list)
    late: list[Callable[[], Coroutine[Any, Any, Any]]] = field(default_factory=list)
    ticks: count[int] = field(default_factory=lambda: count(1))
    random: Random = field(default_factory=lambda: Random(1))

    def open(self, fates: Fates = all_answered) -> TwoPhaseStore:
        return TwoPhaseStore(SteppedStore(self, fates), SteppedRecords(self, fates), self.runtime)

    @property
    def runtime(self) -> Runtime:
        return Runtime(InlineClock(), self.random, InlineWorkers())

    def land(self, landing: Landing) -> None:
        if landing.has_landed:
            return
        landing.has_landed = True
        self.landings.remove(landing)
        info = ObjectInfo(landing.destination, len(landing.found.data), next(self.ticks))
        found = landing.found
        self.objects.replace(StoredObject(info, found.data, found.metadata))

    def catch_up(self, random: Random) -> None:
        """Carry out one of the late requests."""
        finish(self.late.pop(random.randrange(len(self.late)))())

    def data(self, name: str) -> bytes | None:
        found = self.objects.find(name)
        return None if found is None else found.data

    def temporary(self, folder: str) -> list[str]:
        names = [info.name for info in self.objects.page(folder, "")]
        return [name for name in names if parse_temporary_name(name) is not None]

    def record(self, name: str) -> CreateRecord | None:
        return self.table.get(Destination("memory://stepped", name))


class Process:
    """A process that a test runs request by request."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.result: Any = None
        self.is_done = False
        self.next_request = ""
        self.step()  # to the turn before its first request

    def step(self) -> None:
        """Run the next request, and go on to the turn before the one after that."""
        try:
            turn = self._coroutine.send(None)
        except StopIteration as stop:
            self.result = stop.value
            self.is_done = True
        else:
            assert isinstance(turn, Turn), turn
            self.next_request = turn.request

    def until(self, request: str) -> None:
        """Run requests up to this one, which is not run yet."""
        while self.next_request != request:
            assert not self.is_done, f"it never made the request {request}"
            self.step()

    def finish(self) -> Any:
        while not self.is_done:
            self.step()
        return self.result

    def crash(self) -> None:
        self._coroutine.close()
        self.is_done = True


async def sweep(store: TwoPhaseStore, folder: str = "wal/") -> None:
    listed = [info.name async for info in store.list(folder)]
    doomed = [name for name in listed if parse_temporary_name(name) is not None]
    if doomed:
        await store.delete(doomed)


async def collect(
    store: TwoPhaseStore,
    folder: str = "wal/",
    is_collected: Callable[[str], bool] = lambda _name: False,
) -> Repaired:
    """Act as a collector: repair, delete temporary and collected objects, and repair again."""
    await store.repair(is_collected)
    await sweep(store, folder)
    doomed = [info.name async for info in store.list(folder) if is_collected(info.name)]
    if doomed:
        await store.delete(doomed)
    return await store.repair(is_collected)


@dataclass(slots=True)
class RequestSteps:
    """The requests of one process: each has the fate that a test chose."""

    cluster: Cluster
    fates: Fates
    url: str

    async def begin(self, request: str) -> Fate:
        await Turn(request)
        return self.fates(request)

    def end(self, fate: Fate, request: str, name: str) -> None:
        if fate is not Fate.ANSWERED:
            raise StoreUnavailable(self.url, request, name, fate.name)

    async def read(self, request: str, name: str) -> None:
        self.end(await self.begin(request), request, name)

    async def change(
        self, request: str, name: str, change: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        fate = await self.begin(request)
        if fate is Fate.LATE:
            self.cluster.late.append(change)
        result = await change() if fate in {Fate.ANSWERED, Fate.REPLY_LOST} else None
        self.end(fate, request, name)
        return result


class SteppedStore(MemoryStore):
    """The plain store as one process uses it."""

    def __init__(self, cluster: Cluster, fates: Fates) -> None:
        super().__init__(lambda: next(cluster.ticks), name="stepped", objects=cluster.objects)
        self._steps = RequestSteps(cluster, fates, self.url)

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        await self._steps.change("put", name, partial(super().put, name, data, metadata))

    async def copy(self, source: str, destination: str) -> None:
        fate = await self._steps.begin("copy")
        self.sent.add(RequestKind.WRITE)
        if fate is not Fate.REQUEST_LOST:
            landing = Landing(destination, self._find("copy", source))
            self._steps.cluster.landings.append(landing)
            if fate is not Fate.LATE:
                await Turn("landing")
                self._steps.cluster.land(landing)
        self._steps.end(fate, "copy", source)

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        await self._steps.change("delete", str(doomed), partial(super().delete, doomed))

    async def get(self, name: str) -> StoredObject:
        await self._steps.read("get", name)
        return await super().get(name)

    async def head(self, name: str) -> ObjectInfo:
        await self._steps.read("head", name)
        return await super().head(name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """The page is read in the turn, and gone through while others go on."""
        await self._steps.read("list", prefix)
        async for info in super().list(prefix, start_after=start_after):
            yield info


class SteppedRecords(MemoryRecords):
    """The records as one process uses them."""

    def __init__(self, cluster: Cluster, fates: Fates) -> None:
        super().__init__(table=cluster.table)
        self._steps = RequestSteps(cluster, fates, self.url)

    async def insert(self, record: CreateRecord) -> InsertOutcome:
        try:
            outcome: InsertOutcome = await self._change("insert", partial(super().insert, record))
        except StoreUnavailable as error:
            return InsertUnknown(str(error))
        return outcome

    async def find(self, destination: Destination) -> CreateRecord | None:
        await self._steps.read("find", str(destination))
        return await super().find(destination)

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
        await self._steps.read("list records", database)
        async for record in super().list(database, uncommitted_only=uncommitted_only):
            yield record

    async def commit(self, record: CreateRecord) -> bool:
        return bool(await self._change("commit", partial(super().commit, record)))

    async def take_over(self, record: CreateRecord, source: str) -> bool:
        return bool(await self._change("take_over", partial(super().take_over, record, source)))

    async def withdraw(self, record: CreateRecord) -> None:
        await self._change("withdraw", partial(super().withdraw, record))

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        doomed = tuple(destinations)
        await self._change("delete_committed", partial(super().delete_committed, doomed))

    async def _change(self, request: str, change: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self._steps.change(request, "a record", change)
