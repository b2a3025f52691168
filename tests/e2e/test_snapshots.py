"""Snapshots over gRPC: made, read, renewed, deleted and expired during writes and compactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from shalekv.format import names
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import admin_stub, kv_stub, reason_of

CALL_S = 120.0
SHORT_MS = 4_000  # the life of some values
CLOCK = b"gone when they are over"
KEYS = [b"%04d" % number for number in range(600)]
# A batch of all keys bypasses the memtable, a message has few of them, and blocks are not cached.
SMALL_READS = ("--scan-message-bytes", "8192", "--block-cache-bytes", "1048576")
SMALL = ("--direct-ingest-bytes", "65536", *SMALL_READS)
QUICK = ("--poll-interval-ms", "20", "--manifest-interval-ms", "200")


class Server:
    """Calls to a process, of whichever role."""

    def __init__(self, kv: Any, admin: Any) -> None:
        self.kv = kv
        self.admin = admin

    async def write(self, changes: Iterable[kv_pb2.Change]) -> None:
        await self.kv.Write(kv_pb2.WriteRequest(changes=changes), timeout=CALL_S)

    async def create(self, **fields: Any) -> admin_pb2.SnapshotInfo:
        request = admin_pb2.CreateSnapshotRequest(**fields)
        reply: admin_pb2.CreateSnapshotReply
        reply = await self.admin.CreateSnapshot(request, timeout=CALL_S)
        return reply.snapshot

    async def scan(
        self, snapshot_id: bytes, *, resumable: bool = False, **fields: Any
    ) -> list[kv_pb2.ScanReply]:
        header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
        request = kv_pb2.ScanRequest(header=header, resumable=resumable, **fields)
        return [reply async for reply in self.kv.Scan(request, timeout=CALL_S)]

    async def get(self, snapshot_id: bytes, key: bytes) -> kv_pb2.GetReply:
        header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
        request = kv_pb2.GetRequest(header=header, key=key)
        reply: kv_pb2.GetReply = await self.kv.Get(request, timeout=CALL_S)
        return reply


@asynccontextmanager
async def asking(process: Child) -> AsyncIterator[Server]:
    async with kv_stub(process.listen) as kv, admin_stub(process.listen) as admin:
        yield Server(kv, admin)


def puts(value: bytes, keys: Iterable[bytes] = KEYS, **fields: Any) -> list[kv_pb2.Change]:
    return [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, **fields)) for key in keys]


def bytes_of(replies: Iterable[kv_pb2.ScanReply]) -> bytes:
    """The entries of a scan, wherever it was cut into messages."""
    entries = [entry for reply in replies for entry in reply.entries]
    return kv_pb2.ScanReply(entries=entries).SerializeToString(deterministic=True)


async def refused(reading: Any) -> str:
    """The reason of a read that must fail as not found."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    return reason_of(caught.value)


async def fill(server: Server) -> None:
    """Levels-to-be, a load, range deletes and values that expire, all in the log."""
    random = Random(1)
    for start in range(0, len(KEYS), 100):
        await server.write(puts(random.randbytes(200), KEYS[start : start + 100]))
    await server.write(puts(random.randbytes(200), KEYS[::2]))  # a load
    gone = kv_pb2.KeyRange(start=KEYS[30], end=KEYS[60])
    await server.kv.DeleteRange(kv_pb2.DeleteRangeRequest(range=gone), timeout=CALL_S)
    await server.write(puts(b"over", KEYS[50:55], ttl_ms=1))
    await server.write([kv_pb2.Change(delete=kv_pb2.DeleteChange(key=KEYS[0]))])


async def overwrite(database: Cluster, server: Server) -> None:
    """Change every key, compact, and collect all that nothing keeps."""
    for value in (b"new", b"newer"):
        await server.write(puts(value))
        await database.compact("--l0-trigger-count", "1")
    gone = kv_pb2.KeyRange(prefix=b"00")
    await server.kv.DeleteRange(kv_pb2.DeleteRangeRequest(range=gone), timeout=CALL_S)
    await database.compact("--l0-trigger-count", "1")
    await database.collect()


async def test_scan_at_a_snapshot_is_the_same_byte_for_byte(
    processes: Processes, tmp_path: Path
) -> None:
    """At the writer, at a replica and at the next writer, before and after all keys were changed,
    the log was compacted and what is old was collected (I7).
    """
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE, *SMALL, "--fence-poll-ms", "50")
    async with asking(writer) as server:
        await fill(server)
        await database.compact("--l0-trigger-count", "100")
        await server.write(puts(b"in the log", KEYS[100:103]))
        await server.write(puts(b"v" * 150, KEYS[500:]))  # a load
        await server.kv.DeleteRange(
            kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=KEYS[200], end=KEYS[210])),
            timeout=CALL_S,
        )
        await server.write(puts(b"short", KEYS[40:45], ttl_ms=SHORT_MS))  # and over when it is read
        info = await server.create(name="nightly", ttl_s=3_600)
        await server.write(puts(b"", [CLOCK], ttl_ms=SHORT_MS))
        first = await server.scan(info.id)
        shown = {entry.key: entry.value for reply in first for entry in reply.entries}
        assert len(shown) == len(KEYS) - 1 - 25 - 10
        assert [shown[key] for key in KEYS[40:45]] == [b"short"] * 5
        assert shown[KEYS[101]] == b"in the log"
        assert shown[KEYS[-1]] == b"v" * 150
        await overwrite(database, server)
        async with asyncio.timeout(CALL_S):
            while (await server.get(b"", CLOCK)).found:
                pass
        reader = await database.read(*QUICK, *SMALL_READS)
        async with asking(reader) as replica:
            for each in (server, replica):
                await check_same(each, info, first)
    await writer.kill()
    writer = await database.serve(*ALONE, *SMALL)
    async with asking(writer) as server:
        await check_same(server, info, first)
        before = database.objects(names.LEVELS_FOLDER)
        await server.admin.DeleteSnapshot(admin_pb2.DeleteSnapshotRequest(name="nightly"))
        assert await refused(server.scan(info.id)) == "SNAPSHOT_NOT_FOUND"
        assert await refused(server.get(info.id, KEYS[1])) == "SNAPSHOT_NOT_FOUND"
        await database.collect()
        assert database.objects(names.LEVELS_FOLDER) < before
    assert await writer.stop() == 0, writer.report()
    await database.check()


async def check_same(
    server: Server, info: admin_pb2.SnapshotInfo, first: list[kv_pb2.ScanReply]
) -> None:
    """Scans in both directions, resumed and not, and gets."""
    again = await server.scan(info.id, resumable=True)
    assert bytes_of(again) == bytes_of(first)
    assert {reply.header.seq for reply in again} == {info.seq}
    entries = [entry for reply in first for entry in reply.entries]
    backward = await server.scan(info.id, reverse=True)
    assert [entry for reply in backward for entry in reply.entries] == entries[::-1]
    middle = len(again) // 2
    rest = await server.scan(info.id, page_token=again[middle].page_token)
    assert bytes_of([*again[: middle + 1], *rest]) == bytes_of(first)
    for entry in entries[::50]:
        found = await server.get(info.id, entry.key)
        assert (found.value, found.seq) == (entry.value, entry.seq)
    assert not (await server.get(info.id, KEYS[0])).found
