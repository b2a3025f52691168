"""Replay of what stands beside puts and tombstones: range deletes and idempotency records."""

from __future__ import annotations

import pytest

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Add, DeleteRange, Operation, Put, Transaction
from shalekv.engine.commit import Claim, Commit, WalContents
from shalekv.engine.idempotency import Remembered
from shalekv.engine.opened_log import OpenedLog
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import IllegalState, KeyExpired, UnsupportedVersion
from shalekv.format import names
from shalekv.format.idempotency import (
    IdempotencyRecord,
    ReplyKind,
    encode_record,
    record_key,
)
from shalekv.settings import WriterSettings
from tests.kit.engine.commits import put, unsettled
from tests.kit.engine.databases import Database, contents
from tests.kit.states import DictState
from tests.kit.store import STORE_NOW_MS

HASH = b"h" * 16
EXPIRE_AT_MS = STORE_NOW_MS + 1_000


def commit(
    seq: int, *operations: Operation, key: bytes = b"", request_hash: bytes = HASH
) -> Commit:
    """A commit that does these operations, some for a request with an idempotency key."""
    reply = b"reply %d" % seq
    claim = Claim(key, request_hash, EXPIRE_AT_MS, ReplyKind.WRITE, lambda _: reply)
    transaction = Transaction(operations)
    made = Commit.of(transaction, seq, unsettled, size_bytes=0, claim=claim if key else None)
    made.decide(DictState(now_ms=STORE_NOW_MS))
    return made


def delete_range(start: bytes, end: bytes) -> DeleteRange:
    """An operation that deletes a range."""
    return DeleteRange(KeyRange(start, end))


def engine_of(opened: OpenedLog, window_s: int = 86_400) -> WriterEngine:
    """The engine of an opening; it does not run."""
    settings = WriterSettings(flush_interval_ms=0, idempotency_window_s=window_s)
    return WriterEngine(opened, settings, LoopClock())


async def test_many_objects_with_range_deletes_are_merged_as_they_are_read() -> None:
    """What was deleted early is not in memory at the end of a long replay."""
    database = await Database.created()
    own = (await database.open()).manifest.own
    for number in range(1, 100):
        key = b"%03d" % number
        operations = [Put(key, b"v")]
        if number % 10 == 0:
            await database.fill_with(
                number, own, commit(number, delete_range(b"", key), Put(key, b"v"))
            )
        else:
            await database.fill_with(number, own, commit(number, *operations))
    opened = await database.open()
    expected = [(b"%03d" % number, b"v") for number in range(90, 100)]
    assert contents(opened) == expected
    assert opened.memtable.key_count < 30


async def test_records_are_replayed_and_answer_repeats() -> None:
    """The next writer knows number, object and reply of each request (I15)."""
    database = await Database.created()
    own = (await database.open()).manifest.own
    await database.fill_with(
        1, own, commit(1, Add(b"n", 1), key=b"z"), commit(2, Add(b"n", 1), key=b"a")
    )
    await database.fill_with(2, own, commit(3, delete_range(b"a", b"b"), key=b"k"))
    opened = await database.open()
    assert [entry.seq for entry in opened.records] == [1, 2, 3]
    idempotency = engine_of(opened).idempotency
    for key, seq, wal_id in ((b"z", 1, 1), (b"a", 2, 1), (b"k", 3, 2)):
        record = IdempotencyRecord(HASH, wal_id, ReplyKind.WRITE, b"reply %d" % seq)
        assert idempotency.find(key, HASH) == Remembered(seq, record)
    assert idempotency.find(b"new", HASH) is None


async def test_record_that_expired_while_nobody_served_has_expired() -> None:
    """Time goes on for idempotency keys when no writer runs."""
    database = await Database.created()
    own = (await database.open()).manifest.own
    claim = Claim(b"k", HASH, STORE_NOW_MS, ReplyKind.WRITE, lambda _: b"")
    made = Commit([put(b"a")], 1, unsettled, claim=claim)
    await database.fill_with(1, own, made)
    idempotency = engine_of(await database.open()).idempotency
    with pytest.raises(KeyExpired):
        idempotency.find(b"k", HASH)


async def test_records_count_as_memory() -> None:
    """What the engine holds, and lets writes in by, has the records in it."""
    database = await Database.created()
    own = (await database.open()).manifest.own
    await database.fill_with(1, own, commit(1, Put(b"a", b""), key=b"k"))
    engine = engine_of(await database.open())
    assert engine.idempotency.size_bytes > 0
    assert engine.memory_bytes == engine.memtable.size_bytes + engine.idempotency.size_bytes


async def test_numbers_of_records_are_in_the_order_of_slots() -> None:
    """A record that is older than the slot before it is as illegal as a put (I4)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, first.manifest.own, 5, put(b"a"))
    value = encode_record(IdempotencyRecord(HASH, 2, ReplyKind.WRITE, b""))
    records = [Entry(record_key(b"k"), 4, Kind.PUT, value, EXPIRE_AT_MS)]
    points = [Entry(b"b", 6, Kind.PUT)]
    assert await first.slots.create(2, WalContents(points, (), records), position=0) is None
    with pytest.raises(IllegalState, match=names.wal_name(2)):
        await database.open()


async def test_record_of_a_later_version_is_refused() -> None:
    """A record that cannot be read could not answer its repeat: the object is named (I12)."""
    database = await Database.created()
    first = await database.open()
    value = bytearray(encode_record(IdempotencyRecord(HASH, 1, ReplyKind.WRITE, b"")))
    value[24] = 200  # the kind of the reply
    records = [Entry(record_key(b"k"), 1, Kind.PUT, bytes(value), EXPIRE_AT_MS)]
    points = [Entry(b"a", 1, Kind.PUT)]
    assert await first.slots.create(1, WalContents(points, (), records), position=0) is None
    with pytest.raises(UnsupportedVersion, match=names.wal_name(1)):
        await database.open()
