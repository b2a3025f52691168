"""Processes that share nothing but a folder still agree on one winner per name."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

RACERS = 4
ROUNDS = 200
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def racers(tmp_path: Path) -> AsyncIterator[list[Process]]:
    """Processes that wait for names to race for."""
    arguments = [sys.executable, "-m", "tests.contract.racer", str(tmp_path / "database")]
    started = [
        await asyncio.create_subprocess_exec(
            *arguments, f"racer-{number}", cwd=ROOT, stdin=PIPE, stdout=PIPE
        )
        for number in range(RACERS)
    ]
    yield started
    for racer in started:
        await racer.communicate(b"")  # which ends its input
    assert [racer.returncode for racer in started] == [0] * RACERS


async def ask(racer: Process, name: str) -> tuple[str, str]:
    """Have one process race for `name`: whether it won, and whose it says the object is."""
    assert racer.stdin is not None
    assert racer.stdout is not None
    racer.stdin.write(f"{name}\n".encode())
    await racer.stdin.drain()
    answer, _, holder = (await racer.stdout.readline()).decode().strip().partition(" ")
    return answer, holder


async def test_processes_agree_on_one_winner(racers: list[Process]) -> None:
    """Four processes create the same name at once: one wins, and all read what it wrote."""
    winners = set()
    for number in range(ROUNDS):
        name = f"wal/{number:020d}.sst"
        answers = await asyncio.gather(*(ask(racer, name) for racer in racers))
        assert [answer for answer, _ in answers].count("won") == 1, answers
        assert len({holder for _, holder in answers}) == 1, answers
        winners.add(answers[0][1].split()[0])
    assert len(winners) > 1, "the processes never raced: one of them won every round"
