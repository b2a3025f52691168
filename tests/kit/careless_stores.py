"""Stores that break one promise each: what `shalekv store verify` must notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace

from shalekv.core.two_phase import Record
from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    ObjectInfo,
    StoredObject,
)
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords
from shalekv.store.two_phase.records import Inserted, InsertOutcome
from tests.kit.inline_runtime import gathered

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000

OpenStore = Callable[[], MemoryStore]


class Careful(MemoryStore):
    """Breaks none. All that are given the same objects are views of one database."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(lambda: NOW_MS, name="tried", objects=objects)


class IgnoresConditions(Careful):
    """Takes every create for a put."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        await self.put(name, data, metadata)
        return Created()


class ReplacesAndSaysSo(Careful):
    """Tells that an object exists, and replaces it."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        outcome = await super().create(name, data, metadata)
        await self.put(name, data, metadata)
        return outcome


class LooksThenWrites(Careful):
    """Keeps conditions, but lets others in between the look and the write."""

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

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self._read: set[str] = set()

    async def get(self, name: str) -> StoredObject:
        found = await super().get(name)
        if name not in self._read:
            self._read.add(name)
            raise ObjectNotFound(self.url, "get", name, "no object has this name")
        return found


class ReadsTheDeleted(Careful):
    """Deletes nothing before the end."""

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        if len(doomed) > 1:
            await super().delete(doomed)


class ListsTooEarly(Careful):
    """Does not show an object in the first list that it belongs to."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self._listed: set[str] = set()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix, start_after=start_after):
            if info.name in self._listed:
                yield info
            self._listed.add(info.name)


class ListsBackwards(Careful):
    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for info in reversed(await gathered(super().list(prefix, start_after=start_after))):
            yield info


class ListsByLetters(Careful):
    """Orders names as a dictionary does: a before B."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        found = await gathered(super().list(prefix, start_after=start_after))
        for info in sorted(found, key=lambda info: info.name.lower()):
            yield info


class ListsOnePage(Careful):
    """Shows no more than 1,000 objects."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for info in (await gathered(super().list(prefix, start_after=start_after)))[:1_000]:
            yield info


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


class HidesTheEmpty(Careful):
    """Takes objects without bytes for none."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix, start_after=start_after):
            if info.size_bytes:
                yield info


class CutsTheLarge(Careful):
    """Keeps no more than a megabyte."""

    async def get(self, name: str) -> StoredObject:
        found = await super().get(name)
        return replace(found, data=found.data[: 1 << 20])


class LosesMetadata(Careful):
    """As stores may."""

    async def get(self, name: str) -> StoredObject:
        return replace(await super().get(name), metadata=NO_METADATA)


class ChangesMetadata(Careful):
    async def get(self, name: str) -> StoredObject:
        found = await super().get(name)
        return replace(found, metadata={key: f"{value}0" for key, value in found.metadata.items()})


class TellsNoTime(Careful):
    async def now_ms(self) -> int:
        raise StoreUnavailable(self.url, "now", "clock", "the reply has no Date")


class StepsBack(Careful):
    """Its clock goes back by an hour for a moment."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self._looks = 0

    async def now_ms(self) -> int:
        self._looks += 1
        return NOW_MS - HOUR_MS if self._looks == 2 else NOW_MS


class GoesBack(Careful):
    """Its clock goes back by an hour with every look."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self._looks = 0

    async def now_ms(self) -> int:
        self._looks += 1
        return NOW_MS - self._looks * HOUR_MS


class DatesByAnotherClock(Careful):
    """Objects are an hour older than its clock says."""

    async def head(self, name: str) -> ObjectInfo:
        return replace(await super().head(name), modified_ms=NOW_MS - HOUR_MS)


class KeepsTheFirst(Careful):
    """Puts and copies do not replace what is there."""

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        await self.create(name, data, metadata)


class CopiesBytesAlone(Careful):
    async def copy(self, source: str, destination: str) -> None:
        await self.put(destination, (await self.get(source)).data)


class InsertsTwice(MemoryRecords):
    """Has every insert replace what is there."""

    async def insert(self, record: Record) -> InsertOutcome:
        self._table[record.destination] = record
        return Inserted()
