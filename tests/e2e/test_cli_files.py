"""Loading and dumping, as real processes against a real server, some of them killed."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

from shalekv_client import Client
from tests.e2e.cli import output
from tests.kit.processes.child import EXIT_S, Child
from tests.kit.processes.processes import Processes
from tests.servers.process import free_port

PAIRS = 60_000
KEYS = 40_000  # so that a third of the rows sets a key again
RATE = 6_000  # rows/s: what is left at `KILL_AT` takes longer than a busy machine looks away
KILL_AT = 10_000


def pairs() -> list[tuple[str, str]]:
    """Return the rows of an input; of a repeated key the last row counts."""
    return [(f"key{number * 7919 % KEYS:06}", f"value {number}") for number in range(PAIRS)]


async def stored(server: Child) -> dict[bytes, bytes]:
    async with Client(server.listen) as client, client.scan() as scan:
        return {entry.key: entry.value async for entry in scan}


def state_of(path: Path) -> dict[str, Any]:
    """Return the state file of a load; empty while there is none."""
    if not path.exists():
        return {"line": 0, "rows": 0}
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


async def killed_half_way(load: Child, state: Path, server: Child) -> dict[str, Any]:
    """Kill a load when its state has reached `KILL_AT`; return the state that it left."""
    async with asyncio.timeout(EXIT_S), Client(server.listen) as client:
        while state_of(state)["line"] < KILL_AT:
            assert load.running, load.report()
            await client.status()
    assert await load.kill() == -signal.SIGKILL, load.report()
    return state_of(state)


async def test_a_killed_load_goes_on_to_the_same_end(processes: Processes, tmp_path: Path) -> None:
    """Kill -9 half-way, then --resume: pairs and bad rows as without the kill, not all over."""
    path, state, bad = tmp_path / "rows.csv.gz", tmp_path / "state", tmp_path / "bad"
    bad_lines = await asyncio.to_thread(write_rows, path)
    server = await processes.serve(f"file://{tmp_path}/db")
    argv = ["load", str(path), "--resume", str(state), "--bad-rows", str(bad)]
    env = {"SHALEKV_ADDR": server.listen}
    load = processes.start(*argv, "--rate", str(RATE), env=env)
    half = await killed_half_way(load, state, server)
    before = await stored(server)
    printed = await output(processes, server, *argv)
    expected = {key.encode(): value.encode() for key, value in pairs()}
    assert await stored(server) == expected
    found = [json.loads(line)["line"] for line in bad.read_text().splitlines()]
    assert found == bad_lines
    assert state_of(state) | {"complete": True, "rows": PAIRS} == state_of(state)
    sys.stdout.write(
        f"killed at line {half['line']:,} with {len(before):,} keys and {half['bad_rows']:,} bad "
        f"rows for certain; then {printed}"
    )
    assert f"loaded {PAIRS - half['rows']:,} rows" in printed
    assert f"loaded before: {PAIRS:,} rows" in await output(processes, server, *argv)


def write_rows(path: Path) -> list[int]:
    rows: list[tuple[str, ...]] = [("key", "value")]
    bad_lines = []
    for number, row in enumerate(pairs()):
        if number % 1_000 == 0:
            rows.append(("one", "too", "many"))
            bad_lines.append(len(rows))
        rows.append(row)
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), compresslevel=1))
    return bad_lines


async def test_a_load_waits_for_a_server_that_is_started_again(
    processes: Processes, tmp_path: Path
) -> None:
    """Kill -9 of the server under a load, and another one at its place: every row is there."""
    url = f"file://{tmp_path}/db"
    server = await processes.serve(url, "--listen", f"127.0.0.1:{free_port()}")
    rows = "".join(f"{key}\t{value}\n" for key, value in pairs()[:40_000]).encode()
    argv = ["load", "--rate", "20000", "--timeout-ms", "120000"]
    load = processes.start(*argv, env={"SHALEKV_ADDR": server.listen}, stdin=rows)
    async with Client(server.listen) as client:
        while load.running and (await client.status()).view.seq < 5:
            pass
    await server.kill()
    server = await processes.serve(url, "--listen", server.listen, create=False)
    assert await load.exited() == 0, load.report()
    expected = {key.encode(): value.encode() for key, value in pairs()[:40_000]}
    assert await stored(server) == expected
