"""The clocks of a store and of a machine, which a test sets wrong, in virtual time."""

from __future__ import annotations

from random import Random
from typing import Any

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.settings import CLOCK_JUMP_MAX_S, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.write.opening import open_log
from shalekv.write.recovery import RecoveredLog
from shalekv.write.repair_time import TimeFound, repair_time
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import QuorumDatabase
from tests.kit.store import STORE_NOW_MS

DAY_MS = 86_400_000
ANY_JUMP = {"clock_jump_max_s": 3_153_600_000}


class SetClock(LoopClock):
    """The clock of a machine: `ahead_ms` is its error, `suspended_ms` what lapsed unseen."""

    def __init__(self, ahead_ms: int = 0) -> None:
        self.ahead_ms = ahead_ms
        self.passed_ms = 0  # beside the time of the loop
        self.suspended_ms = 0

    def loop_ms(self) -> float:
        return super().monotonic_ms()

    @property
    def true_ms(self) -> int:
        return STORE_NOW_MS + self.passed_ms + int(self.loop_ms())

    def monotonic_ms(self) -> float:
        return self.loop_ms() + self.passed_ms - self.suspended_ms

    def wall_ms(self) -> int | None:
        return self.true_ms + self.ahead_ms


class ClockedDatabase(QuorumDatabase):
    """A database in an object store of this process, of either WAL mode."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = SetClock()
        self.store_ahead_ms = 0
        super().__init__(seed)

    def store_now_ms(self) -> int:
        return self.clock.true_ms + self.store_ahead_ms

    def another_store(self) -> MemoryStore:
        store = MemoryStore(self.store_now_ms, objects=self.objects)
        store.url = "s3://clocked"  # it has a clock of its own
        return store

    def runtime(self) -> Runtime:
        return Runtime(self.clock, Random(self._seeds.getrandbits(64)), InlineWorkers())

    def cas(self) -> CasStore:
        return CasStore(self.another_store(), self.runtime(), StoreSettings())

    async def open_at(self, links: InProcessLinks | None = None, **settings: Any) -> RecoveredLog:
        """Open it for writing, by the clocks as they are set."""
        writer = WriterSettings.model_validate({"flush_interval_ms": 0} | settings)
        return await open_log(self.cas(), writer, address="here:1", links=links)

    async def repair(self, links: InProcessLinks) -> TimeFound:
        return await repair_time(self.cas(), links, CLOCK_JUMP_MAX_S)


async def create_at(database: ClockedDatabase) -> None:
    """Create it, by the clocks as they are set."""
    await create_database(database.another_store(), database.runtime(), StoreSettings())
