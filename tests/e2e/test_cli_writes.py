"""Conditions, counters, ranges, expiry, transactions and the bench, against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from shalekv_client import Client
from tests.e2e.cli import output, run, sequence_number
from tests.kit.processes.processes import Processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "reserve_seat.txn"


async def test_one_of_many_gets_the_lock(processes: Processes, tmp_path: Path) -> None:
    """Of processes that put --if-absent at once exactly one succeeds, and a crash keeps it so."""
    url = f"file://{tmp_path}/db"
    server = await processes.serve(url)
    commands = await asyncio.gather(
        *(run(processes, server, "put", "lock", str(n), "--if-absent") for n in range(4))
    )
    codes = [await command.exited() for command in commands]
    assert sorted(codes) == [0, 13, 13, 13]
    (seq,) = {
        sequence_number(command.stdout())
        for command, code in zip(commands, codes, strict=True)
        if not code
    }
    refused = next(c for c, code in zip(commands, codes, strict=True) if code)
    assert f"condition failed: the key has seq {seq}" in refused.stderr()
    await server.kill()
    server = await processes.serve(url, create=False)
    assert await output(processes, server, "get", "lock") == f"{codes.index(0)}\n"
    again = await run(processes, server, "delete", "lock", "--if-seq", str(seq + 1))
    assert await again.exited() == 13
    await output(processes, server, "delete", "lock", "--if-seq", str(seq))


async def test_counters_of_many_processes_add_up(processes: Processes, tmp_path: Path) -> None:
    """Whoever adds, and in whatever order, the sum is right."""
    server = await processes.serve(f"file://{tmp_path}/db")
    deltas = [1, 20, -3, 400]
    await asyncio.gather(*(output(processes, server, "add", "n", str(d)) for d in deltas))
    assert await output(processes, server, "get", "n", "--as-int64") == f"{sum(deltas)}\n"
    await output(processes, server, "put", "text", "abc")
    refused = await run(processes, server, "add", "text")
    assert await refused.exited() == 2
    assert "text" in refused.stderr()


async def test_ranges_go_in_one_commit(processes: Processes, tmp_path: Path) -> None:
    """A prefix, an interval, and all keys when it is meant."""
    server = await processes.serve(f"file://{tmp_path}/db")
    rows = b"".join(b"%c%d\tv\n" % (letter, n) for letter in b"abc" for n in range(100))
    await output(processes, server, "load", stdin=rows)
    await output(processes, server, "delete", "--prefix", "a")
    await output(processes, server, "delete", "--start", "b5", "--end", "c")
    keys = (await output(processes, server, "scan", "--keys-only")).split()
    assert (keys[0], keys[-1], len(keys)) == ("b0", "c99", 145)
    timid = await run(processes, server, "delete", "--all")
    assert await timid.exited() == 2
    await output(processes, server, "delete", "--all", "--yes")
    assert await output(processes, server, "scan") == ""


async def test_values_expire(processes: Processes, tmp_path: Path) -> None:
    """A value with a time to live goes away by itself, and a load's rows do as well."""
    server = await processes.serve(f"file://{tmp_path}/db")
    await output(processes, server, "put", "long", "v", "--ttl", "1h")
    await output(processes, server, "put", "short", "v", "--ttl", "200ms")
    await output(processes, server, "load", "--ttl", "200ms", stdin=b"loaded\tv\n")
    async with Client(server.listen) as client:
        while await client.get(b"short") or await client.get(b"loaded"):
            pass
    kept = json.loads(await output(processes, server, "scan", "--format", "json"))
    assert kept["key"] == "long"
    assert kept["expire_at_ms"] > 0


async def test_transactions_take_one_branch(processes: Processes, tmp_path: Path) -> None:
    """The first reservation gets the seat; the second is told whose it is, and changes nothing."""
    server = await processes.serve(f"file://{tmp_path}/db")
    first = await run(processes, server, "txn", str(EXAMPLE))
    assert await first.exited() == 0, first.report()
    assert first.stdout().startswith("then\t")
    second = await run(processes, server, "txn", str(EXAMPLE), "--format", "json")
    assert await second.exited() == 13, second.report()
    found = json.loads(second.stdout())
    assert (found["branch"], found["results"][0]["value"]) == ("else", "Ada Lovelace")
    assert await output(processes, server, "get", "flight/LX38/reserved", "--as-int64") == "1\n"
    script = b"seq flight/LX38/closed = 0\nempty --prefix nobody/\n\ndelete --prefix flight/\n"
    assert (await output(processes, server, "txn", "-", stdin=script)).startswith("then\t")
    assert await output(processes, server, "scan") == ""


async def test_pages_of_a_scan_are_one_moment(processes: Processes, tmp_path: Path) -> None:
    """A page token goes on where a limit has cut, as if nothing had been written since."""
    server = await processes.serve(f"file://{tmp_path}/db")
    rows = b"".join(b"k%03d\tv\n" % number for number in range(300))
    await output(processes, server, "load", stdin=rows)
    keys: list[str] = []
    token: list[str] = []
    while True:
        page = await run(processes, server, "scan", "--keys-only", "--limit", "100", *token)
        assert await page.exited() == 0, page.report()
        keys += page.stdout().split()
        if not page.stderr():
            break
        token = ["--page-token", page.stderr().split()[-1]]
        await output(processes, server, "delete", "k250")
    assert keys == [f"k{number:03}" for number in range(300)]


async def test_a_bench_measures_and_cleans_up(processes: Processes, tmp_path: Path) -> None:
    """All operations, in each of the three ways, without an error and without a key left."""
    server = await processes.serve(f"file://{tmp_path}/db")
    await output(processes, server, "put", "mine", "v")
    for through in ("unary", "coalesced", "session"):
        printed = await output(
            processes,
            server,
            *f"bench put get mixed txn scan --through {through} --count 100".split(),
            *"--keys 50 --format json".split(),
        )
        rows = [json.loads(line) for line in printed.splitlines()]
        assert sum(row["count"] for row in rows) == 500
        assert not any(row["errors"] for row in rows)
    assert await output(processes, server, "scan", "--keys-only") == "mine\n"
