"""Databases and backups in stores without conditional writes."""

from __future__ import annotations

from random import Random

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords, Table
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.engine.backups import SEEDS, Place, back_up, backup_ids, database, deletion, verify
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.in_process import wall_clock_ms


class TwoPhasePlace(Place):
    """A place where records decide who has created an object."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Table = {}

    def store(self) -> ObjectStore:
        """One more view of it."""
        runtime = Runtime(LoopClock(), Random(next(SEEDS)), InlineWorkers())
        plain = MemoryStore(wall_clock_ms, objects=self.objects)
        return TwoPhaseStore(plain, MemoryRecords(table=self.table), runtime)


async def test_names_are_free_again_when_backups_were_deleted() -> None:
    """Copies that went with a backup are made again for the next one; records do not pile up."""
    source, _ = await database()
    repository = TwoPhasePlace()
    for _ in range(3):
        made = await back_up(source, repository)
        assert await verify(repository) == []
        await deletion(repository).run(await backup_ids(repository))
        assert repository.names() == []
        assert len(repository.table) < len(made.copies) // 2
