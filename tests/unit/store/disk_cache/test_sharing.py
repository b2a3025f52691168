"""Caches share a folder while others damage it: no wrong bytes are served."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.store.disk_cache import DiskCache
from shalekv.store.disk_cache_folder import FOLDER, CachedPart
from tests.kit.disks.cache_folders import (
    BYTES_MAX,
    data_of,
    files,
    finds,
    kept,
    open_cache,
    part,
    taken_bytes,
)
from tests.kit.seeds import random_of

CACHES = 3
PARTS = 400
SLACK_BYTES = CACHES * BYTES_MAX // 16
FLIPS, CUTS, UNLINKS, SWAPS = 0.4, 0.6, 0.8, 0.98  # the rest deletes a folder


def shared_part(number: int) -> CachedPart:
    """One of the parts that all caches use: some smaller than a page, some of many pages."""
    return part(number, 500 + 67 * number)


def damage(path: Path, random: Random) -> None:
    """Damage the folder in a way that must only cause misses."""
    found = files(path)
    if not found:
        return
    victim, other, dice = random.choice(found), random.choice(found), random.random()
    try:
        if dice < FLIPS:
            data = bytearray(victim.read_bytes())
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            victim.write_bytes(data)
        elif dice < CUTS:
            with victim.open("r+b") as file:
                file.truncate(random.randrange(victim.stat().st_size))
        elif dice < UNLINKS:
            victim.unlink()
        elif dice < SWAPS:
            victim.replace(other)
        else:
            shutil.rmtree(path / FOLDER if random.random() < 0.1 else victim.parent)
    except (OSError, ValueError):
        pass  # a cache was faster


async def hammer(cache: DiskCache, path: Path, random: Random, rounds: int) -> None:
    """Find parts that mostly others use too, keep the missing ones, and damage files."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cache.run())
        for number in range(rounds):
            wanted = shared_part(int(PARTS * random.random() ** 2))
            if not await finds(cache, wanted):
                cache.keep(wanted, data_of(wanted))
            if number % 20 == 0:
                damage(path, random)
                assert taken_bytes(path) <= BYTES_MAX + SLACK_BYTES
        running.cancel()


@pytest.mark.parametrize("rounds", [600, pytest.param(40_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
async def test_a_damaged_folder_is_shared(tmp_path: Path, rounds: int) -> None:
    """Several caches with their own threads run while bits are flipped and files are cut, swapped
    and deleted: everything that is found is right.
    """
    workers = [ThreadWorkers(2) for _ in range(CACHES)]
    randoms = [random_of(f"{tmp_path.name} {number}") for number in range(CACHES)]
    caches = [
        DiskCache(tmp_path, BYTES_MAX, Runtime(LoopClock(), random, each))
        for random, each in zip(randoms, workers, strict=True)
    ]
    with capture_logs():
        async with asyncio.TaskGroup() as tasks:
            for cache, random in zip(caches, randoms, strict=True):
                tasks.create_task(hammer(cache, tmp_path, random, rounds))
    for each in workers:
        each.close()
    total = Counter[str]()
    for cache in caches:
        total.update(asdict(cache.counters))
    assert total["hits"] > total["misses"] / 10
    assert min(total["written"], total["damaged"]) > 0
    cache = open_cache(tmp_path)
    with capture_logs():
        for number in range(PARTS):
            await finds(cache, shared_part(number))
    await kept(cache, part(PARTS))
    assert taken_bytes(tmp_path) <= BYTES_MAX
