"""Opening a large database: 10 GiB in 10,000 SSTs, of which only those exist that are read."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from random import Random

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry, Kind
from shalekv.core.lease import leased_sst_id
from shalekv.core.manifest import Manifest
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.format.footer import SstProperties
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import level_name, manifest_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import DatabaseSettings, ServeSettings
from shalekv.store.api import StoredObject
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.memory import MemoryStore
from shalekv.v1 import kv_pb2

SSTS = 10_000
SST_BYTES = 1 << 20
ENTRIES = 8
DATABASE_ID = bytes(range(16))
LEASE_ID = bytes.fromhex("0198c0de00007000") + bytes([0x80] * 8)
READ_SSTS = 20
REQUESTS_MAX = 100
CALL = Call()


def key_of(sst: int, row: int) -> bytes:
    """Keys ascend from SST to SST."""
    return b"%08d/%02d" % (sst, row)


def sst_bytes(number: int) -> bytes:
    """SST `number` of L1, about a MiB."""
    properties = SstProperties(
        name=level_name(sst_id(number)),
        database_id=DATABASE_ID,
        writer_epoch=1,
        writer_nonce=bytes(16),
        write_id=bytes(16),
    )
    value = bytes(SST_BYTES // ENTRIES)
    rows = [Entry(key_of(number, row), 1, Kind.PUT, value) for row in range(ENTRIES)]
    return encode_sst(properties, rows, block_bytes=16_384, filter_bits_per_key=10)


def sst_id(number: int) -> bytes:
    """Its id."""
    return leased_sst_id(LEASE_ID, number.to_bytes(8, "big"))


def infos(real: dict[int, SstInfo]) -> list[SstInfo]:
    """All of them: those that are not `real` differ from one that is in what tells them apart."""
    model = next(iter(real.values()))
    return [
        real.get(number)
        or replace(
            model,
            id=sst_id(number),
            first_key=key_of(number, 0),
            last_key=key_of(number, ENTRIES - 1),
            checksum=number,
        )
        for number in range(SSTS)
    ]


class LazyStore(MemoryStore):
    """Makes an SST of the levels when it is read."""

    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__(lambda: int(time.time() * 1_000))
        self._numbers = numbers

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        if name not in self._numbers:
            return await super().get_range(name, offset, length)
        return sst_bytes(self._numbers[name])[offset : offset + length]

    async def get(self, name: str) -> StoredObject:
        assert name not in self._numbers, f"{name} is read whole"
        return await super().get(name)


async def test_large_database_opens_with_few_requests() -> None:
    """10 GiB in 10,000 SSTs: nothing of the levels is read to open, and little for each get."""
    chosen = Random(7).sample(range(SSTS), READ_SSTS)
    real = {
        number: open_sst(
            level_name(sst_id(number)), sst_bytes(number), database_id=DATABASE_ID
        ).footer.info(1)
        for number in chosen
    }
    table = SstTable.from_infos(infos(real))
    manifest = Manifest(
        database_id=DATABASE_ID,
        manifest_id=0,
        write_id=bytes(16),
        wal_id_last_compacted=99,
        last_compacted_seq=1,
        leveled_ssts=table,
    )
    store = LazyStore({level_name(sst_id(number)): number for number in chosen})
    await store.create(manifest_name(0), encode_manifest(manifest))
    counting = CountingStore(store)
    workers = ThreadWorkers(2)
    runtime = Runtime(clock=LoopClock(), random=Random(1), workers=workers)
    settings = ServeSettings(database=DatabaseSettings(url="memory://large"))
    began_s = time.perf_counter()
    writer = await Writer.open(counting, settings=settings, runtime=runtime)
    opened_s = time.perf_counter() - began_s
    requests = sum(count.requests for count in counting.counts.values())
    total_bytes = sum(info.size_bytes for info in table)
    figures = f"{total_bytes / 2**30:.1f} GiB opened in {opened_s:.2f} s, {requests} requests"
    print(figures)  # noqa: T201 - a figure
    assert requests <= REQUESTS_MAX
    assert counting.counts[Operation.GET_RANGE].requests == 0

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writer.run())
        for number in chosen:
            request = kv_pb2.GetRequest(key=key_of(number, 3))
            answer = writer.kv.get(request, CALL)
            reply = answer if isinstance(answer, kv_pb2.GetReply) else await answer
            assert (reply.found, len(reply.value)) == (True, SST_BYTES // ENTRIES)
        writer.close()
        await running
    # Filter and index together, then one block.
    assert counting.counts[Operation.GET_RANGE].requests == 2 * READ_SSTS
    await writer.leave()
    workers.close()
