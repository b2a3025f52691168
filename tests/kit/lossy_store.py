"""A whole store whose replies a test loses, delays or refuses, one by one."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from itertools import count

from shalekv.errors import StoreBroken, StoreUnavailable
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    ObjectInfo,
    StoredObject,
    Unknown,
)
from shalekv.store.memory import MemoryStore


class Fate(enum.Enum):
    """What becomes of a request."""

    ANSWERED = enum.auto()
    REQUEST_LOST = enum.auto()  # nobody knows; it was never applied
    REPLY_LOST = enum.auto()  # nobody knows; it was applied
    LATE = enum.auto()  # nobody knows; it is applied right before the next create
    REFUSED = enum.auto()  # unavailable; not applied
    BROKEN = enum.auto()


class LossyStore(MemoryStore):
    """A memory store with a script: the fates of the next creates and reads, in order.

    When a script is at its end, everything is answered. `collected` are names that are deleted
    right before they are next read.
    """

    def __init__(self) -> None:
        moments = count()
        super().__init__(lambda: next(moments), name="lossy")
        self.creates: list[Fate] = []
        self.reads: list[Fate] = []
        self.collected: set[str] = set()
        self.log: list[str] = []
        self._late: list[tuple[str, bytes]] = []

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        self.log.append(f"create {name}")
        for late_name, late_data in self._late:
            await super().create(late_name, late_data)
        self._late.clear()
        fate = self.creates.pop(0) if self.creates else Fate.ANSWERED
        if fate is Fate.ANSWERED:
            return await super().create(name, data, metadata)
        if fate is Fate.REPLY_LOST:
            await super().create(name, data, metadata)
        if fate is Fate.LATE:
            self._late.append((name, data))
        self._refuse(fate, "create", name)
        return Unknown(fate.name)

    async def get(self, name: str) -> StoredObject:
        await self._read("get", name)
        return await super().get(name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        await self._read("get_range", name)
        return await super().get_range(name, offset, length)

    async def head(self, name: str) -> ObjectInfo:
        await self._read("head", name)
        return await super().head(name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Each object that it shows counts as a read."""
        async for info in super().list(prefix, start_after=start_after):
            await self._read("list", info.name)
            yield info

    async def now_ms(self) -> int:
        await self._read("now_ms", "the clock")
        return await super().now_ms()

    async def _read(self, operation: str, name: str) -> None:
        self.log.append(f"{operation} {name}")
        if name in self.collected:
            self.collected.remove(name)
            await self.delete([name])
        self._refuse(self.reads.pop(0) if self.reads else Fate.ANSWERED, operation, name)

    def _refuse(self, fate: Fate, operation: str, name: str) -> None:
        if fate is Fate.REFUSED:
            raise StoreUnavailable(self.url, operation, name, "the script says so")
        if fate is Fate.BROKEN:
            raise StoreBroken(self.url, operation, name, "the script says so")
