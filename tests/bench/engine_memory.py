"""Measurement of the memory that entries of a memtable take: run as a process of its own.

Prints the resident bytes per entry beside what is accounted, for commits of the given size.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

import structlog

from shalekv.errors import ShaleError
from shalekv.format import names
from shalekv.protocol.entry import Kind
from shalekv.protocol.transaction import Change
from shalekv.settings import GIB
from shalekv.store.api import NO_METADATA, Created, CreateOutcome
from shalekv.store.memory import MemoryStore
from shalekv.write.commit import Commit, Receipt, changes_bytes
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime, running, serve_settings, wall_clock_ms

KEY_BYTES = 16
VALUE_BYTES = 100
SETTLE_EVERY = 10_000  # entries between two waits for all to be durable
MERGING_ROUNDS = sized(
    10_000, 100
)  # of the event loop, after which all runs that are due are merged


class ForgetfulStore(MemoryStore):
    """Takes WAL objects and keeps none, so that only the memtable grows."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        if name.startswith(names.WAL_FOLDER):
            return Created()
        return await super().create(name, data, metadata)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ignore(_: Receipt | ShaleError) -> None:
    """Ignore the outcome of a commit: no caller waits for it."""


async def measure(entries: int, batch: int) -> None:
    """Write random entries in commits of `batch`, and print what they take."""
    random = Random(1)
    settings = serve_settings(writer={"memtable_bytes_max": 16 * GIB})
    store = ForgetfulStore(wall_clock_ms)
    with real_runtime(threads=1) as runtime:
        async with running(store, settings, runtime) as writer:
            engine = writer.engine
            gc.collect()
            before = resident_bytes()
            for begin in range(0, entries, batch):
                changes = [
                    Change(random.randbytes(KEY_BYTES), Kind.PUT, random.randbytes(VALUE_BYTES))
                    for _ in range(batch)
                ]
                assert engine.admission.try_admit(changes_bytes(changes))
                engine.log.submit(Commit(changes, engine.log.next_seq, ignore))
                await asyncio.sleep(0)
                if begin % SETTLE_EVERY == 0:
                    await engine.watermark.wait_for(engine.log.next_seq - 1)
            await engine.watermark.wait_for(engine.log.next_seq - 1)
            for _ in range(MERGING_ROUNDS):
                await asyncio.sleep(0)
            gc.collect()
            grown = resident_bytes() - before
            accounted = engine.memtable.size_bytes
    overhead = grown / entries - KEY_BYTES - VALUE_BYTES
    accounted_overhead = accounted / entries - KEY_BYTES - VALUE_BYTES
    print(
        f"{entries:,} entries in commits of {batch}: resident {grown / 1e6:.0f} MB, "
        f"accounted {accounted / 1e6:.0f} MB; overhead of an entry {overhead:.0f} bytes, "
        f"accounted {accounted_overhead:.0f}; {engine.memtable.run_count} runs"
    )


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no log lines
    asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))
