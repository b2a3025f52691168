"""A serving writer that stands still for longer than its snapshots live: rule F3 for its reads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from shalekv.core.tree import L0
from shalekv.format import names
from shalekv_client import Absent, Client, ConditionFailed, NotApplied, Put, RangeEmpty, Scan
from tests.kit.processes.load import ONE_ATTEMPT, TIMEOUT_MS
from tests.kit.processes.meanwhile import ALONE, LIFE_S, Meanwhile
from tests.kit.processes.processes import Processes

DEADLINE_S = 200
POLL_S = 0.05
KEYS = 400
PAGE = 50
GONE = "SNAPSHOT_NOT_FOUND"
# Each read of a value is a read of the store.
FLAGS = (*ALONE, "--fence-poll-ms", "50", "--snapshot-ttl-s", str(LIFE_S))
CACHELESS = ("--block-cache-bytes", "0")
SMALL_BLOCKS = ("--block-bytes", "1024")

Read: TypeAlias = Callable[[], Awaitable[object]]


async def test_a_server_that_was_stopped_past_its_snapshots_tells_nothing_wrong(
    processes: Processes, tmp_path: Path
) -> None:
    """What it reads after the levels that it has read were merged and collected is right, or is
    refused by an error of its own: gets, conditional writes, and scans that go on, which never end
    early. Soon it reads the new levels.
    """
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        database = Meanwhile(processes, tmp_path / "db")
        server = await database.serve(*FLAGS, *CACHELESS)
        async with Client(server.listen, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            for version in range(2):
                await client.write([Put(_key(number), _value(number)) for number in range(KEYS)])
                await client.put(b"version", b"%d" % version)
                await database.compact("--l0-trigger-count", "100", *SMALL_BLOCKS)
            await asyncio.to_thread(_wait_until_read, database)
            first, second = client.scan(limit=PAGE), client.scan(reverse=True, limit=PAGE)
            pages = [[entry.key async for entry in scan] for scan in (first, second)]
            assert pages[0] == [_key(number) for number in range(PAGE)]

            async def rest(scan: Scan) -> int:
                return len([entry async for entry in scan.next_page()])

            def insert() -> Awaitable[object]:
                return client.put(_key(0), b"", condition=Absent())

            def insert_if_none() -> Awaitable[object]:
                return client.txn([RangeEmpty(prefix=b"k")], [Put(_key(0), b"")])

            ssts = database.manifest().leveled_ssts
            old = {names.level_name(each.id) for each in ssts if each.level == L0}
            server.pause()
            reads: list[Read] = [partial(rest, first), partial(rest, second)]
            reads += [insert, insert_if_none]
            reads += [partial(client.get, _key(number)) for number in range(KEYS)]
            # They reach a process that is stopped, and are read as soon as it goes on.
            answers = [tasks.create_task(_outcome(read)) for read in reads]
            await database.compact("--l0-trigger-count", "1", *SMALL_BLOCKS)
            await database.collect_until(lambda _: not database.objects("levels/") & old)
            server.resume()
            told = await asyncio.gather(*answers)
            assert told[:2] == [GONE, GONE], told
            assert told[2] in {GONE, "CONDITION_FAILED"}, told
            assert told[3] == GONE or getattr(told[3], "succeeded", None) is False, told
            for number, found in enumerate(told[4:]):
                assert found == GONE or getattr(found, "value", None) == _value(number), told
            assert await _outcome(insert) == "CONDITION_FAILED"
            entries = [(entry.key, entry.value) async for entry in client.scan(prefix=b"k")]
            assert entries == [(_key(number), _value(number)) for number in range(KEYS)]
        assert await server.stop() == 0, server.report()
        await database.check()


async def _outcome(read: Read) -> object:
    """What it returns, or the reason that it is refused for."""
    try:
        return await read()
    except (NotApplied, ConditionFailed) as error:
        return error.reason


def _wait_until_read(database: Meanwhile) -> None:
    """Until the server has a snapshot of the levels that are current now; blocks the thread."""
    never = threading.Event()
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        manifest = database.manifest()
        pinned = [database.manifest(each.manifest_id) for each in manifest.snapshots]
        if [each.leveled_ssts for each in pinned] == [manifest.leveled_ssts]:
            return
        never.wait(POLL_S)
    raise TimeoutError


def _key(number: int) -> bytes:
    return b"k%03d" % number


def _value(number: int) -> bytes:
    return b"%d" % number * 100
