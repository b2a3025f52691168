"""The audit log of real processes: one file for all of them, rotated while they serve."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from shalekv_client import Client
from tests.kit.processes.child import Child, event
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes

ROTATIONS = 2
CALLS = 60  # of each kind, before a rotation and during it
AT_ONCE = 20


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def opened_again(process: Child) -> int:
    return sum(map(event("audit log opened again"), process.lines()))


async def call_on(writer: Client, reader: Client, first: int) -> None:
    """Put and get keys, each of which is used once."""
    for start in range(first, first + CALLS, AT_ONCE):
        numbers = range(start, start + AT_ONCE)
        puts = (writer.put(b"put %d" % number, b"") for number in numbers)
        gets = (reader.get(b"get %d" % number) for number in numbers)
        await asyncio.gather(*puts, *gets)


async def rotate(path: Path, to: Path, writer: Child, reader: Child) -> None:
    """Rotate the file as `logrotate` does; returns when all three processes have noticed."""
    before = opened_again(writer), opened_again(reader)
    os.rename(path, to)  # noqa: PTH104 (a moment)
    for process in (writer, reader):
        os.kill(process.pid, signal.SIGHUP)
    await writer.line(lambda _: opened_again(writer) > before[0])
    await reader.line(lambda _: opened_again(reader) >= before[1] + 2)


async def test_a_shared_log_is_rotated_without_a_loss(processes: Processes, tmp_path: Path) -> None:
    """Each operation has one whole line, in the old file or in the new one, of three processes."""
    path = tmp_path / "audit.log"
    flags = ("--audit-log", str(path), "--audit-level", "all", "--audit-keys", "plain")
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE, *flags)
    shared = await database.read("--processes", "2", *flags)
    rotated = [tmp_path / f"audit.log.{number}" for number in range(ROTATIONS)]
    async with Client(server.listen) as writer, Client(shared.listen) as reader:
        for number, to in enumerate(rotated):
            await call_on(writer, reader, 2 * number * CALLS)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call_on(writer, reader, (2 * number + 1) * CALLS))
                await rotate(path, to, server, shared)
        sizes = [to.stat().st_size for to in rotated]
        await call_on(writer, reader, 2 * ROTATIONS * CALLS)
    assert await shared.stop() == 0, shared.report()
    assert await server.stop() == 0, server.report()
    assert sizes == [to.stat().st_size for to in rotated]  # nobody writes to them any more
    lines = [line for each in (*rotated, path) for line in lines_of(each)]
    keys = Counter(key for line in lines for key in line.get("keys", ()))
    total = (2 * ROTATIONS + 1) * CALLS
    assert keys == Counter(f"{kind} {n}" for n in range(total) for kind in ("put", "get"))
    assert {line["role"] for line in lines} == {"writer", "reader"}
    assert {line["epoch"] for line in lines} == {1}
