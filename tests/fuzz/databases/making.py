"""Small databases with every kind of object, made by the roles that are shipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from shalekv.roles.compactor import Compactor
from shalekv.roles.writer import Writer
from shalekv.settings import (
    CompactorSettings,
    CompactSettings,
    LevelCodec,
    LevelSettings,
    UrlSettings,
)
from shalekv.store.api import ObjectInfo, ObjectStore, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.backups import Place, back_up
from tests.kit.household import CALL, Household, running
from tests.kit.processes.in_process import real_runtime

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
KIB = 1024
LOAD_BYTES = 64 * KIB  # of a batch that becomes an SST at once; it is compressed to little
ONCE = kv_pb2.PutRequest(
    header=kv_pb2.RequestHeader(idempotency_key=b"compacted"), key=b"once", value=b"and no more"
)
AGAIN = kv_pb2.PutRequest(
    header=kv_pb2.RequestHeader(idempotency_key=b"in the log"), key=b"once more", value=b"likewise"
)


class StillPlace(Place):
    """A place where the store's clock stands still."""

    def store(self) -> ObjectStore:
        """One more view of the objects."""
        return MemoryStore(lambda: NOW_MS, objects=self.objects)

    def add(self, name: str, data: bytes) -> None:
        """Put an object there."""
        self.objects.add(StoredObject(ObjectInfo(name, len(data), NOW_MS), data))

    def copy(self) -> StillPlace:
        """Another place with the same objects."""
        copied = MemoryObjects()
        for name in self.names():
            copied.add(self._find(name))
        return StillPlace(copied)


@dataclass(frozen=True, slots=True)
class Made:
    """A database, a backup of an earlier state of it, and what is known of both."""

    place: StillPlace
    backups: StillPlace
    snapshot_ids: tuple[bytes, ...]


@asynccontextmanager
async def roles_at(place: Place, seed: int) -> AsyncIterator[Household]:
    """The roles of the database there, which draw from this seed."""
    with real_runtime(seed=seed, threads=1) as runtime:
        roles = Household(place.store, runtime, tick_ms=0)
        yield roles
        await roles.close()


async def made() -> Made:
    """The database. The last writer is gone in the middle of it all."""
    place, backups = StillPlace(), StillPlace()
    async with roles_at(place, 1) as roles:
        await roles.create()
        async with roles.writing(wal_codec="zstd") as writer:
            await fill(writer, b"low", 12)
            await call(writer.kv.put, ONCE)
        await compact(roles, LevelCodec.NONE)
    async with roles_at(place, 2) as roles:
        async with roles.writing(wal_codec="lz4") as writer:
            await fill(writer, b"mid", 12)
            await delete_range(writer, b"low03", b"low06")
        await compact(roles, LevelCodec.ZSTD)
    async with roles_at(place, 3) as roles:
        async with roles.writing() as writer:
            await fill(writer, b"mid", 4)
            await delete_range(writer, b"mid10", b"")
        await compact(roles, LevelCodec.LZ4, l0_trigger_count=9)
        async with roles.writing() as writer:
            kept = await snapshot(writer, "kept")
            await call(writer.kv.put, kv_pb2.PutRequest(key=b"low00", value=b"after the snapshot"))
            logged = await snapshot(writer, "with a log")
    await back_up(place, backups)
    async with roles_at(place, 4) as roles:
        writer = await roles.open_writer(skip_memtable_bytes=LOAD_BYTES)
        async with running(writer):
            await last_writes(writer)
    return Made(place, backups, (kept, logged))


async def last_writes(writer: Writer) -> None:
    """What stays in the log: commits of every kind, and a load."""
    await call(writer.kv.put, AGAIN)
    await call(writer.kv.put, kv_pb2.PutRequest(key=b"ttl", value=b"an hour", ttl_ms=HOUR_MS))
    await call(writer.kv.delete, kv_pb2.DeleteRequest(key=b"low01"))
    await delete_range(writer, b"mid00", b"mid02")
    batch = kv_pb2.WriteRequest()
    for number in range(16):
        put = kv_pb2.PutChange(key=b"load%02d" % number, value=b"%d, " % number * 1_500)
        batch.changes.add().put.MergeFrom(put)
    await call(writer.kv.write, batch)
    await call(writer.kv.put, kv_pb2.PutRequest(key=b"load03", value=b"after the load"))


async def fill(writer: Writer, prefix: bytes, count: int) -> None:
    """Puts, some of which expire, and a tombstone, in a few commits."""
    random = Random(prefix)
    batch = kv_pb2.WriteRequest()
    for number in range(count):
        value = b"value %d of " % number + random.randbytes(3).hex().encode() * 3
        put = kv_pb2.PutChange(key=prefix + b"%02d" % number, value=value)
        put.ttl_ms = HOUR_MS if number % 5 == 4 else 0
        batch.changes.add().put.MergeFrom(put)
    await call(writer.kv.write, batch)
    await call(writer.kv.put, kv_pb2.PutRequest(key=prefix + b"00", value=b"again"))
    await call(writer.kv.delete, kv_pb2.DeleteRequest(key=prefix + b"07"))


async def delete_range(writer: Writer, start: bytes, end: bytes) -> None:
    """A commit with a range tombstone."""
    request = kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=start, end=end))
    await call(writer.kv.delete_range, request)


async def snapshot(writer: Writer, name: str) -> bytes:
    """A snapshot that never expires; its id."""
    request = admin_pb2.CreateSnapshotRequest(name=name, forever=True)
    reply = await call(writer.admin.snapshots.create, request)
    found: bytes = reply.snapshot.id
    return found


async def compact(roles: Household, codec: LevelCodec, *, l0_trigger_count: int = 1) -> None:
    """Merge what there is into SSTs with this codec."""
    levels = LevelSettings(sst_bytes=64 * KIB, block_bytes=KIB, codec=codec, filter_bits=10)
    settings = CompactSettings(
        database=UrlSettings(url="memory://unused"),
        levels=levels,
        compactor=CompactorSettings(
            wal_trigger_count=1,
            wal_trigger_age_ms=0,
            l0_trigger_count=l0_trigger_count,
            base_level_bytes=64 * KIB,
        ),
    )
    hurry = asyncio.Event()
    compactor = await Compactor.open(
        roles.store(), settings=settings, runtime=roles.runtime, hurry=hurry
    )
    await compactor.run(is_once=True)
    await compactor.close()


async def call(method: Any, request: Any) -> Any:
    """The reply of a method of a role."""
    answer = method(request, CALL)
    return await answer if asyncio.iscoroutine(answer) or hasattr(answer, "__await__") else answer
