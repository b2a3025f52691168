"""A database with deep levels and a tail of log, made in seconds: for reads that begin cold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shalekv.format.columns import Columns, Section
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import manifest_name
from shalekv.jobs.compact.outputs import LevelWriter, OutputOwner
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.entry import Kind
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.runtime import Runtime
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import MIB, LevelSettings, WriterConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2

KEY_BYTES = 16
POOL_BYTES = 4 * MIB
ROWS_AT_ONCE = 1_000
PARTS = ((0, 256), (0, 256), (0, 256), (1, 64), (2, 8), (3, 1))  # level, of the size of the lowest
DATABASE_ID = bytes(range(16))
CALL = Call()


@dataclass(frozen=True, slots=True)
class ColdDatabase:
    """The contents of the database."""

    infos: Sequence[SstInfo]
    keys: int  # key n is `key_of(n)`
    value_bytes: int
    tail: int  # keys, and objects of the log

    @property
    def level_bytes(self) -> int:
        return sum(info.size_bytes for info in self.infos)

    def newest_seq(self, number: int) -> int:
        """Sequence number of the newest version of key `number`, with which its value begins."""
        parts = [part for _, part in reversed(PARTS)]
        return max(seq for seq, part in enumerate(parts, 1) if number % part == 0)

    def sources_of(self, key: bytes) -> list[SstInfo]:
        return [info for info in self.infos if info.first_key <= key <= info.last_key]


def key_of(number: int) -> bytes:
    """Spread over the whole key space, and ascending: every level has keys everywhere."""
    return b"%0*d" % (KEY_BYTES, 2 * number)


async def write_cold_database(
    store: ObjectStore,
    runtime: Runtime,
    settings: WriterConfig,
    *,
    total_bytes: int,
    value_bytes: int,
    tail: int = 5,
) -> ColdDatabase:
    """Write levels of about this size, incompressible, and puts that are not merged yet."""
    cas = CasStore(store, runtime, settings.store)
    lease_id = new_lease_id(1, bytes(RANDOM_BYTES))
    owner = OutputOwner(DATABASE_ID, CompactorId(1, bytes(16)), lease_id, 1)
    writer = LevelWriter(cas, owner, settings.levels, TokenBucket(runtime.clock, 0))
    lowest_bytes = total_bytes / sum(1 / part for _, part in PARTS)
    keys = int(lowest_bytes) // (KEY_BYTES + value_bytes)
    infos: list[SstInfo] = []
    for seq, (level, part) in enumerate(reversed(PARTS), 1):
        infos += await _run(writer, settings.levels, level, seq, range(0, keys, part), value_bytes)
    manifest = Manifest(
        database_id=DATABASE_ID,
        manifest_id=0,
        write_id=bytes(16),
        wal_id_last_compacted=99,
        last_compacted_seq=len(PARTS),
        leveled_ssts=SstTable.from_infos(reversed(infos)),
    )
    await store.create(manifest_name(0), encode_manifest(manifest))
    await _put(await Writer.open(store, settings=settings, runtime=runtime), tail)
    return ColdDatabase(infos, keys, value_bytes, tail)


async def _run(
    writer: LevelWriter,
    settings: LevelSettings,
    level: int,
    seq: int,
    numbers: range,
    value_bytes: int,
) -> list[SstInfo]:
    """A sorted run of values that begin with their sequence number."""
    pool, random = os.urandom(POOL_BYTES), Random(seq)
    infos, sst = [], writer.begin()
    for first in range(0, len(numbers), ROWS_AT_ONCE):
        keys = [key_of(number) for number in numbers[first : first + ROWS_AT_ONCE]]
        count = len(keys)
        starts = [random.randrange(POOL_BYTES - value_bytes) for _ in keys]
        values = [b"%d" % seq + pool[start : start + value_bytes - 1] for start in starts]
        rows = Columns(keys, [seq] * count, bytes((Kind.PUT,)) * count, values, [0] * count)
        sst.add(Section.POINTS, rows)
        if sst.size_bytes >= settings.sst_bytes:
            infos.append(await writer.create(sst, level))
            sst = writer.begin()
    if sst.size_bytes:
        infos.append(await writer.create(sst, level))
    return infos


async def _put(writer: Writer, count: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writer.run())
        for number in range(count):
            request = kv_pb2.PutRequest(key=b"tail%d" % number, value=b"%d" % number)
            answer = writer.kv.put(request, CALL)
            if not isinstance(answer, kv_pb2.PutReply):
                await answer
        writer.close()
        await running
    await writer.release()
