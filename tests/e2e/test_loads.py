"""Loads of a serving process, of files and of large batches: committed once, and for good."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from shalekv.format.sst_message import info_message
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import L0
from shalekv.protocol.sst_table import SstInfo
from shalekv.v1 import admin_pb2, admin_pb2_grpc
from shalekv_client import Client, ConditionFailed, Missing, Put, SeqIs
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.uuids import new_uuid7

LOAD_ID = "monday"
FILE_KEYS = 300

Expected = dict[bytes, bytes]


def files_in(database: Cluster, expected: Expected) -> list[SstInfo]:
    """Two files, which overwrite most keys and delete one; `expected` becomes what is left."""
    entries = [
        Entry(b"k%03d" % number, 0, Kind.PUT, b"loaded %d" % number) for number in range(FILE_KEYS)
    ]
    expected |= {entry.key: entry.value for entry in entries}
    entries[7] = Entry(entries[7].key, 0, Kind.TOMBSTONE)
    del expected[entries[7].key]
    half = FILE_KEYS // 2
    parts = (entries[:half], entries[half:])
    return [database.add_file(new_uuid7(), part, block_bytes=1_024) for part in parts]


def load_of(infos: list[SstInfo]) -> admin_pb2.IngestSstRequest:
    return admin_pb2.IngestSstRequest(load_id=LOAD_ID, ssts=map(info_message, infos))


async def ingest(server: Child, infos: list[SstInfo]) -> admin_pb2.IngestSstReply:
    request = load_of(infos)
    async with grpc.aio.insecure_channel(server.listen) as channel:
        reply: admin_pb2.IngestSstReply = await admin_pb2_grpc.AdminStub(channel).IngestSst(request)
        return reply


async def check(server: Child, expected: Expected) -> None:
    """The server holds these keys and no others, by gets and by scans in both directions."""
    async with Client(server.listen) as client:
        forward = [(entry.key, entry.value) async for entry in client.scan()]
        assert forward == sorted(expected.items())
        backward = [(entry.key, entry.value) async for entry in client.scan(reverse=True)]
        assert backward == forward[::-1]
        found = await client.batch_get([*expected, b"k007", b"none"])
        values = [value.value if value is not None else None for value in found]
        assert values == [*expected.values(), expected.get(b"k007"), None]


async def test_files_are_loaded_once_and_for_good(processes: Processes, tmp_path: Path) -> None:
    """Every read meets them above what is older and below what is newer; the same load is applied
    once, and what it holds survives kill -9 and compaction.
    """
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE)
    expected = {b"k%03d" % number: b"old" for number in range(0, FILE_KEYS + 50, 5)}
    async with Client(server.listen) as client:
        await client.write([Put(key, value) for key, value in expected.items()])
        infos = files_in(database, expected)
        first = await ingest(server, infos)
        assert not first.already_applied
        await check(server, expected)
        with pytest.raises(ConditionFailed):
            await client.put(b"k011", b"", condition=Missing())
        await client.put(b"k007", b"newer", condition=Missing())
        await client.put(b"k012", b"newer", condition=SeqIs(seq=first.header.seq))
        expected |= {b"k007": b"newer", b"k012": b"newer"}
        again = await ingest(server, infos)
        assert (again.already_applied, again.header.seq) == (True, first.header.seq)
    await server.kill()

    server = await database.serve(*ALONE)
    await check(server, expected)
    assert (await ingest(server, infos)).already_applied
    await database.compact("--l0-trigger-count", "100")
    levels = {info.id: info for info in database.manifest().leveled_ssts}
    assert all(levels[info.id].max_seq == first.header.seq for info in infos)
    await check(server, expected)
    assert (await ingest(server, infos)).already_applied
    await database.compact("--l0-trigger-count", "1")
    assert not {info.id for info in database.manifest().leveled_ssts if info.level == L0}
    await check(server, expected)
    await server.kill()

    server = await database.serve(*ALONE)
    await check(server, expected)
    again = await ingest(server, infos)
    assert (again.already_applied, again.header.seq) == (True, first.header.seq)
    assert await server.stop() == 0, server.report()
    await database.check()
