"""Latency in round trips of a store that needs 25 ms for each: in virtual time.

The shipped writer runs on a simulated event loop, where waiting is exact and computing takes no
time; what is measured is what the protocol makes a client wait for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, TypeVar

import pytest

from shalekv.errors import Fenced
from shalekv.format import names
from shalekv.server.database import create_database
from shalekv.server.writer import Writer
from tests.kit.processes.in_process import put_at, serve_settings
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.simulation import Simulation

T = TypeVar("T")

ROUND_TRIP_MS = 25.0
SEEDS = range(2)
LONE_PUTS = 20
CLIENTS, PUTS_EACH = 64, 50
POLL_MS = 5_000.0


@asynccontextmanager
async def writing(sim: Simulation, name: str, **settings: int) -> AsyncIterator[Writer]:
    """Open a writer of the simulated database; close it in order at the end."""
    writer = await opened(sim, name, **settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        yield writer
        writer.close()


async def opened(sim: Simulation, name: str, **settings: int) -> Writer:
    """A writer that has opened the database and does not run yet."""
    runtime = sim.runtime_for(name)
    return await Writer.open(
        sim.store_for(name), settings=serve_settings(writer=settings), runtime=runtime
    )


async def create(sim: Simulation) -> None:
    await create_database(
        sim.store_for("creator"), sim.runtime_for("creator"), serve_settings().store
    )


async def put_ms(sim: Simulation, writer: Writer, key: bytes) -> float:
    began_ms = sim.now_ms
    await put_at(writer, key, b"value")
    return round(sim.now_ms - began_ms, 3)


def wal_objects(sim: Simulation) -> int:
    return len(sim.store.names(names.WAL_FOLDER))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("in_flight", [1, 4])
def test_lone_put(seed: int, in_flight: int) -> None:
    """A put that finds the log idle takes one round trip, and one create."""

    async def main(sim: Simulation) -> list[float]:
        await create(sim)
        async with writing(
            sim, "writer", max_parallel_writes=in_flight, flush_interval_ms=50
        ) as writer:
            before = wal_objects(sim)
            took_ms = []
            for number in range(LONE_PUTS):
                took_ms.append(await put_ms(sim, writer, b"%d" % number))
                await sim.sleep_ms(200)
            assert wal_objects(sim) - before == LONE_PUTS
            return took_ms

    round_trips = [took_ms / ROUND_TRIP_MS for took_ms in run(seed, main)]
    assert min(round_trips) >= 1.0
    assert max(round_trips) <= 1.2


@pytest.mark.parametrize("seed", SEEDS)
def test_many_clients(seed: int) -> None:
    """With 64 clients, 4 objects in flight and 10 ms between them, the median put takes at most 1.6
    round trips; a group commit costs one create, and never are more than 4 under way.
    """

    async def main(sim: Simulation) -> list[float]:
        await create(sim)
        took_ms: list[float] = []
        async with writing(sim, "writer", max_parallel_writes=4, flush_interval_ms=10) as writer:
            before = wal_objects(sim)

            async def client(name: int) -> None:
                for number in range(PUTS_EACH):
                    took_ms.append(await put_ms(sim, writer, b"%d/%d" % (name, number)))
                    assert writer.engine.log.groups_in_flight <= 4

            async with asyncio.TaskGroup() as clients:
                for name in range(CLIENTS):
                    clients.create_task(client(name))
            groups = writer.engine.log.stats.objects
            assert wal_objects(sim) - before == groups
            assert groups < CLIENTS * PUTS_EACH / 8
        return took_ms

    took_ms = run(seed, main)
    assert len(took_ms) == CLIENTS * PUTS_EACH
    middle, longest = median(took_ms) / ROUND_TRIP_MS, max(took_ms) / ROUND_TRIP_MS
    sys.stdout.write(f"seed {seed}: median {middle:.2f}, longest {longest:.2f} round trips\n")
    assert 1.0 <= middle <= 1.6


@pytest.mark.parametrize("seed", range(3))
def test_idle_writer_notices_within_one_poll(seed: int) -> None:
    """From the moment another writer has won its epoch, one without writes continues for one poll
    interval, and for the two requests of the poll.
    """

    async def main(sim: Simulation) -> float:
        await create(sim)
        idle = await opened(sim, "idle", fence_poll_ms=int(POLL_MS))
        running = asyncio.create_task(idle.run())
        await sim.sleep_ms(sim.rng.uniform(0, 3 * POLL_MS))
        taken_over = asyncio.create_task(opened(sim, "rival"))
        with pytest.raises(Fenced):
            await running
        noticed_ms = sim.now_ms
        await taken_over
        won_us = next(a.at_us for a in sim.store.log if a.name == names.manifest_name(3))
        return noticed_ms - won_us / 1000

    assert run(seed, main) <= POLL_MS * 1.001 + 2.5 * ROUND_TRIP_MS


def run(seed: int, main: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
    return simulate(seed, main, faults=Faults.none(round_trip_ms=ROUND_TRIP_MS)).value
