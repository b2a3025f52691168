"""Runs all checks of a store in memory."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryObjects
from shalekv.store.two_phase.memory import MemoryRecords, Table
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.store.verify.scratch import Effort
from shalekv.store.verify.verdict import Failed, Verdict
from shalekv.store.verify.verifying import verification
from tests.kit.careless_stores import Kind
from tests.kit.inline_runtime import inline_runtime

EFFORT = Effort(racers=4, rounds=5, large_object_bytes=3 << 20)


class Tried:
    """A store, and what the checks found of it."""

    def __init__(self, open_one: Callable[[], ObjectStore]) -> None:
        self.open_one = open_one
        self.verdicts: dict[str, Verdict] = {}
        self.lost: dict[str, str] = {}
        self.left: list[str] = []

    @property
    def failed(self) -> set[str]:
        return {name for name, verdict in self.verdicts.items() if isinstance(verdict, Failed)}

    async def run(self) -> None:
        runtime = inline_runtime(1)
        async with verification(
            self.open_one, runtime, StoreSettings(), EFFORT, self.left.extend
        ) as verifying:
            async for finding in verifying.findings():
                self.verdicts[finding.check.name] = finding.verdict
                self.lost[finding.check.name] = finding.check.lost


async def tried(kind: Kind, objects: MemoryObjects | None = None) -> Tried:
    shared = MemoryObjects() if objects is None else objects
    trial = Tried(lambda: kind(shared))
    await trial.run()
    return trial


def two_phases(kind: Kind, records: type[MemoryRecords]) -> Callable[[], TwoPhaseStore]:
    objects, table, runtime = MemoryObjects(), Table(), inline_runtime(2)
    return lambda: TwoPhaseStore(kind(objects), records(table=table), runtime)
