"""A scan far larger than the memory of its server, taken slowly: nothing piles up (back-pressure).

The server reads no further ahead than what its client takes, so that its memory stays as it is.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from shalekv.format.sst_message import info_message
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import GIB, MIB
from shalekv.v1 import admin_pb2, kv_pb2, kv_pb2_grpc
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.process_memory import most_resident_bytes, resident_bytes
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import admin_stub, kv_stub
from tests.kit.uuids import new_uuid7

GROWTH_BYTES_MAX = 64 * MIB
SLOW_BYTES_PER_S = 1_000_000
VALUE_BYTES = 64 * 1_024
FILE_BYTES = 32 * MIB
CALL_S = 600.0


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a scan, and the time for which it is slow."""

    total_bytes: int
    slow_s: float

    @property
    def count(self) -> int:
        return self.total_bytes // VALUE_BYTES


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(96 * MIB, slow_s=2.0), id="96 MiB"),
        pytest.param(Size(1 * GIB, slow_s=20.0), id="1 GiB", marks=pytest.mark.soak),
    ],
)
async def test_scans_to_a_slow_client(processes: Processes, tmp_path: Path, size: Size) -> None:
    """With scans of the newest state and of a snapshot at once, slow at first and then at full
    speed, memory grows by less than 64 MiB.
    """
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE)
    await ingest(database, server.listen, size)
    async with kv_stub(server.listen) as stub, admin_stub(server.listen) as admin:
        request = admin_pb2.CreateSnapshotRequest(ttl_s=3_600)
        made = await admin.CreateSnapshot(request, timeout=CALL_S)
        first_bytes = resident_bytes(server.pid)
        headers = (kv_pb2.RequestHeader(), kv_pb2.RequestHeader(snapshot_id=made.snapshot.id))
        await asyncio.gather(*(take(stub, header, size) for header in headers))
        most_bytes = most_resident_bytes(server.pid)
        sys.stdout.write(
            f"\n{size.total_bytes >> 20} MiB twice: {first_bytes >> 20} MiB of memory at first, "
            f"{most_bytes >> 20} MiB at most\n"
        )
        assert most_bytes - first_bytes < GROWTH_BYTES_MAX
    assert await server.stop() == 0, server.report()


async def take(stub: kv_pb2_grpc.KVStub, header: kv_pb2.RequestHeader, size: Size) -> None:
    """All of a scan, in order: a megabyte a second at first."""
    began_s = time.monotonic()
    number = taken_bytes = 0
    request = kv_pb2.ScanRequest(header=header, resumable=True)
    async for reply in stub.Scan(request, timeout=CALL_S):
        for entry in reply.entries:
            assert entry.key == key_of(number), number
            assert len(entry.value) == VALUE_BYTES
            number += 1
            taken_bytes += VALUE_BYTES
        now_s = time.monotonic() - began_s
        if now_s < size.slow_s:
            await asyncio.sleep(max(taken_bytes / SLOW_BYTES_PER_S - now_s, 0))
    assert number == size.count


def key_of(number: int) -> bytes:
    return b"key%08d" % number


async def ingest(database: Cluster, address: str, size: Size) -> None:
    """Make prepared files one commit of the levels."""
    random = Random(1)
    per_file = FILE_BYTES // VALUE_BYTES
    infos = [
        await asyncio.to_thread(
            file_in, database, range(first, min(first + per_file, size.count)), random
        )
        for first in range(0, size.count, per_file)
    ]
    request = admin_pb2.IngestSstRequest(load_id="all", ssts=map(info_message, infos))
    async with admin_stub(address) as admin:
        await admin.IngestSst(request, timeout=CALL_S)


def file_in(database: Cluster, numbers: range, random: Random) -> SstInfo:
    value = random.randbytes(VALUE_BYTES)
    entries = [Entry(key_of(number), 0, Kind.PUT, value) for number in numbers]
    return database.add_file(new_uuid7(), entries, block_bytes=4_096)
