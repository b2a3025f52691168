"""Databases for random compactions and range jobs, and events during these."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from shalekv.format.records import record_key
from shalekv.jobs.compact.parts import MergePart, OwnProcessParts, PartResult
from shalekv.jobs.compact.range_job import (
    EVERYTHING,
    CompactionReport,
    PartLimits,
    RangeRequest,
    run_range,
)
from shalekv.protocol.compaction.jobs import Job, MergeJob, WalJob
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Version
from shalekv.settings import CompactorConfig
from tests.kit.engine.compaction import STORE_NOW_MS, CompactedDatabase, merge_job, random_entry
from tests.kit.engine.naive_merge import Versions, answers

KEYS = [b"", *(b"k%02d" % n for n in range(24)), b"k05\x00", b"\xff\xff"]
DEEPEST = 3

Meanwhile = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Do nothing."""


class Parts(OwnProcessParts):
    """Runs parts that have been pickled, while a test makes something else happen."""

    is_parallel = True

    def __init__(self, database: CompactedDatabase, meanwhile: Meanwhile = nothing) -> None:
        super().__init__(database.cas)
        self._meanwhile = meanwhile
        self.results: Sequence[PartResult] = ()

    async def run(
        self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Run the parts and the event; return the results."""
        travelled: Sequence[MergePart] = pickle.loads(pickle.dumps(parts))  # noqa: S301 - our own
        self.results = await super().run(travelled, is_lifted)
        await self._meanwhile()
        return self.results


def request(
    database: CompactedDatabase, keys: KeyRange = EVERYTHING, *, forced: bool = False
) -> RangeRequest:
    limits = PartLimits(
        part_bytes=600,
        memory_bytes=database.settings.compactor.subcompaction_memory_bytes,
        parallel_count=2,
        levels=database.settings.levels,
    )
    return RangeRequest(
        limits=limits, keys=keys, compactor=database.settings.compactor, is_forced=forced
    )


async def ranged(
    database: CompactedDatabase,
    keys: KeyRange = EVERYTHING,
    *,
    meanwhile: Meanwhile = nothing,
    forced: bool = False,
) -> CompactionReport:
    parts = Parts(database, meanwhile)
    return await run_range(database.cas, request(database, keys, forced=forced), parts)


def random_commit(random: Random, count: int, now_ms: int) -> list[list[Entry]]:
    """Make one commit with at most `count` keys, if any."""
    entries = {e.key: e for e in (random_entry(random, KEYS, now_ms) for _ in range(count))}
    return [[*entries.values()]] if entries else []


async def filled(slots: int = 8, limits: CompactorConfig | None = None) -> CompactedDatabase:
    """Create a database with changes in L0 and in two levels below."""
    database, random = await CompactedDatabase.begun(limits), Random(1)
    for slot in range(slots):
        await database.write(*random_commit(random, 12, STORE_NOW_MS), time_ms=5)
        await database.compact_wal()
        if slot in {2, 5}:
            await database.merge(L0, DEEPEST if slot == 2 else DEEPEST - 1)
    return database


def picked(random: Random, version: Version, slots_left: int) -> Job | None:
    kind = random.randrange(6)
    if kind < 2 and slots_left:
        first = 0 if version.wal_id is None else version.wal_id + 1
        return WalJob(range(first, first + random.randint(1, slots_left)), "random")
    if kind == 5:
        return merge_job(version, SYSTEM_LEVEL, SYSTEM_LEVEL, random.randint(1, 4))
    levels = [run.level for run in version.runs]
    source = random.choice([L0, *levels])
    if source >= DEEPEST:
        return None  # below, only a job over a range merges
    below = [level for level in levels if level > source]
    target = min([random.randint(source + 1, DEEPEST), *below])
    job = merge_job(version, source, target, random.randint(1, 6))
    if job is None or job.overlapped or random.random() < 0.5:
        return job
    if source == L0 and len(job.sources) > 1:
        return job  # they may overlap each other
    return MergeJob(source, target, job.sources, (), is_move=True, reason="random")


async def check(database: CompactedDatabase) -> None:
    """Check that the levels hold what was written to the slots up to c (I2), and the records of
    their time.
    """
    manifest = await database.stored.refresh()
    naive = await database.read()
    written = database.compacted(manifest)
    for now_ms in (manifest.logical_time_ms, manifest.logical_time_ms + 10**6):
        assert naive.answers(KEYS, now_ms) == answers(written, KEYS, now_ms)
    assert manifest.last_compacted_seq == max((entry.seq for entry in written), default=0)
    horizon_ms = manifest.logical_time_ms - 1_000
    records = Versions(entry for entry in written if entry.kind is not Kind.RANGE_TOMBSTONE)
    for key in (record_key(b"r%d" % n) for n in range(4)):
        expected = records.newest_of(key)
        if expected is not None and expected.expire_at_ms > horizon_ms:
            assert naive.record(key) == expected
