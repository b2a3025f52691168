"""A process that keeps and finds parts in a folder that others use, damage and delete.

    python -m tests.unit.store.disk_cache.hammering FOLDER BYTES_MAX SEED ROUNDS

It ends with an error if anything that it finds is wrong. It prints a line for each of some rounds,
and in the end how many parts it has found, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random

import structlog

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.disk_cache import DiskCache
from shalekv.store.disk_cache_part import Part
from tests.kit.disks.cache_folders import data_of, finds, part

PARTS = 400
FINDERS = 4
ROUNDS_TOLD = 50


def shared_part(number: int) -> Part:
    """One of those that all processes use: some of a page, some of many."""
    return part(number, 500 + 67 * number)


def tell(line: str) -> None:
    """Print a line in one piece, whatever other processes print: they share the pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode("ascii"))


async def hammer(path: Path, bytes_max: int, seed: int, rounds: int) -> None:
    """Find parts, most of them those that others use too, and keep what is not there."""
    workers = ThreadWorkers(4)
    random = Random(seed)
    cache = DiskCache(path, bytes_max, Runtime(LoopClock(), random, workers))

    async def finder() -> None:
        for number in range(rounds):
            if number % ROUNDS_TOLD == 0:
                tell("on")  # what the test paces itself by
            wanted = shared_part(int(PARTS * random.random() ** 2))
            if not await finds(cache, wanted):
                cache.keep(wanted, data_of(wanted))

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cache.run())
        finders = [tasks.create_task(finder()) for _ in range(FINDERS)]
        await asyncio.wait(finders)
        running.cancel()
    workers.close()
    tell(json.dumps(asdict(cache.counters)))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no log lines
    asyncio.run(hammer(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
