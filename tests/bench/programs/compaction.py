"""Measurement of a merge on one core, in a process of its own: prints JSON.

    compaction.py ENTRIES CODEC

Four runs that overlap everywhere, with so many entries each, become one. The store takes no time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random

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
from tests.bench.programs.meter import Meter
from tests.kit.engine.compaction import OWNER, whole_part
from tests.kit.inline_runtime import InlineWorkers

RUNS = 4
ROUNDS = 3
VALUE_BYTES = 100


def rows(random: Random, seq: int, entries: int) -> Columns:
    """Puts of 16-byte keys, drawn from four times as many."""
    keys = [b"%016d" % n for n in sorted(random.sample(range(4 * entries), entries))]
    half = VALUE_BYTES // 2
    values = [random.randbytes(half) + bytes(half) for _ in keys]
    return Columns(keys, [seq] * entries, bytes((Kind.PUT,)) * entries, values, [0] * entries)


async def measure(entries: int, codec: LevelCodec) -> list[float]:
    """Return entries per second of processor time, merge by merge."""
    runtime = Runtime(LoopClock(), Random(1), InlineWorkers())
    store = CasStore(MemoryStore(lambda: 1), runtime, StoreSettings())
    levels = LevelSettings(codec=codec)
    pace = TokenBucket(store.runtime.clock, 0)
    random, sources = Random(7), []
    for run in range(RUNS):
        writer = LevelWriter(store, OWNER, levels, pace)
        sst = writer.begin()
        columns = rows(random, RUNS - run, entries)
        for start in range(0, entries, 1000):
            sst.add(Section.POINTS, columns.rows(start, start + 1000))
        sources.append([await writer.create(sst, L0)])
    part = whole_part(sources, levels=levels, memory_bytes=64 * MIB)
    rates = []
    for _ in range(ROUNDS):
        with Meter(RUNS * entries) as meter:
            await run_part(store, part, pace)
        rates.append(1e6 / meter.figures["CPU us"])
    return rates


if __name__ == "__main__":
    print(json.dumps({"rates": asyncio.run(measure(int(sys.argv[1]), LevelCodec(sys.argv[2])))}))
