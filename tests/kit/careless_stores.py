"""Stores that break one promise each: what `shalekv store verify` must notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    ObjectInfo,
    StoredObject,
)
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.records import Inserted, InsertOutcome
from tests.kit.inline_runtime import gathered
from tests.kit.memory_records import MemoryRecords

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class Careful(MemoryStore):
    """Keeps all promises. Stores with the same objects are views of one database."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(lambda: NOW_MS, name="tried", objects=objects)
        self.seen: set[str] = set()  # names that were read or listed
        self.clock_reads = 0


Kind = Callable[[MemoryObjects], Careful]


class IgnoresConditions(Careful):
    """Takes every create for a put."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        await self.put(name, data, metadata)
        return Created()


class ReplacesAndSaysSo(Careful):
    """Reports that an object exists, and replaces it."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        outcome = await super().create(name, data, metadata)
        await self.put(name, data, metadata)
        return outcome


class HeadThenPut(Careful):
    """Checks the condition, but lets other requests in between the check and the write."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        try:
            await self.head(name)
        except ObjectNotFound:
            await asyncio.sleep(0)
            await self.put(name, data, metadata)
            return Created()
        return Exists()


class ReadsTooEarly(Careful):
    """Does not find an object when it is first read."""

    async def get(self, name: str) -> StoredObject:
        found = await super().get(name)
        if name not in self.seen:
            self.seen.add(name)
            raise ObjectNotFound(self.url, "get", name, "no object has this name")
        return found


class ReadsTheDeleted(Careful):
    """Deletes nothing before the end."""

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        if len(doomed) > 1:
            await super().delete(doomed)


class ListsAll(Careful):
    """Begins every list at its beginning."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        del start_after
        async for info in super().list(prefix):
            yield info


class CutsRanges(Careful):
    """Leaves out the last byte of a range that reaches past the end."""

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        found = await super().get_range(name, offset, length)
        return found if len(found) == length else found[:-1]


class DatesByAnotherClock(Careful):
    """Reports objects as an hour older than its clock says."""

    async def head(self, name: str) -> ObjectInfo:
        return replace(await super().head(name), modified_ms=NOW_MS - HOUR_MS)


class KeepsTheFirst(Careful):
    """Puts and copies do not replace what is there."""

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        await self.create(name, data, metadata)


class CopiesBytesAlone(Careful):
    """Copies no metadata."""

    async def copy(self, source: str, destination: str) -> None:
        await self.put(destination, (await self.get(source)).data)


class InsertsTwice(MemoryRecords):
    """Has every insert replace what is there."""

    async def insert(self, record: CreateRecord) -> InsertOutcome:
        self._table[record.destination] = record
        return Inserted()


def lists(change: Callable[[Careful, Sequence[ObjectInfo]], Iterable[ObjectInfo]]) -> Kind:
    class Lists(Careful):
        async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            found = await gathered(super().list(prefix, start_after=start_after))
            for info in change(self, found):
                yield info

    return Lists


def gets(change: Callable[[StoredObject], StoredObject]) -> Kind:
    class Gets(Careful):
        async def get(self, name: str) -> StoredObject:
            return change(await super().get(name))

    return Gets


def with_clock(clock_ms: Callable[[int], int | None]) -> Kind:
    """Return a kind of store whose clock is `clock_ms(number of the read)`; None: no answer."""

    class WithClock(Careful):
        async def now_ms(self) -> int:
            self.clock_reads += 1
            now_ms = clock_ms(self.clock_reads)
            if now_ms is None:
                raise StoreUnavailable(self.url, "now", "clock", "the reply has no Date")
            return now_ms

    return WithClock


def _too_early(store: Careful, found: Sequence[ObjectInfo]) -> Iterable[ObjectInfo]:
    shown = [info for info in found if info.name in store.seen]
    store.seen.update(info.name for info in found)
    return shown


ListsTooEarly = lists(_too_early)  # not in the first list that an object belongs to
ListsBackwards = lists(lambda _, found: found[::-1])
ListsByLetters = lists(lambda _, found: sorted(found, key=lambda info: info.name.lower()))
ListsOnePage = lists(lambda _, found: found[:1_000])
HidesTheEmpty = lists(lambda _, found: [info for info in found if info.size_bytes])
CutsTheLarge = gets(lambda found: replace(found, data=found.data[: 1 << 20]))
LosesMetadata = gets(lambda found: replace(found, metadata=NO_METADATA))  # as stores may
ChangesMetadata = gets(
    lambda found: replace(found, metadata={key: f"{v}0" for key, v in found.metadata.items()})
)
HasNoClock = with_clock(lambda _: None)
StepsBack = with_clock(lambda number: NOW_MS - HOUR_MS if number == 2 else NOW_MS)
GoesBack = with_clock(lambda number: NOW_MS - number * HOUR_MS)
