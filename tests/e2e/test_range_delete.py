"""Deleting a million keys costs what a put costs, at once and after a restart."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.kit.processes.wal_contents import wal_ids, wal_path

KEYS = 1_000_000
BATCH = 10_000
SAMPLE = range(0, KEYS, 99_991)
AFTER = 12_345  # put again after the deletion


def key(number: int) -> bytes:
    """A key of the range, in order of its number."""
    return b"many/%07d" % number


async def load(kv: kv_pb2_grpc.KVStub) -> None:
    """Put all keys, and one on either side of them."""
    for first in range(0, KEYS, BATCH):
        changes = [
            kv_pb2.Change(put=kv_pb2.PutChange(key=key(number), value=b"v"))
            for number in range(first, first + BATCH)
        ]
        await kv.Write(kv_pb2.WriteRequest(changes=changes))
    for beside in (b"many", b"many0"):
        await kv.Put(kv_pb2.PutRequest(key=beside, value=b"beside"))


async def scan(kv: kv_pb2_grpc.KVStub, *, reverse: bool = False) -> list[bytes]:
    """All keys that there are."""
    request = kv_pb2.ScanRequest(reverse=reverse, keys_only=True)
    return [entry.key async for reply in kv.Scan(request) for entry in reply.entries]


async def expect_deleted(kv: kv_pb2_grpc.KVStub) -> None:
    """Gets and scans see what was put after the deletion, and what stands beside it."""
    left = [b"many", key(AFTER), b"many0"]
    began_s = time.monotonic()
    assert await scan(kv) == left
    assert await scan(kv, reverse=True) == left[::-1]
    sys.stdout.write(f"two scans: {(time.monotonic() - began_s) * 1000:.1f} ms\n")
    reply = await kv.BatchGet(kv_pb2.BatchGetRequest(keys=[key(number) for number in SAMPLE]))
    assert not any(result.found for result in reply.results)
    assert (await kv.Get(kv_pb2.GetRequest(key=key(AFTER)))).value == b"again"


async def test_a_million_keys(processes: Processes, tmp_path: Path) -> None:
    """A range delete over a million keys is one small object; what it deleted is gone for gets and
    scans, also after a restart, and what is put afterwards is there.
    """
    folder = tmp_path / "db"
    # The memtable has no room for all keys: what waits for the compactor is not to be refused.
    server = await processes.serve(f"file://{folder}", "--queue-wait-ms", "120000")
    async with kv_stub(server.listen) as kv:
        await load(kv)
        began_s = time.monotonic()
        single = await kv.Put(kv_pb2.PutRequest(key=b"one", value=b"v"))
        put_s = time.monotonic()
        deleted = await kv.DeleteRange(
            kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"many/"))
        )
        deleted_s = time.monotonic()
        sys.stdout.write(
            f"a put took {(put_s - began_s) * 1000:.1f} ms, the deletion of {KEYS} keys "
            f"{(deleted_s - put_s) * 1000:.1f} ms\n"
        )
        sizes = [
            wal_path(folder, reply.header.wal_id).stat().st_size for reply in (single, deleted)
        ]
        assert sizes[1] - sizes[0] < 100
        await kv.Delete(kv_pb2.DeleteRequest(key=b"one"))
        await kv.Put(kv_pb2.PutRequest(key=key(AFTER), value=b"again"))
        await expect_deleted(kv)
    assert await server.stop() == 0, server.report()
    server = await processes.serve(f"file://{folder}", within_s=120)
    async with kv_stub(server.listen) as kv:
        await expect_deleted(kv)
    sys.stdout.write(f"{len(wal_ids(folder))} objects replayed\n")
    assert await server.stop() == 0, server.report()
