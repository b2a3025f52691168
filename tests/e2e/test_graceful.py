"""A server that is asked to stop finishes what it has accepted, and says so."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client
from tests.kit.processes.child import Child
from tests.kit.processes.history import Fate, History
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.meanwhile import ALONE
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import check_wal, numbers_in, read_wal, state_of

DEADLINE_S = 200
STREAM_BYTES = 32 << 20  # more than a connection holds that nobody reads from
VALUE_BYTES = 2 << 20


@pytest.mark.parametrize("in_flight", ["1", "4"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stop_under_load(
    processes: Processes, tmp_path: Path, in_flight: str, number: signal.Signals
) -> None:
    """A server that is asked to stop under load answers or refuses each call, ends with exit code
    0, and everything that it acknowledged is there, and nothing that it refused.
    """
    folder = tmp_path / "db"
    url = f"file://{folder}"
    history = History(seed=1)
    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(url, "--max-parallel-writes", in_flight, *ALONE)
        load = Load(history, server.listen, Random(1))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run())
            assert await load.acknowledged(300), server.report()
            sent = len(history.attempts)
            server.send(number)
            await running
        assert await server.exited() == ExitCode.OK, server.report()
        untold = [each for each in history.attempts[:sent] if each.fate is Fate.UNKNOWN]
        assert untold == [], [str(each) for each in untold]
        assert load.reasons()["STOPPING"], load.ended_by
        assert events(server)[-2:] == ["asked to stop", "stopped"], server.report()
        wal = read_wal(folder)
        check_wal(wal, history)
        assert {each.number for each in history.of_fate(Fate.IN_MEMORY)} <= numbers_in(wal)
        again = await processes.serve(url, *ALONE)
        state = await read_state(again.listen)
        assert state == state_of(wal)
        history.check_state(state)
        assert await again.stop() == ExitCode.OK


def events(server: Child) -> list[str]:
    """The names of its log lines."""
    return [str(line.get("event")) for line in server.lines()]


@asynccontextmanager
async def endless_scan(client: Client) -> AsyncIterator[None]:
    """A scan under way whose reader does not go on reading."""
    for number in range(STREAM_BYTES // VALUE_BYTES):
        await client.put(b"large/%02d" % number, bytes(VALUE_BYTES))
    async with client.scan() as scan:
        await anext(scan)
        yield


async def test_second_signal_ends_at_once(processes: Processes, tmp_path: Path) -> None:
    """While a call keeps a server from ending, a second signal ends it on the spot."""
    async with asyncio.timeout(DEADLINE_S):
        flags = ("--shutdown-grace-ms", "600000", *ALONE)
        server = await processes.serve(f"file://{tmp_path}/db", *flags)
        async with Client(server.listen) as client, endless_scan(client):
            server.send(signal.SIGTERM)
            await server.line(lambda line: line.get("event") == "asked to stop")
            server.send(signal.SIGTERM)
            assert await server.exited() == ExitCode.TERMINATED, server.report()
        assert events(server)[-1] == "stopped at once by a second signal"


async def test_grace_ends(processes: Processes, tmp_path: Path) -> None:
    """A call that does not end by itself is cut off when the grace is over; the exit code is 0."""
    async with asyncio.timeout(DEADLINE_S):
        flags = ("--shutdown-grace-ms", "200", *ALONE)
        server = await processes.serve(f"file://{tmp_path}/db", *flags)
        async with Client(server.listen) as client, endless_scan(client):
            assert await server.stop() == ExitCode.OK, server.report()
        assert "calls are cut off" in events(server)
