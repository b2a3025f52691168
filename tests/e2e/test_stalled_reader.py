"""A reader that stands still for longer than its snapshot lives: nothing wrong, nothing short."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from shalekv.core.tree import L0
from shalekv.format import names
from shalekv.v1 import admin_pb2, kv_pb2, kv_pb2_grpc
from tests.kit.processes.meanwhile import ALONE, LIFE_S, Meanwhile
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import admin_stub, kv_stub, reason_of

DEADLINE_S = 200
POLL_S = 0.05
KEYS = 400
PAGE = 50
CALL_S = 120.0
SMALL_BLOCKS = ("--block-bytes", "1024")
WRITER = (*ALONE, "--fence-poll-ms", "50", "--snapshot-ttl-s", str(LIFE_S))
READER = (
    *("--reader-snapshot-ttl-s", str(LIFE_S), "--block-cache-bytes", "0"),
    *("--poll-interval-ms", "50", "--manifest-interval-ms", "100"),
)


async def test_reader_that_was_stopped_past_its_snapshot_finds_its_way_back(
    processes: Processes, tmp_path: Path
) -> None:
    """After all that it has read was merged and collected, and the log behind it, too, a reader
    makes itself a new snapshot and shows what was acknowledged meanwhile; each read in between is
    right; a scan that had begun ends with an error of its own, and is never short.
    """
    async with asyncio.timeout(DEADLINE_S):
        database = Meanwhile(processes, tmp_path / "db")
        writer = await database.serve(*WRITER)
        reader = await processes.read(database.url, *READER)
        async with (
            kv_stub(writer.listen) as writes,
            kv_stub(reader.listen) as reads,
            admin_stub(reader.listen) as admin,
        ):
            await _write_all(writes, 0)
            await database.compact("--l0-trigger-count", "100", *SMALL_BLOCKS)
            last = await _write_all(writes, 1)
            await database.compact("--l0-trigger-count", "100", *SMALL_BLOCKS)
            await _read_all(reads, last, 1)
            await asyncio.to_thread(_wait, lambda: _is_all_pinned(database))
            page = await _page(reads, kv_pb2.ScanRequest(limit=PAGE))
            old = {
                names.level_name(each.id)
                for each in database.manifest().leveled_ssts
                if each.level == L0
            }
            reader.pause()
            last = await _write_all(writes, 2)
            await database.compact("--l0-trigger-count", "1", *SMALL_BLOCKS)
            await database.collect_until(lambda _: not database.objects("levels/") & old)
            reader.resume()
            with pytest.raises(grpc.aio.AioRpcError) as gone:
                await _page(reads, kv_pb2.ScanRequest(page_token=page.page_token))
            assert reason_of(gone.value) == "SNAPSHOT_NOT_FOUND"
            await _read_all(reads, last, 2)
            status = await admin.Status(admin_pb2.StatusRequest(), timeout=CALL_S)
            assert status.reader.snapshots_lost >= 1
        assert await reader.stop() == 0, reader.report()
        assert await writer.stop() == 0, writer.report()
        await database.check()


async def _write_all(stub: kv_pb2_grpc.KVStub, version: int) -> int:
    """Write all keys in one commit; its number."""
    changes = [
        kv_pb2.Change(put=kv_pb2.PutChange(key=_key(number), value=_value(number, version)))
        for number in range(KEYS)
    ]
    reply = await stub.Write(kv_pb2.WriteRequest(changes=changes), timeout=CALL_S)
    return reply.header.seq


async def _read_all(stub: kv_pb2_grpc.KVStub, seq: int, version: int) -> None:
    """Each key, and all of them, at commit `seq`."""
    header = kv_pb2.RequestHeader(min_seq=seq)
    for number in range(0, KEYS, 7):
        found = await stub.Get(kv_pb2.GetRequest(header=header, key=_key(number)), timeout=CALL_S)
        assert (found.value, found.header.role) == (_value(number, version), kv_pb2.ROLE_READER)
    entries = []
    async for reply in stub.Scan(kv_pb2.ScanRequest(header=header), timeout=CALL_S):
        assert reply.header.seq >= seq
        entries += [(each.key, each.value) for each in reply.entries]
    assert entries == [(_key(number), _value(number, version)) for number in range(KEYS)]


async def _page(stub: kv_pb2_grpc.KVStub, request: kv_pb2.ScanRequest) -> kv_pb2.ScanReply:
    """The last message of a scan."""
    last = kv_pb2.ScanReply()
    async for reply in stub.Scan(request, timeout=CALL_S):
        last = reply
    return last


def _is_all_pinned(database: Meanwhile) -> bool:
    """Whether writer and reader have snapshots of the levels that are current now, and no other."""
    manifest = database.manifest()
    pinned = [database.manifest(each.manifest_id) for each in manifest.snapshots]
    return [each.leveled_ssts for each in pinned] == [manifest.leveled_ssts] * 2


def _wait(is_true: Callable[[], bool]) -> None:
    never = threading.Event()
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        never.wait(POLL_S)


def _key(number: int) -> bytes:
    return b"k%03d" % number


def _value(number: int, version: int) -> bytes:
    return b"%d/%d" % (number, version) * 100
