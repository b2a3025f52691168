"""Writes a golden database: ``python -m tests.golden.make_database v0_9``.

It is written by a server of the version that is installed. Files that exist are never overwritten:
what was written once must be read for ever.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shalekv_client import Client, Put
from tests.golden.databases import DATABASES, described, text_of
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes

HOUR_MS = 3_600_000
Rows = Sequence[tuple[bytes, bytes, bool]]


class Making:
    """A database that is being made."""

    def __init__(self, processes: Processes, url: str) -> None:
        self.url = url
        self.repeats: list[dict[str, Any]] = []
        self._processes = processes

    async def serve(self, *flags: str) -> Child:
        return await self._processes.serve(self.url, *flags)

    async def run(self, *argv: str) -> None:
        await self._processes.run(*argv, code=0)

    async def put_once(self, client: Client, key: bytes, value: bytes) -> None:
        """A put that can be repeated by its idempotency key."""
        once = b"golden " + key
        commit = await client.put(key, value, idempotency_key=once)
        self.repeats.append(
            {"key": text_of(key), "value": text_of(value), "once": text_of(once), "seq": commit.seq}
        )

    async def load(self, server: Child, load_id: str, rows: Rows) -> None:
        """A bulk load, which the server commits; each row is a key, a value, and if it expires."""
        expire_at_ms = time.time_ns() // 1_000_000 + HOUR_MS
        lines = [
            {"key": text_of(key), "value": text_of(value)}
            | ({"expire_at_ms": expire_at_ms} if expires else {})
            for key, value, expires in rows
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".ndjson", encoding="ascii") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            where = ("--url", self.url, "--addr", server.listen)
            await self.run("load", file.name, "--bulk", *where, "--load-id", load_id)


async def description_of(client: Client, last_seq: int) -> dict[str, Any]:
    """Describe the contents of the database."""
    now_ms = time.time_ns() // 1_000_000
    entries = [
        {
            "key": text_of(entry.key),
            "value": described(entry.value),
            "seq": entry.seq,
            "expire_at_ms": entry.expire_at_ms or 0,
        }
        async for entry in client.scan()
    ]
    return {"now_ms": now_ms, "last_seq": last_seq, "entries": entries}


async def write(client: Client, values: Mapping[bytes, bytes]) -> None:
    await client.write([Put(key, value) for key, value in values.items()])


async def api_writes(making: Making, client: Client) -> None:
    await client.put(b"for a moment", b"gone", ttl_ms=1)
    await client.put(b"for an hour", b"still there", ttl_ms=HOUR_MS)
    await making.put_once(client, b"once", b"and no more")
    await client.add(b"counter", 40)
    await client.add(b"counter", 2)
    await client.delete_range(start=b"plain10", end=b"plain15")
    await client.put(b"plain12", b"after the range delete")


async def everything(making: Making) -> dict[str, Any]:
    """All kinds of objects: levels, records, loads, a snapshot, and a log that is not compacted."""
    alone = ("--no-with-compactor", "--no-with-collector", "--direct-ingest-bytes", "65536")
    small = ("--once", "--wal-trigger-age-ms", "0", "--sst-bytes", "65536", "--block-bytes", "1024")
    compact = ("compactor", "--url", making.url, *small, "--l0-trigger-count")
    server = await making.serve(*alone)
    async with Client(server.listen) as client:
        for number in range(20):
            await client.put(b"plain%02d" % number, b"of the first writer")
    await server.kill()
    server = await making.serve("--max-parallel-writes", "4", "--wal-codec", "lz4", *alone)
    async with Client(server.listen) as client:
        await client.delete(b"plain01")
        for first in range(0, 100, 25):
            low = {b"low%03d" % n: b"to level 1, %d" % n * 4 for n in range(first, first + 25)}
            await write(client, low)
        await write(client, {b"load%02d" % n: b"%d, " % n * 300 for n in range(80)})
        await making.run(*compact, "1")
        await api_writes(making, client)
        await client.delete_range(start=b"low010", end=b"low020")
        await client.put(b"low015", b"in level 0")
        rows = [(b"bulk%03d" % n, b"%d loaded" % n, n % 7 == 0) for n in range(200)]
        await making.load(server, "golden, the first", rows)
        await client.delete_range(start=b"bulk010", end=b"bulk015")
        await making.run(*compact, "100")
        await making.run("snapshot", "create", "--url", making.url, "--name", "kept", "--forever")
        await client.put(b"low015", b"in the log")
        await making.put_once(client, b"once more", b"in the log")
        await client.delete_range(start=b"low030", end=b"low040")
        await write(client, {b"load%02d" % n: b"%d. " % n * 300 for n in range(80)})
        rows = [(b"bulk%03d" % n, b"%d again" % n, n % 5 == 0) for n in range(100, 250)]
        await making.load(server, "golden, the second", rows)
        last = await client.put(b"bulk140", b"after the second load")
        description = await description_of(client, last.seq)
    await server.kill()
    return description


async def make(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, Processes() as processes:
        making = Making(processes, f"file://{scratch}/database")
        description = await everything(making)
        shutil.copytree(f"{scratch}/database", target)
    text = json.dumps(description | {"repeats": making.repeats}, indent=1) + "\n"
    (target / "database.json").write_text(text, "ascii")


if __name__ == "__main__":
    asyncio.run(make(DATABASES / sys.argv[1]))
