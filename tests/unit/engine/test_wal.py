"""WAL slots: what is written into one, whose it is, and which are filled."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.fencing import Occupant
from shalekv.engine.commit import WalContents
from shalekv.engine.wal import (
    ENCODE_INLINE_BYTES,
    ENCODE_INLINE_COUNT,
    WalFolder,
    WalSlots,
    list_wal,
)
from shalekv.errors import WrongObject
from shalekv.format import names
from shalekv.format.idempotency import IdempotencyRecord, ReplyKind, encode_record, record_key
from shalekv.format.sst import open_sst
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.commits import nothing_compacted
from tests.kit.engine.running_log import (
    DATABASE_ID,
    LOGICAL_TIME_MS,
    OLDER,
    OWN,
    YieldingClock,
    slots_on,
)
from tests.kit.inline_runtime import InlineWorkers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class CountingWorkers(InlineWorkers):
    """Counts what is handed to workers."""

    def __init__(self) -> None:
        self.jobs = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``."""
        self.jobs += 1
        return await super().run(function, *args)


def entries_of(count: int, value_bytes: int = 0) -> list[Entry]:
    """Some entries in order."""
    return [Entry(b"%06d" % number, 7, Kind.PUT, b"v" * value_bytes) for number in range(count)]


async def test_object_says_whose_it_is() -> None:
    """A slot that is ours holds our epoch, nonce, logical time and entries, and a write id."""
    store = MemoryStore(lambda: 0)
    assert await slots_on(store, OWN).create(3, WalContents(entries_of(2))) is None
    stored = await store.get(names.wal_name(3))
    assert stored.metadata == {"writer_epoch": "5"}
    sst = open_sst(names.wal_name(3), stored.data, database_id=DATABASE_ID)
    assert (sst.properties.writer_epoch, sst.properties.writer_nonce) == (OWN.epoch, OWN.nonce)
    assert sst.properties.logical_time_ms == LOGICAL_TIME_MS
    assert len(set(sst.properties.write_id)) > 1
    assert list(sst.entries()) == entries_of(2)


async def test_parts_of_an_object_stand_beside_each_other() -> None:
    """Range tombstones and records are in it with the rest; without puts it is no fence."""
    store = MemoryStore(lambda: 0)
    ranges = [Entry(b"a", 7, Kind.RANGE_TOMBSTONE, b"c"), Entry(b"m", 6, Kind.RANGE_TOMBSTONE)]
    value = encode_record(IdempotencyRecord(b"h" * 16, 3, ReplyKind.PUT, b""))
    records = [Entry(record_key(b"k"), 7, Kind.PUT, value, 9)]
    assert await slots_on(store, OLDER).create(3, WalContents((), ranges, records)) is None
    sst = open_sst(names.wal_name(3), (await store.get(names.wal_name(3))).data, database_id=None)
    assert list(sst.entries()) == []
    assert list(sst.range_tombstones()) == ranges
    assert list(sst.system_entries()) == records
    assert await slots_on(store, OWN).create(3, WalContents()) == Occupant(OLDER, is_fence=False)


async def test_slot_of_another_database_is_nobodys() -> None:
    """An object of another database in a slot of ours is an error, not a rival."""
    store = MemoryStore(lambda: 0)
    await slots_on(store, OLDER).create(3, WalContents())
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), InlineWorkers()), StoreSettings())
    other = WalSlots(
        cas,
        OWN,
        database_id=b"x" * 16,
        block_bytes=64,
        now_ms=lambda: 0,
        last_compacted=nothing_compacted,
    )
    with pytest.raises(WrongObject):
        await other.create(3, WalContents())


@pytest.mark.parametrize(
    ("entries", "jobs"),
    [
        (entries_of(ENCODE_INLINE_COUNT), 0),
        (entries_of(ENCODE_INLINE_COUNT + 1), 1),
        (entries_of(10, ENCODE_INLINE_BYTES // 10 - 6), 0),
        (entries_of(10, ENCODE_INLINE_BYTES // 10), 1),
    ],
    ids=["many", "too many", "large", "too large"],
)
async def test_large_object_is_encoded_off_the_loop(entries: list[Entry], jobs: int) -> None:
    """Many entries, or many bytes, are encoded by a worker, and make the same object."""
    store, workers = MemoryStore(lambda: 0), CountingWorkers()
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), workers), StoreSettings())
    slots = WalSlots(
        cas,
        OWN,
        database_id=DATABASE_ID,
        block_bytes=4_096,
        now_ms=lambda: 0,
        last_compacted=nothing_compacted,
    )
    assert await slots.create(0, WalContents(entries)) is None
    assert workers.jobs == jobs
    stored = await store.get(names.wal_name(0))
    assert list(open_sst(names.wal_name(0), stored.data, database_id=None).entries()) == entries


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_all_parts_count_for_the_worker(part: int) -> None:
    """Where the many entries of an object stand does not matter: a worker encodes them."""
    store, workers = MemoryStore(lambda: 0), CountingWorkers()
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), workers), StoreSettings())
    slots = WalSlots(
        cas,
        OWN,
        database_id=DATABASE_ID,
        block_bytes=4_096,
        now_ms=lambda: 0,
        last_compacted=nothing_compacted,
    )
    points, ranges, records = [], [], []
    for number in range(ENCODE_INLINE_COUNT - 1):
        key = b"%06d" % number
        match part:
            case 0:
                points.append(Entry(key, 7, Kind.PUT))
            case 1:
                ranges.append(Entry(key, 7, Kind.RANGE_TOMBSTONE, key + b"x"))
            case _:
                records.append(Entry(record_key(key), 7, Kind.PUT, bytes(40)))
    points.append(Entry(b"z", 7, Kind.PUT))
    assert await slots.create(0, WalContents(points, ranges, records)) is None
    points.append(Entry(b"zz", 7, Kind.PUT))
    assert await slots.create(1, WalContents(points, ranges, records)) is None
    assert workers.jobs == 1


async def test_list_tells_which_slots_are_filled() -> None:
    """A list begins at its first slot, and leaves out what is no WAL object."""
    store = MemoryStore(lambda: 0)
    for wal_id in (0, 1, 2, 4):
        await slots_on(store, OWN).create(wal_id, WalContents())
    await store.create("wal/notes.txt", b"not ours")
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), InlineWorkers()), StoreSettings())
    assert await list_wal(cas, 0) == WalFolder(0, frozenset({0, 1, 2, 4}))
    assert await list_wal(cas, 2) == WalFolder(2, frozenset({2, 4}))
    assert (await list_wal(cas, 0)).first_gap == 3
    assert (await list_wal(cas, 5)).first_gap == 5


def test_slot_that_was_filled_is_missed() -> None:
    """A gap before what was seen, or too far before what is there, was filled once."""
    assert WalFolder(0, frozenset({0, 2})).misses_an_object(width=1, last_seen=None)
    assert not WalFolder(0, frozenset({0, 2})).misses_an_object(width=2, last_seen=0)
    assert WalFolder(0, frozenset({0, 2})).misses_an_object(width=2, last_seen=1)
    assert WalFolder(0, frozenset({0, 3})).misses_an_object(width=2, last_seen=0)
    assert WalFolder(3, frozenset()).misses_an_object(width=1, last_seen=3)
    assert not WalFolder(3, frozenset()).misses_an_object(width=1, last_seen=2)
