"""Databases for jobs over a range of keys, and what else may happen while one runs."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from shalekv.core.compaction.jobs import WalJob
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import L0, Tree
from shalekv.engine.compaction.part import Part, PartResult
from shalekv.engine.compaction.parts import OwnProcessParts
from shalekv.engine.compaction.range_parts import PartLimits
from shalekv.engine.compaction.range_report import CompactionReport
from shalekv.engine.compaction.range_run import EVERYTHING, RangeRequest, run_range
from shalekv.settings import CompactSettings
from tests.kit.engine.compaction import (
    STORE_NOW_MS,
    Trial,
    merge_job,
    random_entry,
)
from tests.unit.engine.compaction.test_merge_model import DEEPEST, KEYS

Meanwhile = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Nothing happens meanwhile."""


class Parts(OwnProcessParts):
    """Runs parts that have travelled, while a test lets something else happen."""

    is_parallel = True

    def __init__(self, trial: Trial, meanwhile: Meanwhile = nothing) -> None:
        super().__init__(trial.cas)
        self._meanwhile = meanwhile
        self.parts: Sequence[Part] = ()

    async def run(
        self, parts: Sequence[Part], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Their results, when the other thing has happened as well."""
        self.parts = parts
        travelled: Sequence[Part] = pickle.loads(pickle.dumps(parts))  # noqa: S301 - our own
        results = await super().run(travelled, is_lifted)
        await self._meanwhile()
        return results


def request(trial: Trial, keys: KeyRange = EVERYTHING, *, forced: bool = False) -> RangeRequest:
    """A job over these keys, in several parts."""
    limits = PartLimits(
        part_bytes=600,
        memory_bytes=trial.settings.compactor.subcompaction_memory_bytes,
        parallel_count=2,
        levels=trial.settings.levels,
    )
    return RangeRequest(
        limits=limits, keys=keys, compactor=trial.settings.compactor, is_forced=forced
    )


async def ranged(
    trial: Trial,
    keys: KeyRange = EVERYTHING,
    *,
    meanwhile: Meanwhile = nothing,
    forced: bool = False,
) -> CompactionReport:
    """Run such a job."""
    return await run_range(trial.cas, request(trial, keys, forced=forced), Parts(trial, meanwhile))


async def filled(seed: int = 1, slots: int = 8, limits: CompactSettings | None = None) -> Trial:
    """A database with changes in L0 and in two levels below."""
    trial, random = await Trial.begun(limits, seed), Random(seed)
    for slot in range(slots):
        entries = {e.key: e for e in (random_entry(random, KEYS, STORE_NOW_MS) for _ in range(12))}
        await trial.write([*entries.values()], time_ms=5)
        await trial.run(WalJob(range(slot, slot + 1), ""))
        if slot in {2, 5}:
            tree = Tree.of(await trial.stored.refresh())
            job = merge_job(tree, L0, DEEPEST if slot == 2 else DEEPEST - 1, len(tree.l0))
            assert job is not None
            await trial.run(job)
    return trial
