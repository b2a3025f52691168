"""Entries that a compaction merges in a second. Nothing is asserted about time."""

from __future__ import annotations

import time
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.format.columns import Columns, Section
from shalekv.jobs.compact.outputs import LevelWriter
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import run_part
from shalekv.protocol.entry import Kind
from shalekv.protocol.manifest import L0
from shalekv.runtime import Runtime
from shalekv.settings import MIB, LevelCodec, LevelSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.bench.sizes import sized
from tests.kit.engine.compaction import OWNER, whole_part
from tests.kit.inline_runtime import InlineWorkers

RUNS = 4
ENTRIES = sized(125_000, 2_000)  # in each
VALUE_BYTES = 100
DATABASE_ID = bytes(16)
pytestmark = pytest.mark.timeout(600)


def memory_store() -> CasStore:
    """A store without waiting, so that only computing counts."""
    runtime = Runtime(LoopClock(), Random(1), InlineWorkers())
    return CasStore(MemoryStore(lambda: 1), runtime, StoreSettings())


def rows(random: Random, seq: int) -> Columns:
    """Puts of 16-byte keys, drawn from four times as many."""
    keys = [b"%016d" % n for n in sorted(random.sample(range(4 * ENTRIES), ENTRIES))]
    half = VALUE_BYTES // 2
    values = [random.randbytes(half) + bytes(half) for _ in keys]
    return Columns(keys, [seq] * ENTRIES, bytes((Kind.PUT,)) * ENTRIES, values, [0] * ENTRIES)


@pytest.mark.parametrize("codec", [LevelCodec.NONE, LevelCodec.LZ4])
async def test_merge_of_levels(codec: LevelCodec) -> None:
    """Four runs that overlap everywhere become one, on one core."""
    store, levels = memory_store(), LevelSettings(codec=codec)
    pace = TokenBucket(store.runtime.clock, 0)
    random, sources = Random(7), []
    for run in range(RUNS):
        writer = LevelWriter(store, OWNER, levels, pace)
        sst = writer.begin()
        columns = rows(random, RUNS - run)
        for start in range(0, ENTRIES, 1000):
            sst.add(Section.POINTS, columns.rows(start, start + 1000))
        sources.append([await writer.create(sst, L0)])
    part = whole_part(sources, levels=levels, memory_bytes=64 * MIB)
    best_s, read_bytes = float("inf"), 0
    for _ in range(sized(3, 1)):
        began_s = time.process_time()
        read_bytes = (await run_part(store, part, pace)).read_bytes
        best_s = min(best_s, time.process_time() - began_s)
    entries = RUNS * ENTRIES
    print(
        f"\nmerge of {RUNS} runs, {codec}: {entries / best_s:,.0f} entries/s read, "
        f"{best_s / entries * 1e9:.0f} ns each, {read_bytes / best_s / MIB:.0f} MiB/s read"
    )
