"""A writer and a reader that are paused for longer than their snapshots live: F3 for reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from shalekv.format import names
from shalekv.protocol.manifest import L0
from shalekv_client import Client, ConditionFailed, Missing, NotApplied, Put, RangeEmpty, Scan
from tests.kit.processes.cluster import ALONE, LIFE_S, Cluster
from tests.kit.processes.load import ONE_ATTEMPT, TIMEOUT_MS
from tests.kit.processes.processes import Processes
from tests.kit.timeouts import until

DEADLINE_S = 200
KEYS, PAGE = 400, 50
GONE = "SNAPSHOT_NOT_FOUND"
# Each read of a value is a read of the store.
WRITER = (
    *(*ALONE, "--fence-poll-ms", "50", "--snapshot-ttl-s", str(LIFE_S)),
    *("--block-cache-bytes", "0"),
)
READER = (
    *("--reader-snapshot-ttl-s", str(LIFE_S), "--block-cache-bytes", "0"),
    *("--poll-interval-ms", "50", "--manifest-interval-ms", "100"),
)
SMALL_BLOCKS = ("--block-bytes", "1024")
Read: TypeAlias = Callable[[], Awaitable[object]]


async def test_servers_that_were_paused_past_their_snapshots_answer_nothing_wrong(
    processes: Processes, tmp_path: Path
) -> None:
    """After the levels that they read were merged and collected, their reads are right, or are
    refused by an error of their own: gets, conditional writes, and continued scans, which never end
    early. Soon they read the new levels.
    """
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        database = Cluster(processes, tmp_path)
        writer = await database.serve(*WRITER)
        reader = await database.read(*READER)
        async with client_of(writer.listen) as client, client_of(reader.listen) as replica:
            for version in range(2):
                await client.write([Put(_key(number), _value(number)) for number in range(KEYS)])
                await client.put(b"version", b"%d" % version)
                await database.compact("--l0-trigger-count", "100", *SMALL_BLOCKS)
            assert client.token is not None
            replica.advance(client.token)
            await until(lambda: _is_all_pinned(database), "snapshots of the current levels")
            scans = [client.scan(limit=PAGE), client.scan(reverse=True, limit=PAGE)]
            scans.append(replica.scan(limit=PAGE))
            pages = [[entry.key async for entry in scan] for scan in scans]
            assert pages[0] == pages[2] == [_key(number) for number in range(PAGE)]

            def insert() -> Awaitable[object]:
                return client.put(_key(0), b"", condition=Missing())

            def insert_if_none() -> Awaitable[object]:
                return client.txn([RangeEmpty(prefix=b"k")], [Put(_key(0), b"")])

            ssts = database.manifest().leveled_ssts
            old = {names.level_name(each.id) for each in ssts if each.level == L0}
            writer.pause()
            reader.pause()
            reads: list[Read] = [*(partial(_rest, scan) for scan in scans), insert, insert_if_none]
            numbers = [*range(0, KEYS, 4), *range(0, KEYS, 4)]
            for number, each in zip(numbers, [client, replica] * len(numbers), strict=False):
                reads.append(partial(each.get, _key(number)))
            # They reach a stopped process, and are read as soon as it resumes.
            answers = [tasks.create_task(_outcome(read)) for read in reads]
            await database.compact("--l0-trigger-count", "1", *SMALL_BLOCKS)
            await database.collect(lambda: bool(database.objects("levels/") & old))
            writer.resume()
            reader.resume()
            outcomes = await asyncio.gather(*answers)
            assert all(each in (GONE, PAGE) for each in outcomes[:3]), outcomes
            assert outcomes[3] in {GONE, "CONDITION_FAILED"}, outcomes
            assert outcomes[4] == GONE or getattr(outcomes[4], "succeeded", None) is False, outcomes
            for number, found in zip(numbers, outcomes[5:], strict=True):
                assert found == GONE or getattr(found, "value", None) == _value(number), outcomes
            for each in (client, replica):
                entries = [(entry.key, entry.value) async for entry in each.scan(prefix=b"k")]
                assert entries == [(_key(number), _value(number)) for number in range(KEYS)]
            assert await _outcome(insert) == "CONDITION_FAILED"
            status = (await replica.status()).reader
            assert status is not None
            assert status.snapshots_lost >= 1
        assert await reader.stop() == 0, reader.report()
        assert await writer.stop() == 0, writer.report()
        await database.check()


def client_of(address: str) -> Client:
    """A client of one server that sends each request once."""
    return Client(address, timeout_ms=TIMEOUT_MS, replica_wait_ms=TIMEOUT_MS, retry=ONE_ATTEMPT)


async def _rest(scan: Scan) -> int:
    return len([entry async for entry in scan.next_page()])


async def _outcome(read: Read) -> object:
    try:
        return await read()
    except (NotApplied, ConditionFailed) as error:
        return error.reason


def _is_all_pinned(database: Cluster) -> bool:
    """Return whether writer and reader have snapshots of the current levels, and no other."""
    manifest = database.manifest()
    pinned = [database.manifest(each.manifest_id) for each in manifest.snapshots]
    return [each.leveled_ssts for each in pinned] == [manifest.leveled_ssts] * 2


def _key(number: int) -> bytes:
    return b"k%03d" % number


def _value(number: int) -> bytes:
    return b"%d" % number * 100
