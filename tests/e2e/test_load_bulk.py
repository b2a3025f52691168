"""`shalekv load --bulk`: files and one commit, beside a server and without one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client, Put
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stalling import stalled, start_stalling

UNREACHABLE = 9
PIPE_ROWS = 200_000
SMALL_FILES = {"SHALEKV_LEVELS__SST_BYTES": "65536", "SHALEKV_LEVELS__CODEC": "none"}
VALUE = b"v" * 100


def key(number: int) -> bytes:
    """Keys whose order is not that of their numbers."""
    return b"%08x" % (number * 2_654_435_761 % 2**32)


def lines_of(count: int, value: bytes = VALUE) -> bytes:
    return b"".join(b"%b\t%b\n" % (key(number), value) for number in range(count))


async def scanned(server: Child) -> dict[bytes, tuple[bytes, int]]:
    async with Client(server.listen) as client:
        return {each.key: (each.value, each.seq) async for each in client.scan()}


async def load(
    processes: Processes,
    database: Cluster,
    server: Child | None,
    *options: str,
    rows: bytes,
    expected: int = 0,
) -> Child:
    """Run a bulk load to its end, with a commit by `server`, or without one."""
    how = ["--open"] if server is None else ["--addr", server.listen]
    return await processes.run(
        *("load", "--bulk", "--url", database.url, *how, *options),
        stdin=rows,
        env=SMALL_FILES,
        code=expected,
    )


def seq_of(command: Child) -> int:
    return int(command.stdout().partition(" is seq ")[2].partition(":")[0].partition(";")[0])


async def until(server: Child, key: bytes, value: bytes) -> None:
    async with Client(server.listen, timeout_ms=120_000) as client:
        while (found := await client.get(key)) is None or found.value != value:
            pass


async def changes(server: Child, from_seq: int) -> AsyncGenerator[tuple[int, int]]:
    """The sequence number and the number of changes of each commit."""
    async with Client(server.listen) as client, client.watch(from_seq=from_seq) as watch:
        async for event in watch:
            if hasattr(event, "changes"):
                yield event.seq, len(event.changes)


async def test_order_beside_a_writer_is_that_of_sequence_numbers(
    processes: Processes, tmp_path: Path
) -> None:
    """Keys that a live writer updates before, during and after the load: the load hides what is
    older and not what is newer, also after kill -9 and a restart, after compaction, and at a
    replica, which sees the load in one step.
    """
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE)
    replica = await database.read("--poll-interval-ms", "10")
    rows = lines_of(2_000)
    async with Client(server.listen) as client:
        before = await client.write([Put(key(n), b"before") for n in range(30)])
        await client.put(b"apart", b"before")
        argv = ("--bulk", "--url", database.url, "--addr", server.listen, "--load-id", "monday")
        pin = "after create levels/ 2"
        command = start_stalling(processes, pin, "load", *argv, env=SMALL_FILES, stdin=rows)
        await stalled(command)
        during = await client.write([Put(key(n), b"during") for n in range(10, 30)])
        command.resume()
        assert await command.exited() == 0, command.report()
        loaded = seq_of(command)
        after = await client.write([Put(key(n), b"after") for n in range(20, 30)])
        assert before.seq < during.seq < loaded < after.seq
    expected = {key(n): (VALUE, loaded) for n in range(2_000)}
    expected |= {key(n): (b"after", after.seq) for n in range(20, 30)}
    expected[b"apart"] = (b"before", before.seq + 1)
    assert await scanned(server) == expected
    await until(replica, key(20), b"after")
    assert await scanned(replica) == expected
    reported = changes(server, loaded)
    assert [await anext(reported), await anext(reported)] == [(loaded, 2_000), (after.seq, 10)]
    await reported.aclose()
    await server.kill()

    server = await database.serve(*ALONE)
    assert await scanned(server) == expected
    again = await load(processes, database, server, "--load-id", "monday", rows=rows)
    assert "loaded before: load monday is seq" in again.stdout()
    for l0_trigger in ("100", "1"):
        await database.compact("--l0-trigger-count", l0_trigger)
        assert await scanned(server) == expected
        again = await load(processes, database, server, "--load-id", "monday", rows=rows)
        assert seq_of(again) == loaded
    assert not database.manifest().leases
    assert await replica.stop() == 0, replica.report()
    assert await server.stop() == 0, server.report()
    await database.check()


async def test_without_a_server_it_opens_the_database(processes: Processes, tmp_path: Path) -> None:
    """With --open, on demand only; a server that serves is fenced, one that follows has all."""
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE, "--fence-poll-ms", "20")
    address = server.listen
    assert await server.stop() == 0
    options = ("load", "--bulk", "--url", database.url)
    alone = await processes.run(*options, "--addr", address, stdin=b"a\t1\n", code=UNREACHABLE)
    assert "--open to load without a server" in alone.stderr()
    assert "Nothing was loaded." in alone.stderr()
    assert not database.objects("levels/")

    command = await load(processes, database, None, rows=b"b\t2\na\t1\n")
    assert "loaded 2 rows" in command.stdout()
    server = await database.serve(*ALONE, "--fence-poll-ms", "20")
    assert (await scanned(server)).keys() == {b"a", b"b"}
    await load(processes, database, None, "--load-id", "x", rows=b"b\t3\n")
    assert await server.exited() == ExitCode.FENCED
    again = await load(processes, database, None, "--load-id", "x", rows=b"b\t4\n")
    assert "loaded before" in again.stdout()
    server = await database.serve(*ALONE)
    found = await scanned(server)
    assert {key: value for key, (value, _) in found.items()} == {b"a": b"1", b"b": b"3"}
    assert await server.stop() == 0
    await database.check()


async def test_ctrl_c_ends_it(processes: Processes, tmp_path: Path) -> None:
    """While it waits for input, which never ends: nothing is loaded, and no lease is left."""
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = processes.start(
        *("load", "--bulk", "--url", database.url, "--addr", server.listen, str(pipe))
    )
    with await asyncio.to_thread(pipe.open, "wb") as feeding:
        # More than fits in the pipe: the command reads when it has its lease.
        await asyncio.to_thread(feeding.write, b"a\t1\n" * PIPE_ROWS)
        assert database.manifest().leases
        command.send(signal.SIGINT)
        assert await command.exited() == ExitCode.INTERRUPTED, command.report()
    assert "Interrupted.\nNothing was loaded." in command.stderr()
    assert not database.manifest().leases
    assert await scanned(server) == {}
    assert await server.stop() == 0
