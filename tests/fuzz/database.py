"""A small database with every kind of object: how it is made, read piece by piece, and asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from shalekv.errors import CorruptObject, ShaleError
from shalekv.format.backup import decode_backup, parse_backup_name, parse_copy
from shalekv.format.election import decode_lease
from shalekv.format.footer import read_footer
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    level_name,
    manifest_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_wal_name,
)
from shalekv.format.records import decode_load
from shalekv.format.sst import metadata_range, open_sst, read_block, read_metadata
from shalekv.jobs.backup.copy import check_copy
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.audit import Finding
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.server.compactor import Compactor
from shalekv.server.writer import Writer
from shalekv.settings import (
    CompactorConfig,
    CompactorSettings,
    LevelCodec,
    LevelSettings,
)
from shalekv.store.api import ObjectInfo, ObjectStore, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.backups import Place, back_up
from tests.kit.in_process_cluster import CALL, InProcessCluster, running
from tests.kit.inline_runtime import gathered
from tests.kit.processes.in_process import real_runtime
from tests.kit.serving.answers import parsed, scan_of

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
KIB = 1024
LOAD_BYTES = 64 * KIB  # of a batch that becomes an SST at once; it compresses well
ONCE = kv_pb2.PutRequest(
    header=kv_pb2.RequestHeader(idempotency_key=b"compacted"), key=b"once", value=b"and no more"
)
AGAIN = kv_pb2.PutRequest(
    header=kv_pb2.RequestHeader(idempotency_key=b"in the log"), key=b"once more", value=b"likewise"
)


class StillPlace(Place):
    """A place whose store has a constant clock."""

    def store(self) -> ObjectStore:
        return MemoryStore(lambda: NOW_MS, objects=self.objects)

    def add(self, name: str, data: bytes) -> None:
        self.objects.add(StoredObject(ObjectInfo(name, len(data), NOW_MS), data))

    def copy(self) -> StillPlace:
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
async def roles_at(place: Place, seed: int) -> AsyncIterator[InProcessCluster]:
    """The roles of the database there, which draw from this seed."""
    with real_runtime(seed=seed, threads=1) as runtime:
        roles = InProcessCluster(place.store, runtime, tick_ms=0)
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
        writer = await roles.open_writer(direct_ingest_bytes=LOAD_BYTES)
        async with running(writer):
            await last_writes(writer)
    return Made(place, backups, (kept, logged))


async def last_writes(writer: Writer) -> None:
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
    """Write puts, some of which expire, and a tombstone, in a few commits."""
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
    request = kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=start, end=end))
    await call(writer.kv.delete_range, request)


async def snapshot(writer: Writer, name: str) -> bytes:
    request = admin_pb2.CreateSnapshotRequest(name=name, forever=True)
    reply = await call(writer.admin.snapshots.create, request)
    found: bytes = reply.snapshot.id
    return found


async def compact(roles: InProcessCluster, codec: LevelCodec, *, l0_trigger_count: int = 1) -> None:
    """Merge what there is into SSTs with this codec."""
    levels = LevelSettings(sst_bytes=64 * KIB, block_bytes=KIB, codec=codec, filter_bits=10)
    settings = CompactorConfig(
        levels=levels,
        compactor=CompactorSettings(
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
    answer = method(request, CALL)
    return parsed(request, await answer if hasattr(answer, "__await__") else answer)


Read = Callable[[bytes], object]
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Readers:
    """The readers of one database, with the contents of its manifests."""

    database_id: bytes
    rows: Mapping[str, SstInfo]  # how a manifest lists an SST; of one that none lists, the footer

    @classmethod
    def of(cls, place: Place, manifest: Manifest) -> Readers:
        rows: dict[str, SstInfo] = {}
        for name in place.names():
            data = place.data(name)
            if parse_level_name(name) is not None:
                footer = read_footer(name, data, len(data), database_id=None)
                rows[name] = footer.info(0)
        for info in all_rows(manifest):
            rows[level_name(info.id)] = info
        return cls(manifest.database_id, rows)

    def read(self, name: str, data: bytes) -> object:
        """Return the contents of an object, or `REFUSED`. Any error but a typed one is raised."""
        try:
            return self._read(name, data)
        except CorruptObject:
            return REFUSED

    def _read(self, name: str, data: bytes) -> object:
        if parse_manifest_name(name) is not None:
            return decode_manifest(name, data)
        if parse_wal_name(name) is not None:
            return self._wal(name, data)
        if parse_level_name(name) is not None:
            return self._level(self.rows[name], data)
        if parse_backup_name(name) is not None:
            return decode_backup(name, data)
        lease_id = parse_election_name(name)
        if lease_id is not None:
            return decode_lease(lease_id, data) or REFUSED
        copy = parse_copy(name)
        assert copy is not None, name
        return check_copy(copy, len(data), data)

    def _wal(self, name: str, data: bytes) -> object:
        sst = open_sst(name, data, database_id=self.database_id)
        sections = (sst.entries(), sst.range_tombstones(), sst.system_entries())
        loads = [decode_load(name, entry) for entry in sst.control_entries()]
        return sst.footer, [[*section] for section in sections], loads

    def _level(self, info: SstInfo, data: bytes) -> object:
        piece = data[metadata_range(info).start :]
        metadata = read_metadata(info, piece, database_id=self.database_id)
        columns = []
        for number, handle in enumerate(metadata.index):
            block = data[handle.offset : handle.offset + handle.length]
            columns.append(read_block(metadata.index, number, block).columns())
        return metadata.footer, [*metadata.index], columns


def all_rows(manifest: Manifest) -> Iterator[SstInfo]:
    """The SSTs of the levels, and those of loads that are pending."""
    yield from manifest.leveled_ssts
    for load in manifest.pending_loads:
        yield from load.ssts


def reachable(place: Place, current: Manifest) -> frozenset[str]:
    """The objects that checks read: what the current manifest and those of snapshots need."""
    manifests = [current, *(_manifest(place, each.manifest_id) for each in current.snapshots)]
    first = min(each.wal_id_last_compacted or 0 for each in manifests)
    return _needs(place, manifests, first)


def read_by(place: Place, current: Manifest, snapshot_ids: Collection[bytes]) -> frozenset[str]:
    """Return the objects that are read when the database, and these snapshots, are opened."""
    chosen = [each.manifest_id for each in current.snapshots if each.id in snapshot_ids]
    manifests = [current, *(_manifest(place, each) for each in chosen)]
    return _needs(place, manifests, min(each.first_uncompacted_wal_id for each in manifests))


def _needs(place: Place, manifests: Sequence[Manifest], first_wal_id: int) -> frozenset[str]:
    own = {manifest_name(each.manifest_id) for each in manifests}
    rows = {level_name(info.id) for each in manifests for info in all_rows(each)}
    ids = {name: parse_wal_name(name) for name in place.names()}
    wal = {name for name, wal_id in ids.items() if wal_id is not None and wal_id >= first_wal_id}
    return frozenset({*own, *rows, *wal})


def _manifest(place: Place, manifest_id: int) -> Manifest:
    name = manifest_name(manifest_id)
    return decode_manifest(name, place.data(name))


Rows = list[tuple[bytes, bytes, int, int]]  # key, value, sequence number, expiry
SEED = 77


@dataclass(frozen=True, slots=True)
class Answers:
    """Replies of a database that was opened for writing."""

    epoch: int
    first_seq: int  # the first one that the writer issues
    last_wal_id: int | None
    forwards: Rows
    by_key: Rows
    of_snapshots: tuple[Rows, ...]
    repeats: tuple[int, ...]  # the sequence numbers of commits that are asked for once more


async def answers(
    place: StillPlace, snapshot_ids: tuple[bytes, ...], *, open_timeout_ms: int = 60_000
) -> Answers:
    """Open a copy, and ask for everything. Raises what the roles raise."""
    async with roles_at(place.copy(), SEED) as roles:
        writer = await roles.open_writer(open_timeout_ms=open_timeout_ms, fence_poll_ms=1_000)
        async with running(writer) as serving:
            engine = writer.engine
            found = Answers(
                epoch=writer.epoch,
                first_seq=engine.manifest.current.writer_first_seq,
                last_wal_id=engine.watermark.wal_id,
                forwards=await scanned(writer),
                by_key=await one_by_one(writer),
                of_snapshots=tuple([await scanned(writer, each) for each in snapshot_ids]),
                repeats=tuple([(await call(writer.kv.put, r)).header.seq for r in (ONCE, AGAIN)]),
            )
            writer.close()
            await serving
    return found


async def scanned(writer: Writer, snapshot_id: bytes = b"") -> Rows:
    """All entries, which are the same in both directions."""
    header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
    both: list[Rows] = []
    for reverse in (False, True):
        request = kv_pb2.ScanRequest(header=header, reverse=reverse)
        rows: Rows = []
        async for reply in scan_of(writer.kv, request, CALL):
            rows += [(e.key, e.value, e.seq, e.expire_at_ms) for e in reply.entries]
        both.append(rows)
    forwards, backwards = both
    assert backwards == forwards[::-1]
    return forwards


async def one_by_one(writer: Writer) -> Rows:
    """Every key that was ever written, by a get."""
    names = [b"%s%02d" % (kind, n) for kind in (b"low", b"mid", b"load") for n in range(16)]
    rows: Rows = []
    for key in (*names, b"once", b"once more", b"ttl"):
        reply = await call(writer.kv.get, kv_pb2.GetRequest(key=key))
        if reply.found:
            rows.append((key, reply.value, reply.seq, reply.expire_at_ms))
    return rows


async def judged(
    place: StillPlace, snapshot_ids: tuple[bytes, ...], **limits: int
) -> Answers | ShaleError:
    """Return the answers, or the documented error."""
    try:
        return await answers(place, snapshot_ids, **limits)
    except ShaleError as error:
        return error


async def damage(place: StillPlace) -> list[Finding]:
    found = await gathered(Fsck(place.cas(), is_deep=True).findings())
    return [each for each in found if each.kind.is_damage]
