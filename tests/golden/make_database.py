"""Writes a golden database: ``python -m tests.golden.make_database v0_3_levels``.

The name says what is written, by a server of the version that is installed; ``--source FOLDER``
takes the server from a checkout of another version. Files that exist are never overwritten: what
was written once must be read for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shalekv.core.key_range import KeyRange
from shalekv.format.coding import crc32c
from shalekv_client import Add, Client, DeleteRange, Put, RetryPolicy
from tests.golden.places import ClonePlace, Place, place
from tests.judging import commits as judging
from tests.judging.commits import Between, Commits
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes

DATABASES = Path(__file__).parent / "databases"
HOUR_MS = 3_600_000
PLAIN = RetryPolicy(idempotent=False)  # version 0.1 knows no idempotency keys
LONG_BYTES = 64  # of a value, from which on its checksum stands for it
ALL = KeyRange(b"", b"")
Rows = Sequence[tuple[bytes, bytes, bool]]


class Making:
    """A database that is being made, and what it must hold."""

    def __init__(self, processes: Processes, place: Place, source: Path | None) -> None:
        """Nothing is written yet."""
        self.url = place.url
        self._place = place
        self.repeats: list[dict[str, Any]] = []
        self.commits = Commits()
        self._processes = processes
        self._env = dict(place.env)
        if source is not None:
            self._env["PYTHONPATH"] = str(source / "server")

    async def serve(self, *flags: str) -> Child:
        """Start the server."""
        listen = ("--listen", "127.0.0.1:0", "--log-format", "json")
        return await self._serving("serve", "--create", "--url", self.url, *listen, *flags)

    async def become_a_clone(self) -> None:
        """Clone what was made so far; the clone goes on from there."""
        assert isinstance(self._place, ClonePlace)
        parent_url, self.url = self.url, self._place.clone_url
        await self.run("clone", "--url", parent_url, "--to", self.url)

    async def run(self, *argv: str) -> None:
        """Run a command of the same version to its end."""
        child = await self._processes.run(
            *("-m", "shalekv.cli.main", *argv), program=sys.executable, env=self._env
        )
        assert await child.exited() == 0, child.report()

    async def _serving(self, *argv: str) -> Child:
        program = ("-m", "shalekv.cli.main", *argv)
        child = self._processes.start(*program, program=sys.executable, env=self._env)
        await child.ready()
        return child

    async def put(self, client: Client, key: bytes, value: bytes, ttl_ms: int = 0) -> None:
        """A put, which expires."""
        commit = await client.put(key, value, ttl_ms=ttl_ms)
        got = await client.get(key) if ttl_ms == HOUR_MS else None
        at_ms = got.expire_at_ms if got is not None else None
        expires = Between(at_ms, at_ms) if at_ms else Between(0, 1) if ttl_ms else None
        self.commits.add(commit.seq, [judging.Put(key, value, expires)])

    async def put_once(self, client: Client, key: bytes, value: bytes) -> None:
        """A put that can be repeated by its idempotency key."""
        once = b"golden " + key
        commit = await client.put(key, value, idempotency_key=once)
        self.commits.add(commit.seq, [judging.Put(key, value)])
        self.repeats.append(
            {"key": _text(key), "value": _text(value), "once": _text(once), "seq": commit.seq}
        )

    async def delete(self, client: Client, key: bytes) -> None:
        """A delete."""
        self.commits.add((await client.delete(key)).seq, [judging.Delete(key)])

    async def delete_range(self, client: Client, start: bytes, end: bytes) -> None:
        """A range delete."""
        commit = await client.write([DeleteRange(start, end)])
        self.commits.add(commit.seq, [judging.DeleteRange(KeyRange(start, end))])

    async def write(self, client: Client, values: Mapping[bytes, bytes]) -> None:
        """A batch of puts."""
        commit = await client.write([Put(key, value) for key, value in values.items()])
        puts = [judging.Put(key, value) for key, value in values.items()]
        self.commits.add(commit.seq, puts)

    async def load(self, client: Client, server: Child, load_id: str, rows: Rows) -> None:
        """A bulk load, which the server commits; each row is a key, a value and a life or 0."""
        expire_at_ms = time.time_ns() // 1_000_000 + HOUR_MS
        lines = [
            {"key": _text(key), "value": _text(value)}
            | ({"expire_at_ms": expire_at_ms} if expires else {})
            for key, value, expires in rows
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".ndjson", encoding="ascii") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            where = ("--url", self.url, "--addr", server.listen)
            await self.run("load", file.name, "--bulk", *where, "--load-id", load_id)
        first = await client.get(rows[0][0])
        assert first is not None
        at = Between(expire_at_ms, expire_at_ms)
        puts = [judging.Put(key, value, at if expires else None) for key, value, expires in rows]
        self.commits.add(first.seq, puts)

    async def add(self, client: Client, key: bytes, delta: int) -> None:
        """An addition to a counter."""
        commit = await client.write([Add(key, delta)])
        value = commit.counters[0].to_bytes(8, "little", signed=True)
        self.commits.add(commit.seq, [judging.Put(key, value)])

    async def description(self, client: Client) -> dict[str, Any]:
        """What the database holds, by what was acknowledged and by what the server says."""
        now_ms = time.time_ns() // 1_000_000
        found = [entry async for entry in client.scan()]
        (state,) = self.commits.states([self.commits.last_seq])
        told = {entry.key: judging.Told(entry.value, entry.seq) for entry in found}
        state.check_range(ALL, Between(now_ms, now_ms), told)
        entries = [
            {
                "key": _text(entry.key),
                "value": described(entry.value),
                "seq": entry.seq,
                "expire_at_ms": entry.expire_at_ms or 0,
            }
            for entry in found
        ]
        return {"now_ms": now_ms, "last_seq": self.commits.last_seq, "entries": entries}


async def plain(making: Making) -> dict[str, Any]:
    """What version 0.1 could do: puts, deletes and batches of two writers."""
    server = await making.serve()
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        for number in range(20):
            await making.put(client, b"plain%02d" % number, b"first %d" % number)
        await making.write(client, {b"batch%d" % number: b"of one commit" for number in range(5)})
    await server.kill()
    server = await making.serve("--max-parallel-writes", "4")
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        for number in range(0, 20, 3):
            await making.put(client, b"plain%02d" % number, b"second %d" % number)
        await making.delete(client, b"plain01")
        await making.put(client, b"\x00\xff binary", bytes(range(256)))
        await making.put(client, b"empty", b"")
        described = await making.description(client)
    await server.kill()
    return described


async def whole_api(making: Making) -> dict[str, Any]:
    """The same, and what version 0.2 could do before it had levels."""
    await plain(making)
    server = await making.serve("--wal-codec", "lz4")
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        await api_writes(making, client)
        described = await making.description(client)
    await server.kill()
    return described


async def api_writes(making: Making, client: Client) -> None:
    """Every kind of write."""
    await making.put(client, b"for a moment", b"gone", ttl_ms=1)
    await making.put(client, b"for an hour", b"still there", ttl_ms=HOUR_MS)
    await making.put_once(client, b"once", b"and no more")
    await making.add(client, b"counter", 40)
    await making.add(client, b"counter", 2)
    await making.delete_range(client, b"plain10", b"plain15")
    await making.put(client, b"plain12", b"after the range delete")


async def levels(making: Making) -> dict[str, Any]:
    """All kinds of objects: levels, records, loads, a snapshot, and a log that is not compacted."""
    alone = ("--no-with-compactor", "--no-with-collector", "--skip-memtable-bytes", "65536")
    small = ("--once", "--wal-trigger-age-ms", "0", "--sst-bytes", "65536", "--block-bytes", "1024")
    compact = ("compactor", "--url", making.url, *small, "--l0-trigger-count")
    await plain(making)
    server = await making.serve(*alone)
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        for first in range(0, 100, 25):
            low = {b"low%03d" % n: b"to level 1, %d" % n * 4 for n in range(first, first + 25)}
            await making.write(client, low)
        await making.write(client, {b"load%02d" % n: b"%d, " % n * 300 for n in range(80)})
        await making.run(*compact, "1")
        await api_writes(making, client)
        await making.delete(client, b"low007")
        await making.delete_range(client, b"low010", b"low020")
        await making.put(client, b"low015", b"in level 0")
        await making.run(*compact, "100")
        await making.run("snapshot", "create", "--url", making.url, "--name", "kept", "--forever")
        await making.put(client, b"low015", b"in the log")
        await making.put_once(client, b"once more", b"in the log")
        await making.delete_range(client, b"low030", b"low040")
        await making.write(client, {b"load%02d" % n: b"%d. " % n * 300 for n in range(80)})
        await making.put(client, b"load05", b"after the load")
        described = await making.description(client)
    await server.kill()
    return described


async def clone(making: Making) -> dict[str, Any]:
    """A clone of such a database: levels and a log of its own, above what it shares."""
    await levels(making)
    alone = ("--no-with-compactor", "--no-with-collector")
    compact = ("--once", "--wal-trigger-age-ms", "0", "--l0-trigger-count", "100")
    await making.become_a_clone()
    server = await making.serve(*alone)
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        await making.put(client, b"low000", b"of the clone, in level 0")
        await making.delete_range(client, b"load70", b"load75")
        await making.run("compactor", "--url", making.url, *compact)
        await making.put(client, b"low001", b"of the clone, in the log")
        await making.delete(client, b"low002")
        described = await making.description(client)
    await server.kill()
    return described


async def bulk(making: Making) -> dict[str, Any]:
    """Bulk loads above levels and a log: one that is compacted, and one in the log."""
    await levels(making)
    compact = ("--once", "--wal-trigger-age-ms", "0", "--l0-trigger-count", "100")
    server = await making.serve("--no-with-compactor", "--no-with-collector")
    async with Client(server.listen, retry=PLAIN, coalesce=False) as client:
        rows = [(b"bulk%03d" % n, b"%d loaded" % n, n % 7 == 0) for n in range(200)]
        await making.load(client, server, "golden, the first", rows)
        await making.put(client, b"bulk003", b"after the first load")
        await making.delete_range(client, b"bulk010", b"bulk015")
        await making.run("compactor", "--url", making.url, *compact)
        await making.put(client, b"bulk120", b"before the second load")
        rows = [(b"bulk%03d" % n, b"%d again" % n, n % 5 == 0) for n in range(100, 250)]
        await making.load(client, server, "golden, the second", rows)
        await making.put(client, b"bulk140", b"after the second load")
        described = await making.description(client)
    await server.kill()
    return described


PLANS: Mapping[str, Callable[[Making], Awaitable[dict[str, Any]]]] = {
    "v0_1": plain,
    "v0_2_before_levels": whole_api,
    "v0_3_levels": levels,
    "v0_4_two_phase": levels,
    "v0_5_clone": clone,
    "v0_6_bulk": bulk,
    "v0_8_levels": levels,
}
TWO_PHASE = frozenset({"v0_4_two_phase"})
CLONES = frozenset({"v0_5_clone"})


async def make(name: str, source: Path | None) -> None:
    """Make the database of this name. `FileExistsError`: it is there already."""
    target = DATABASES / name
    with tempfile.TemporaryDirectory() as scratch, Processes() as processes:
        kinds = {"is_two_phase": name in TWO_PHASE, "is_clone": name in CLONES}
        async with place(Path(scratch), **kinds) as where:
            making = Making(processes, where, source)
            description = await PLANS[name](making)
            target.mkdir(parents=True)
            await where.copy_to(target)
        description |= {"repeats": making.repeats}
        text = json.dumps(description, indent=1) + "\n"
        (target / "database.json").write_text(text, "ascii")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PLANS))
    parser.add_argument("--source", type=Path)
    parsed = parser.parse_args(argv)
    asyncio.run(make(parsed.name, parsed.source))


def described(value: bytes) -> str:
    """A value as a description has it."""
    if len(value) < LONG_BYTES:
        return _text(value)
    return f"{len(value)} bytes {crc32c(value):08x}"


def _text(data: bytes) -> str:
    return data.decode("latin-1")


if __name__ == "__main__":
    main()
