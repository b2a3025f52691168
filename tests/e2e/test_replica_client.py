"""The client with a writer and its readers, all of them processes: what an application sees."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shalekv_client import (
    Client,
    ConditionFailed,
    DeadlinePassed,
    Missing,
    NoWriter,
    OutcomeUnknown,
)
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes

WAIT_MS = 60_000  # of a read that waits for a paused reader
NEVER = ("--poll-interval-ms", "3600000", "--manifest-interval-ms", "3600000")
OTHER_PROCESS = """
import sys
from shalekv_client import SyncClient
address, token, key = sys.argv[1:]
with SyncClient(address, token=token) as client:
    print(client.get(key.encode()).value.decode())
"""


@dataclass(slots=True)
class Database:
    """A writer and two readers of one database."""

    processes: Processes
    url: str
    writer: Child
    readers: list[Child]

    @property
    def addresses(self) -> list[str]:
        return [child.listen for child in (self.writer, *self.readers)]

    async def replace_writer(self) -> Child:
        """Kill the writer, and start another one at another port."""
        await self.writer.kill()
        self.writer = await self.processes.serve(self.url, *ALONE, create=False)
        return self.writer


@asynccontextmanager
async def database(processes: Processes, tmp_path: Path, *flags: str) -> AsyncIterator[Database]:
    url = f"file://{tmp_path}/db"
    writer = await processes.serve(url, *ALONE)
    readers = list(await asyncio.gather(*(processes.read(url, *flags) for _ in range(2))))
    yield Database(processes, url, writer, readers)


@dataclass(slots=True)
class Load:
    """Continuous writes and reads, and their outcomes."""

    client: Client
    acknowledged: list[bytes] = field(default_factory=list)
    reads: int = 0
    is_over: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)  # a write was acknowledged

    async def write(self, task: int) -> None:
        """Write new keys, none of which may have been there."""
        number = 0
        while not self.is_over:
            key = b"%d/%06d" % (task, number)
            number += 1
            try:
                await self.client.put(key, key, condition=Missing(), timeout_ms=120_000)
            except ConditionFailed as error:
                raise AssertionError(f"{key!r} was written twice") from error
            self.acknowledged.append(key)
            self.news.set()

    async def read(self) -> None:
        """Read what was acknowledged last; it must be there."""
        while not self.is_over:
            key = self.acknowledged[-1] if self.acknowledged else b"none"
            found = await self.client.get(key)
            assert (found is not None) or key == b"none"
            self.reads += 1


async def progress(load: Load, count: int) -> None:
    wanted = len(load.acknowledged) + count
    async with asyncio.timeout(200.0):
        while len(load.acknowledged) < wanted:
            load.news.clear()
            await load.news.wait()


async def test_client_carries_on_when_the_writer_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """Kill -9 of the writer, a new one at another port: reads never fail, every acknowledged write
    is there, once, and writes continue soon after its start.
    """
    async with database(processes, tmp_path) as running, Client(running.addresses) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as tasks:
            for task in range(4):
                tasks.create_task(load.write(task))
                tasks.create_task(load.read())
            await progress(load, 30)
            await running.replace_writer()
            await progress(load, 30)
            load.is_over = True
        assert load.reads > 30
        values = await client.batch_get(load.acknowledged)
        assert [each and each.value for each in values] == load.acknowledged
        scanned = {entry.key async for entry in client.scan()}
        assert scanned >= set(load.acknowledged)


async def test_own_writes_are_read_through_readers(processes: Processes, tmp_path: Path) -> None:
    """Gets, batch gets and scans at readers show each write that was made before them, also in
    another process that is given the token. A client that knows only one reader writes, runs
    sessions, and finds a new writer, although the reader polls once an hour. When all are gone,
    calls end at their deadlines.
    """
    async with database(processes, tmp_path, *NEVER) as running:
        async with Client(running.addresses, replica_wait_ms=WAIT_MS) as client:
            for number in range(10):
                key, value = b"k%02d" % number, b"%d" % number
                await client.put(key, value)
                found = await client.get(key)
                assert found is not None
                assert found.value == value
                assert (await client.batch_get([key]))[0] == found
                scan = client.scan()
                assert key in {entry.key async for entry in scan}
                assert scan.view is not None
                assert scan.view.role is not None
                assert scan.view.role.name == "READER"
            argv = ("-c", OTHER_PROCESS, running.readers[1].listen, str(client.token), "k09")
            other = await processes.run(*argv, program=sys.executable)
            assert other.stdout() == "9\n", other.report()
        async with Client(running.readers[0].listen) as client:
            commit = await client.put(b"k", b"1")
            async with client.session() as session:
                queued = session.put(b"k", b"2")
            assert queued.result().seq > commit.seq
            await running.replace_writer()
            await client.put(b"k", b"3")
            found = await client.get(b"k")
            assert found is not None
            assert found.value == b"3"
            await asyncio.gather(*(child.kill() for child in (running.writer, *running.readers)))
            # DeadlinePassed: there was no time to find out that a server has gone.
            with pytest.raises((OutcomeUnknown, NoWriter, DeadlinePassed)):
                await client.put(b"k", b"w", timeout_ms=500)
            with pytest.raises((OutcomeUnknown, DeadlinePassed)):
                await client.get(b"k", timeout_ms=500)


async def test_stalled_reader_is_hedged_and_passed_over(
    processes: Processes, tmp_path: Path
) -> None:
    """With a paused reader, reads are right, and wait for it no longer than `hedge_ms` or
    `replica_wait_ms`, whichever the client has.
    """
    async with (
        database(processes, tmp_path) as running,
        Client(
            running.addresses, hedge_ms=50, replica_wait_ms=WAIT_MS, timeout_ms=WAIT_MS
        ) as hedged,
        Client(running.addresses, replica_wait_ms=300, timeout_ms=WAIT_MS) as patient,
    ):
        for client in (hedged, patient):
            await client.put(b"k", b"v")
            for _ in range(4):
                assert (await client.get(b"k")) is not None
        stalled = running.readers[0]
        stalled.pause()
        for client in (hedged, patient):
            for _ in range(20):  # one that waited for the paused reader would have failed
                assert (await client.get(b"k")) is not None
        stalled.resume()
