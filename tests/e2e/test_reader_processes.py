"""`shalekv reader --processes`: one server to its clients, whatever happens to its processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.clock import LoopClock
from shalekv_client import (
    Client,
    CostDimension,
    NotApplied,
    ProcessState,
    Profile,
    RequestKind,
    Status,
)
from tests.kit.constants import variables
from tests.kit.processes.child import Child, event
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.scraping import fetched, scraped
from tests.servers.process import free_port

CLIENTS = 4
WAIT_S = 60.0
POLL_MS = 100  # a status asks all processes, which have to start meanwhile
PAUSE_MS = 20  # between two reads of a client: as well
PRICES = "writes=1,lists=1,reads=1,deletes=1"
PARENT = "shalekv.cli.process.reader_parent"
# Seconds are tenths of them: a process that is stopped is missed soon. It is killed late enough for
# a busy machine to ask for it before, and not for being slow.
HASTY = variables({f"{PARENT}:PING_MS": 100, f"{PARENT}:HUNG_PINGS": 50})


@dataclass(slots=True)
class Load:
    """Clients with a connection each, over both wires, which read all the time without an error."""

    clients: list[Client]
    reads: list[int] = field(default_factory=lambda: [0] * CLIENTS)

    async def read(self, number: int) -> None:
        while True:
            found = await self.clients[number].get(b"k")
            assert found is not None
            assert found.value == b"v"
            self.reads[number] += 1
            await LoopClock().sleep_ms(PAUSE_MS)

    async def goes_on(self) -> None:
        """Wait until every client has read again."""
        before = list(self.reads)
        await until(lambda: all(now > old for now, old in zip(self.reads, before, strict=True)))

    async def statuses(self) -> list[Status]:
        """The status, over each of the connections, when no process is held up."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = list(await asyncio.gather(*(client.status() for client in self.clients)))
                if all(map(are_serving, found)):
                    return found
                await LoopClock().sleep_ms(POLL_MS)


def are_serving(status: Status) -> bool:
    return {each.state for each in status.processes} == {ProcessState.SERVING}


async def states(client: Client, *wanted: ProcessState) -> Status:
    """Wait for these states of the processes."""
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await client.status()
            if [each.state for each in status.processes] == list(wanted):
                return status
            await LoopClock().sleep_ms(POLL_MS)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await LoopClock().sleep_ms(POLL_MS)


@asynccontextmanager
async def reading(address: str) -> AsyncIterator[Load]:
    """Clients that read, while entered."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        wires = ["native", "grpcio"] * (CLIENTS // 2)
        clients = [await stack.enter_async_context(Client(address, wire=wire)) for wire in wires]
        load = Load(clients)
        running = [tasks.create_task(load.read(number)) for number in range(CLIENTS)]
        await load.goes_on()
        yield load
        for task in running:
            task.cancel()


def runs(pid: int) -> bool:
    """Return whether a process has not ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def test_processes_are_one_server(processes: Processes, tmp_path: Path) -> None:
    """Connections are spread evenly, and reads go on while processes are killed, stop, and end.

    Whichever process is asked, status, health, metrics, costs, slow calls and profiles are those of
    all; no counter goes down.
    """
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE)
    async with Client(writer.listen) as client:
        await client.put(b"k", b"v")
    flags = ("--processes", "2", "--listen", f"127.0.0.1:{free_port()}")
    telemetry = ("--metrics", "127.0.0.1:0", "--slow-ms", "1", "--usd-per-1000", PRICES)
    reader = await processes.read(database.url, *flags, *telemetry, env=HASTY)
    taken = database.run("reader", *flags[:2], "--listen", reader.listen, code=7)
    async with reading(reader.listen) as load:
        first, second = (await check_statuses(load, reader)).processes
        await taken
        counted = await counters(reader, load.clients)
        assert counted['child_starts_total{child="reader-2"}'] == 1
        await check_lists(load)

        os.kill(first.pid, signal.SIGKILL)
        await load.goes_on()
        await reader.line(lambda line: line.get("exit_code") == -signal.SIGKILL)
        status = await states(load.clients[0], ProcessState.SERVING, ProcessState.SERVING)
        assert [each.replacements for each in status.processes] == [1, 0]
        assert status.processes[1].pid == second.pid
        now = await counters(reader, load.clients)
        assert {name: now[name] for name in counted if now[name] < counted[name]} == {}
        assert now['child_crashes_total{child="reader-1"}'] == 1

        await reader.line(lambda _: says_ready(reader))
        os.kill(second.pid, signal.SIGSTOP)
        async with Client(reader.listen) as other:  # is not given to the process that is stopped
            await states(other, ProcessState.SERVING, ProcessState.SILENT)
            await reader.line(lambda _: not says_ready(reader))
            assert await health(database, reader) == 1
            assert (await fetched(reader, "/readyz")).status == 503
            assert (await fetched(reader, "/livez")).status == 200
            now = await counters(reader, [other])  # what it has told last
            assert {name: now[name] for name in counted if now[name] < counted[name]} == {}
            assert await missing(other) == {(2,)}
            await reader.line(lambda line: "restart_ms" in line and line["process"] == 2)
            await reader.line(lambda _: says_ready(reader))
            assert await health(database, reader) == 0
        await load.goes_on()

    await reader.kill()
    await until(lambda: not any(runs(each.pid) for each in status.processes))
    before = snapshots(database)  # those of processes that were killed among them
    again = await database.read(*flags)
    assert len(snapshots(database)) == len(before) + 2
    again.send(signal.SIGINT)
    assert await again.exited() == ExitCode.OK, again.report()
    assert snapshots(database) == before
    assert "unexpected error" not in reader.stderr() + again.stderr()
    ended = [line for line in again.lines() if event("stopped")(line)]
    assert sorted(line.get("process", 0) for line in ended) == [0, 1, 2]


async def counters(reader: Child, clients: Sequence[Client]) -> dict[str, float]:
    """All counters at this moment, by name and labels, and those of costs."""
    found = {
        name: value
        for name, value in (await scraped(reader)).items()
        if name.partition("{")[0].endswith(("_total", "_bucket", "_count"))
    }
    return found | await costs(clients)


def says_ready(reader: Child) -> bool:
    """Return what the first process has logged last: one that is held up is missed soon, too."""
    lines = [line for line in reader.lines() if line.get("process") == 1]
    return sum(map(event("not ready"), lines)) == sum(map(event("ready again"), lines))


def snapshots(database: Cluster) -> set[bytes]:
    return {each.id for each in database.manifest().snapshots}


async def check_statuses(load: Load, reader: Child) -> Status:
    """Each process answers two clients, and each tells of both; returns the last status."""
    before = [sum(each.calls for each in status.calls) for status in await load.statuses()]
    statuses = await load.statuses()
    assert min(sum(each.calls for each in status.calls) for status in statuses) > max(before)
    assert len({tuple(each.pid for each in status.processes) for status in statuses}) == 1
    for status in statuses:
        assert [each.state for each in status.processes] == [ProcessState.SERVING] * 2
        assert {each.seq for each in status.processes} == {status.view.seq}
        calls = sum(each.calls for each in status.calls)
        assert sum(each.calls for each in status.processes) == calls
        assert min(each.calls for each in status.processes) > 0
        assert status.memory.bytes_max > 0
    stats = await load.clients[0].stats()
    assert [each.role for each in stats.processes] == ["reader", "reader"]
    opened = [line for line in reader.lines() if event("database joined")(line)]
    assert sorted(line["process"] for line in opened) == [1, 2]
    return statuses[-1]


async def costs(clients: Sequence[Client]) -> dict[str, float]:
    """Let each client send requests to the store; return the dollars by origin.

    Whichever process is asked, none is less than another process has told before, and those of each
    dimension are the dollars of all requests that the processes have sent.
    """
    for client in clients:
        snapshot = await client.create_snapshot(ttl_s=60)
        await client.delete_snapshot(snapshot.id)
    told: dict[str, float] = {}
    for client in clients:
        stats = await client.stats()
        sent = Counter[RequestKind]()
        for process in stats.processes:
            sent.update(process.requests)
        for dimension in CostDimension:
            found = [each for each in stats.origins if each.dimension is dimension]
            requests = Counter[RequestKind]()
            for each in found:
                requests.update(each.requests)
            assert +requests == +sent
            dollars = sum(Decimal(repr(each.dollars)) for each in found)
            assert dollars == Decimal(sent.total()) / 1_000
        now = {f"{each.dimension} {each.name}": each.dollars or 0.0 for each in stats.origins}
        assert {name: now[name] for name in told if now[name] < told[name]} == {}
        told = now
    return told


async def check_lists(load: Load) -> None:
    """Slow calls, and a profile, are of both processes, also after a client has gone."""
    async with asyncio.timeout(WAIT_S):  # a call that asks others takes a millisecond, most often
        while {each.process for each in (await load.clients[0].slow_calls()).calls} != {1, 2}:
            await load.statuses()
    profile = await load.clients[0].profile(100)
    assert "process 1" in profile.text
    assert "process 2" in profile.text
    leaving = asyncio.create_task(load.clients[0].profile(60_000))
    await load.goes_on()
    with pytest.raises(NotApplied, match="another profile"):
        await load.clients[1].profile(100)
    leaving.cancel()
    async with asyncio.timeout(WAIT_S / 2):
        while (await profile_of_all(load.clients[1])).missing_processes:
            pass


async def profile_of_all(client: Client) -> Profile:
    """A profile, when no other is taken."""
    while True:
        with suppress(NotApplied):
            return await client.profile(100)


async def missing(client: Client) -> set[tuple[int, ...]]:
    """The processes that are missing in slow calls, and in a profile."""
    slow_calls, profile = await client.slow_calls(), await client.profile(100)
    return {slow_calls.missing_processes, profile.missing_processes}


async def health(database: Cluster, reader: Child) -> int:
    """The exit code of `shalekv health`."""
    found = await database.processes.run("health", "--addr", reader.listen)
    return await found.exited()
