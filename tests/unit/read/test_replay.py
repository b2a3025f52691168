"""Replay applies every object in order, or raises an error that names the wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import (
    CorruptObject,
    IllegalState,
    ObjectNotFound,
    UnsupportedVersion,
)
from shalekv.format import names
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
    record_key,
)
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, replay
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.commit import WalContents
from shalekv.write.engine import WriterEngine
from tests.kit.constants import constants
from tests.kit.engine.commits import put, tombstone
from tests.kit.engine.databases import Database, contents
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.store import STORE_NOW_MS


@pytest.mark.parametrize("parallel_reads", [1, 2, 3, 64])
async def test_many_objects_are_replayed_into_few_runs(parallel_reads: int) -> None:
    """Replay is complete and merged, however many objects there are and are read ahead."""
    database = await Database.created()
    first = await database.open()
    for number in range(1, 200):
        change = put(b"%03d" % (number % 150), b"%d" % number)
        await database.fill(number, first.manifest.own, number, change)
    with constants({"shalekv.write.recovery:REPLAY_PARALLEL_READS": parallel_reads}):
        second = await database.open()
    last = {b"%03d" % (number % 150): b"%d" % number for number in range(1, 200)}
    assert contents(second) == sorted(last.items())
    assert second.objects_replayed == 200
    assert second.memtable.run_count < 30


async def test_slots_out_of_order_are_illegal() -> None:
    """An order of slots that is not the order of sequence numbers is refused (I4)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, first.manifest.own, 5, put(b"a"))
    await database.fill(2, first.manifest.own, 5, put(b"b"))
    with pytest.raises(IllegalState, match=f"{names.wal_name(2)} begins with sequence number 5"):
        await database.open()


async def test_first_error_in_slot_order_is_reported() -> None:
    """If several objects are damaged, the first is named, in whatever order the reads return."""
    database = await four_objects()
    for wal_id in (1, 3):
        await database.overwrite(names.wal_name(wal_id), b"rubbish")
    with pytest.raises(CorruptObject, match=names.wal_name(1)):
        await database.open()


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
async def test_missing_object_is_reported(missing: int) -> None:
    """An empty slot among filled ones is not the end of the log: later ones would be lost (I1)."""
    database = await four_objects()
    if missing == 3:  # the last one is missed only if the manifest says that it was there
        await database.edit(lambda m: replace(m, wal_id_last_seen=3))
    await database.remove(names.wal_name(missing))
    before = await database.wal()
    with pytest.raises(IllegalState, match=f"{names.wal_name(missing)} is missing"):
        await database.open()
    assert await database.wal() == before


async def test_object_that_vanishes_during_the_replay_is_reported() -> None:
    """An object that was listed and cannot be read raises the error of the store."""
    database = await four_objects()
    manifest = await database.manifest()
    await database.remove(names.wal_name(2))
    replayed = Replayed(Memtable(), last_seq=0, logical_time_ms=0)
    with pytest.raises(ObjectNotFound, match=names.wal_name(2)):
        await replay(
            CasStore(database.store, yielding_runtime(), StoreSettings()),
            range(4),
            database_id=manifest.database_id,
            replayed=replayed,
            parallel_reads=2,
        )
    assert replayed.objects == 2


async def four_objects(seed: int = 0) -> Database:
    """Return a database with a fence and three objects of its first writer."""
    database = await Database.created(seed)
    first = await database.open()
    await database.fill(1, first.manifest.own, 1, put(b"a", b"1" * 20), put(b"b", b"1"))
    await database.fill(2, first.manifest.own, 2, put(b"b", b"2"), tombstone(b"c"))
    await database.fill(3, first.manifest.own, 7, put(b"a", b"7"))
    return database


HASH = b"h" * 16
EXPIRE_AT_MS = STORE_NOW_MS + 1_000


async def test_records_count_as_memory() -> None:
    """The memory of the engine, by which it admits writes, includes the records."""
    database = await Database.created()
    first = await database.open()
    value = encode_idempotency_record(IdempotencyRecord(HASH, 1, ReplyKind.WRITE, b""))
    records = [Entry(record_key(b"k"), 1, Kind.PUT, value, EXPIRE_AT_MS)]
    contents = WalContents([Entry(b"a", 1, Kind.PUT)], (), records)
    assert await first.wal.create(1, contents, position=0) is None
    engine = WriterEngine(await database.open(), WriterSettings(), LoopClock())
    assert engine.idempotency.size_bytes > 0
    assert engine.memory_bytes == engine.memtable.size_bytes + engine.idempotency.size_bytes


async def test_numbers_of_records_are_in_the_order_of_slots() -> None:
    """A record that is older than the slot before it is as illegal as a put (I4)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, first.manifest.own, 5, put(b"a"))
    value = encode_idempotency_record(IdempotencyRecord(HASH, 2, ReplyKind.WRITE, b""))
    records = [Entry(record_key(b"k"), 4, Kind.PUT, value, EXPIRE_AT_MS)]
    points = [Entry(b"b", 6, Kind.PUT)]
    assert await first.wal.create(2, WalContents(points, (), records), position=0) is None
    with pytest.raises(IllegalState, match=names.wal_name(2)):
        await database.open()


async def test_record_of_a_later_version_is_refused() -> None:
    """A record that cannot be decoded is refused, naming its object: its repeat needs it (I12)."""
    database = await Database.created()
    first = await database.open()
    value = bytearray(encode_idempotency_record(IdempotencyRecord(HASH, 1, ReplyKind.WRITE, b"")))
    value[24] = 200  # the kind of the reply
    records = [Entry(record_key(b"k"), 1, Kind.PUT, bytes(value), EXPIRE_AT_MS)]
    points = [Entry(b"a", 1, Kind.PUT)]
    assert await first.wal.create(1, WalContents(points, (), records), position=0) is None
    with pytest.raises(UnsupportedVersion, match=names.wal_name(1)):
        await database.open()
