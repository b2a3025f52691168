"""A store in memory that takes its time, loses replies, and can be stopped: for load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

from shalekv.clock import LoopClock
from shalekv.format import names
from shalekv.store.api import NO_METADATA, CreateOutcome, Exists, StoredObject, Unknown
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.processes.in_process import wall_clock_ms


class SlowStore(MemoryStore):
    """Creates take `create_ms`; a share of them is not answered, half of these not applied either.

    `most_slots_open` is the greatest number of WAL slots that were claimed at once: from the first
    create until the claimant knows the owner of the slot, with all pauses between its attempts.
    `most_creates` is the greatest number of creates of WAL objects that were in flight at once.
    """

    def __init__(
        self,
        *,
        create_ms: float = 0.0,
        lost: float = 0.0,
        seed: int = 0,
        objects: MemoryObjects | None = None,
    ) -> None:
        super().__init__(wall_clock_ms, objects=objects)
        self.most_slots_open = 0
        self.most_creates = 0
        self.lost_count = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.create_ms = create_ms
        self._lost = lost
        self._random = Random(seed)
        self._slots: set[str] = set()
        self._creates = 0  # of WAL objects, in flight

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        if not name.startswith(names.WAL_FOLDER):
            return await self._create(name, data, metadata)
        self._slots.add(name)
        self.most_slots_open = max(self.most_slots_open, len(self._slots))
        self._creates += 1
        self.most_creates = max(self.most_creates, self._creates)
        try:
            return await self._create(name, data, metadata)
        finally:
            self._creates -= 1

    async def _create(self, name: str, data: bytes, metadata: Mapping[str, str]) -> CreateOutcome:
        await LoopClock().sleep_ms(self.create_ms)
        await self.is_open.wait()
        dice = self._random.random()
        if dice < self._lost / 2:
            self.lost_count += 1
            return Unknown("the request was lost")
        outcome = await super().create(name, data, metadata)
        if dice < self._lost:
            self.lost_count += 1
            return Unknown("the reply was lost")
        if not isinstance(outcome, Exists):  # the claimant will read the object to find its owner
            self._slots.discard(name)
        return outcome

    async def get(self, name: str) -> StoredObject:
        stored = await super().get(name)
        self._slots.discard(name)
        return stored
