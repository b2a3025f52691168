"""Compactions picked at random, over everything that a key can go through."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob
from shalekv.core.compaction.state import move_result
from shalekv.core.key_range import KeyRange
from shalekv.errors import ManifestConflict
from tests.kit.engine.compaction import CompactedDatabase, record, small_settings
from tests.unit.engine.compaction.range_jobs import KEYS, check, picked, random_commit, ranged


async def history(seed: int) -> None:
    """Write, and merge at random; look after every job."""
    random = Random(seed)
    limits = small_settings(
        sst_bytes=random.choice((60, 250, 4_000)), subcompactions=random.choice((1, 3))
    )
    database = await CompactedDatabase.begun(limits, seed)

    async def write_and_compact() -> None:
        for _ in range(random.randrange(5)):
            for _ in range(random.randrange(4)):
                now_ms = database.logical_time_ms
                counts = [random.randrange(9) for _ in range(random.randrange(4))]
                commits = [c for n in counts for c in random_commit(random, n, now_ms)]
                expiry_ms = now_ms + random.randrange(3_000)
                records = [record(b"r%d" % random.randrange(4), expiry_ms)]
                kept = records if commits and random.random() < 0.4 else []
                await database.write(*commits, records=kept, time_ms=random.choice((0, 5, 900)))
            manifest = await database.stored.refresh()
            left = len(database.written) - manifest.first_uncompacted_wal_id
            job = picked(random, await database.tree(), left)
            if job is not None:
                await database.run(job)
                await check(database)

    for _ in range(random.randint(2, 5)):
        await write_and_compact()
        start, end = sorted((random.choice(KEYS), random.choice(KEYS)))
        keys = KeyRange(start, end if start < end and random.random() < 0.8 else b"")
        before = await database.stored.refresh()
        try:
            forced = random.random() < 0.3
            await ranged(database, keys, meanwhile=write_and_compact, forced=forced)
        except ManifestConflict:
            assert (await database.stored.refresh()).manifest_id > before.manifest_id + 1
        await check(database)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_no_compaction_changes_an_answer(seed: int) -> None:
    """Whatever is merged in whatever order, also beside a job over a range of keys, every key holds
    what was written last: at worst, the job over a range ends in vain (I2, I9).
    """
    asyncio.run(history(seed))


def test_a_move_is_the_same_sst_in_another_level() -> None:
    """The result of a move is known without reading or writing."""
    assert move_result(MergeJob(1, 2, (), (), is_move=True, reason="")).outputs == []
