"""Processes share a folder while others damage it, and are killed: nothing wrong is served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from shalekv.store.disk_cache_folder import FOLDER
from tests.kit.disks.cache_folders import files, finds, kept, open_cache, part, taken_bytes
from tests.unit.store.disk_cache.hammering import PARTS, shared_part

BYTES_MAX = 1 << 20
CHILDREN = 3
SLACK_BYTES = CHILDREN * BYTES_MAX // 16
DAMAGES = 1  # for each line that a child prints
KILLS = 0.1  # ... and the share of these upon which one is killed
FLIPS, CUTS, UNLINKS, SWAPS = 0.4, 0.6, 0.8, 0.98  # the rest deletes a folder

Child = subprocess.Popen[bytes]


def start(path: Path, seed: int, rounds: int, fifo: Path) -> Child:
    """A process that hammers the folder. It tells of it in a pipe, which ends with the last one."""
    module = "tests.unit.store.disk_cache.hammering"
    arguments = [str(path), str(BYTES_MAX), str(seed), str(rounds)]
    command = [sys.executable, "-m", module, *arguments]
    with fifo.open("wb") as told:
        return subprocess.Popen(command, stdout=told)


def damage(path: Path, random: Random) -> None:
    """Do to the folder what must not be noticed but as misses."""
    found = files(path)
    if not found:
        return
    victim, other, dice = random.choice(found), random.choice(found), random.random()
    try:
        if dice < FLIPS:
            with victim.open("r+b") as file:
                data = bytearray(file.read())
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
                file.seek(0)
                file.write(data)
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
        pass  # a process was faster


def campaign(path: Path, *, seed: int, rounds: int, kills: int) -> list[dict[str, int]]:
    """Children hammer, are damaged, and are killed so many times: what the survivors count."""
    fifo = path.with_name(f"{path.name}-told")
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # which waits for no writer
    children = [start(path, seed + number, rounds, fifo) for number in range(CHILDREN)]
    os.set_blocking(reading, True)
    try:
        with open(reading, encoding="ascii") as lines:  # noqa: PTH123 - a descriptor, not a path
            counters = _damage_and_kill(path, Random(seed), lines, children, fifo, rounds, kills)
        assert [child.wait() for child in children] == [0] * CHILDREN  # they found nothing wrong
    finally:
        for child in children:
            child.kill()
            child.wait()
    return counters


def _damage_and_kill(
    path: Path,
    random: Random,
    lines: Iterable[str],
    children: list[Child],
    fifo: Path,
    rounds: int,
    kills: int,
) -> list[dict[str, int]]:
    counters: list[dict[str, int]] = []
    for line in lines:
        if line.startswith("{"):
            counters.append(json.loads(line))
            continue
        for _ in range(DAMAGES):
            damage(path, random)
        assert taken_bytes(path) <= BYTES_MAX + SLACK_BYTES
        if kills and random.random() < KILLS:
            kills -= 1
            children.append(start(path, random.getrandbits(32), rounds, fifo))
            victim = children.pop(0)
            victim.kill()
            victim.wait()
    assert not kills
    return counters


async def finish(path: Path, counters: list[dict[str, int]]) -> None:
    """Much was found, damage was seen, and what is left is right."""
    total = Counter[str]()
    for each in counters:
        total.update(each)
    assert len(counters) >= CHILDREN
    assert total["hits"] > total["misses"] / 10
    assert min(total["written"], total["damaged"]) > 0
    cache = open_cache(path, bytes_max=BYTES_MAX)
    with capture_logs():
        for number in range(PARTS):
            await finds(cache, shared_part(number))
    await kept(cache, part(PARTS))
    assert taken_bytes(path) <= BYTES_MAX


async def test_processes_share_a_damaged_folder(tmp_path: Path) -> None:
    """Three processes and one that flips, cuts, swaps and deletes; four of them are killed."""
    await finish(tmp_path, campaign(tmp_path, seed=1, rounds=2_000, kills=4))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_processes_share_a_damaged_folder_for_long(tmp_path: Path, seed: int) -> None:
    """The same with more kills."""
    await finish(tmp_path, campaign(tmp_path, seed=seed, rounds=40_000, kills=40))


async def test_what_one_process_keeps_another_finds(tmp_path: Path) -> None:
    """Two caches of one folder find each other's parts at once, and count what both hold."""
    one, two = open_cache(tmp_path, seed=1), open_cache(tmp_path, seed=2)
    await kept(one, part(1))
    assert await finds(two, part(1))
    await kept(two, part(2))
    assert await finds(one, part(2))
    assert two.counters.held_bytes == 2 * 8_192


async def test_the_bound_is_that_of_all_together(tmp_path: Path) -> None:
    """Caches that write by turns stay within one bound."""
    caches = [open_cache(tmp_path, seed=seed) for seed in range(4)]
    for number in range(400):
        await kept(caches[number % 4], part(number))
        if number % 4 == 0:
            assert taken_bytes(tmp_path) <= BYTES_MAX
    assert min(cache.counters.written for cache in caches) == 100
