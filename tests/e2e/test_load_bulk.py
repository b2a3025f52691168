"""`shalekv load --bulk`: files and one commit, beside a server and without one."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client, Put
from tests.e2e.bucket_commands import BUCKET, URL, of
from tests.e2e.cli import output
from tests.kit.processes.child import Child
from tests.kit.processes.meanwhile import ALONE, Meanwhile, stalled
from tests.kit.processes.processes import Processes
from tests.servers.versitygw import versitygw

UNREACHABLE = 9
PIPE_ROWS = 200_000
ROWS = 20_000
PUTS = 300
LEAST_MEMORY = "4194304"
SMALL_FILES = {"SHALEKV_LEVELS__SST_BYTES": "65536", "SHALEKV_LEVELS__CODEC": "none"}
VALUE = b"v" * 100


def key(number: int) -> bytes:
    """Keys whose order is not that of their numbers."""
    return b"%08x" % (number * 2_654_435_761 % 2**32)


def lines_of(count: int, value: bytes = VALUE) -> bytes:
    """So many rows of TSV, in no order."""
    return b"".join(b"%b\t%b\n" % (key(number), value) for number in range(count))


async def scanned(server: Child) -> dict[bytes, tuple[bytes, int]]:
    """Everything that the server holds, with sequence numbers."""
    async with Client(server.listen) as client:
        return {each.key: (each.value, each.seq) async for each in client.scan()}


async def load(
    processes: Processes,
    database: Meanwhile,
    server: Child | None,
    *options: str,
    rows: bytes,
    expected: int = 0,
) -> Child:
    """Run a bulk load to its end, with a commit by `server`, or without one."""
    how = ["--open"] if server is None else ["--addr", server.listen]
    command = await processes.run(
        *("load", "--bulk", "--url", database.url, *how, *options), stdin=rows, env=SMALL_FILES
    )
    assert await command.exited() == expected, command.report()
    return command


def seq_of(command: Child) -> int:
    """Of the load, as the command says."""
    return int(command.stdout().partition(" is seq ")[2].partition(":")[0].partition(";")[0])


async def until(server: Child, key: bytes, value: bytes) -> None:
    """Wait until a replica has a value."""
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
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE)
    replica = await processes.read(database.url, "--poll-interval-ms", "10")
    rows = lines_of(2_000)
    async with Client(server.listen) as client:
        before = await client.write([Put(key(n), b"before") for n in range(30)])
        await client.put(b"apart", b"before")
        command = processes.start(
            *("-m", "tests.e2e.stalling", "after create levels/ 2", "load", "--bulk"),
            *("--url", database.url, "--addr", server.listen, "--load-id", "monday"),
            program=sys.executable,
            stdin=rows,
            env=SMALL_FILES,
        )
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
    told = changes(server, loaded)
    assert [await anext(told), await anext(told)] == [(loaded, 2_000), (after.seq, 10)]
    await told.aclose()
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


@pytest.mark.parametrize("moment", ["before create levels/ 3", "after create levels/ 3"])
async def test_a_killed_load_is_run_again(
    processes: Processes, tmp_path: Path, moment: str
) -> None:
    """Nothing of the first run is seen, the second one loads all, and the collector takes the files
    of the first when its lease has expired, and none of the second.
    """
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE)
    rows = lines_of(2_000)
    killed = processes.start(
        *("-m", "tests.e2e.stalling", moment, "load", "--bulk", "--url", database.url),
        *("--addr", server.listen, "--load-id", "monday"),
        program=sys.executable,
        stdin=rows,
        env=SMALL_FILES,
    )
    await stalled(killed)
    await killed.kill()
    left = database.objects("levels/")
    assert left
    assert await scanned(server) == {}
    await database.collect()
    assert database.objects("levels/") == left  # they are leased: it might have been late only
    command = await load(processes, database, server, "--load-id", "monday", rows=rows)
    loaded = {key(n): (VALUE, seq_of(command)) for n in range(2_000)}
    assert await scanned(server) == loaded
    await database.collect()
    assert database.objects("levels/") > left
    assert await scanned(server) == loaded
    assert await server.stop() == 0, server.report()
    await database.check()


async def test_without_a_server_it_opens_the_database(processes: Processes, tmp_path: Path) -> None:
    """With --open, on demand only; a server that serves is fenced, one that follows has all."""
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE, "--fence-poll-ms", "20")
    address = server.listen
    assert await server.stop() == 0
    options = ("load", "--bulk", "--url", database.url)
    alone = await processes.run(*options, "--addr", address, stdin=b"a\t1\n")
    assert await alone.exited() == UNREACHABLE
    assert "--open does without" in alone.stderr()
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


async def test_it_writes_into_a_bucket(processes: Processes) -> None:
    """Reached by the flags and variables of every command that reads a store."""
    with versitygw() as s3:
        s3.create_bucket(BUCKET)
        server = await processes.serve(URL, *ALONE, "--fence-poll-ms", "20", env=of(s3))
        flags = ("--bulk", "--url", URL, "--endpoint-url", s3.endpoint, "--region", s3.region)
        env = s3.environment | SMALL_FILES
        for number, how in enumerate((("--addr", server.listen), ("--open",))):
            rows = lines_of(2_000, b"%d" % number)
            command = await processes.run("load", *flags, *how, stdin=rows, env=env)
            assert await command.exited() == 0, command.report()
            if number:
                assert await server.exited() == ExitCode.FENCED
                server = await processes.serve(URL, *ALONE, env=of(s3))
            found = await scanned(server)
            assert found == {key(n): (b"%d" % number, seq_of(command)) for n in range(2_000)}
        assert await server.stop() == 0


async def test_the_server_must_be_that_of_the_database(
    processes: Processes, tmp_path: Path
) -> None:
    """Files in one place and a commit in another would be nothing: it is told before any work."""
    database = Meanwhile(processes, tmp_path / "db")
    other = Meanwhile(processes, tmp_path / "other")
    assert await (await database.serve(*ALONE)).stop() == 0
    server = await other.serve(*ALONE)
    command = await load(processes, database, server, rows=b"a\t1\n", expected=ExitCode.USAGE)
    assert f"and the server at {server.listen} has" in command.stderr()
    assert not database.objects("levels/")
    assert not database.manifest().leases
    assert await server.stop() == 0


async def test_more_than_fits_in_memory_is_loaded(processes: Processes, tmp_path: Path) -> None:
    """As what fits; the last row of a key counts, across runs on the disk, which leave no trace."""
    database = Meanwhile(processes, tmp_path / "db")
    spill = tmp_path / "spill"
    spill.mkdir()
    server = await database.serve(*ALONE)
    rows = lines_of(ROWS) + lines_of(ROWS, b"newer")
    options = ("--sort-memory", LEAST_MEMORY, "--temp-dir", str(spill))
    command = await load(processes, database, server, *options, rows=rows)
    assert f"loaded {2 * ROWS:,} rows" in command.stdout()
    assert f"{ROWS:,} keys in" in command.stdout()
    found = await scanned(server)
    assert found == {key(n): (b"newer", seq_of(command)) for n in range(ROWS)}
    assert not [*spill.iterdir()]
    assert len(database.objects("levels/")) > 1
    assert await server.stop() == 0
    await database.check()


async def test_it_reads_what_load_reads(processes: Processes, tmp_path: Path) -> None:
    """Formats, encodings, expiries and bad rows."""
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE)
    async with Client(server.listen) as client:
        await client.put(b"n0", b"old")
    far_ms = 4_000_000_000_000
    objects = [
        {"key": "n1", "value": "kept", "expire_at_ms": far_ms},
        {"key": "n0", "value": "gone", "expire_at_ms": 1},
        {"key_hex": "ff00", "value": {"a": [1]}},
    ]
    file = tmp_path / "rows.ndjson.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, objects)).encode()))
    await load(processes, database, server, str(file), rows=b"")
    csv = b'id,body\nc1,"a\nb"\n'
    columns = ("--input-format", "csv", "--key-column", "id", "--value-column", "body")
    await load(processes, database, server, *columns, "--ttl", "1h", rows=csv)
    await load(processes, database, server, "--hex", rows=b"6831\t00ff\n")
    bad_rows = tmp_path / "bad.ndjson"
    bad = b"g1\tgood\nno tab\ng2\tgood\n"
    failed = await load(processes, database, server, rows=bad, expected=ExitCode.USAGE)
    assert "line 2: " in failed.stderr()
    assert "Nothing was loaded." in failed.stderr()
    options = ("--bad-rows", str(bad_rows))
    command = await load(processes, database, server, *options, rows=bad)
    assert f"1 bad row in {bad_rows}" in command.stdout()
    assert json.loads(bad_rows.read_bytes())["line"] == 2
    nothing = await load(processes, database, server, rows=b"")
    assert "loaded 0 rows" in nothing.stdout()
    async with Client(server.listen) as client:
        found = {each.key: each async for each in client.scan()}
    assert {key: each.value for key, each in found.items()} == {
        b"n1": b"kept",
        b"\xff\x00": b'{"a":[1]}',
        b"c1": b"a\nb",
        b"h1": b"\x00\xff",
        b"g1": b"good",
        b"g2": b"good",
    }
    assert found[b"n1"].expire_at_ms == far_ms
    expiry_ms = found[b"c1"].expire_at_ms
    assert expiry_ms is not None
    assert abs(expiry_ms - time.time() * 1_000 - 3_600_000) < 60_000
    assert await server.stop() == 0
    assert not database.manifest().leases


async def test_values_over_the_limit_are_bad_rows(processes: Processes, tmp_path: Path) -> None:
    """The limit is the setting of the servers, from the environment or a file."""
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE)
    config = tmp_path / "shalekv.toml"
    config.write_text("[limits]\nvalue_bytes_max = 10\n")
    rows = b"a\t1234567890\nb\t12345678901\nc\t123456789012\n"
    options = ["--config", str(config)]
    failed = await load(processes, database, server, *options, rows=rows, expected=ExitCode.USAGE)
    assert "line 2: the value has 11 bytes, and limits.value_bytes_max is 10" in failed.stderr()
    bad_rows = tmp_path / "bad.ndjson"
    options += ["--bad-rows", str(bad_rows)]
    await load(processes, database, server, *options, rows=rows)
    assert [*await scanned(server)] == [b"a"]
    assert [json.loads(line)["line"] for line in bad_rows.read_bytes().splitlines()] == [2, 3]
    assert await server.stop() == 0


async def test_ctrl_c_ends_it(processes: Processes, tmp_path: Path) -> None:
    """While it waits for input, which never ends: nothing is loaded, and no lease is left."""
    database = Meanwhile(processes, tmp_path / "db")
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


async def test_rows_by_bulk_and_by_single_puts(processes: Processes, tmp_path: Path) -> None:
    """How much faster the one is than the other, to be read in the output of the test."""
    database = Meanwhile(processes, tmp_path / "db")
    server = await database.serve(*ALONE)
    file = tmp_path / "rows.tsv"
    file.write_bytes(lines_of(5 * ROWS))
    began_s = time.perf_counter()
    command = await load(processes, database, server, str(file), rows=b"")
    bulk_us = (time.perf_counter() - began_s) / (5 * ROWS) * 1e6
    began_s = time.perf_counter()
    async with Client(server.listen) as client:
        for number in range(PUTS):
            await client.put(key(number), VALUE)
    put_us = (time.perf_counter() - began_s) / PUTS * 1e6
    sys.stdout.write(
        f"{bulk_us:.1f} us for a row of a bulk load, the start of the command included, "
        f"{put_us:.0f} us for a single put: {put_us / bulk_us:.0f} times\n{command.stdout()}"
    )
    printed = await output(processes, server, "scan", "--limit", "1")
    assert printed
    assert await server.stop() == 0
