"""WAL slots: contents, codecs, and which slots are filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.errors import Fenced, OutcomeUnknown, ShaleError, WrongObject
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.records import record_key
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.fencing import Occupant, WalListing, WriterId
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings, WalCodec
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.write.commit import WalContents
from shalekv.write.wal import (
    ENCODE_INLINE_BYTES,
    ENCODE_INLINE_COUNT,
    ObjectStoreWal,
    encode_wal,
    list_wal,
)
from tests.kit.engine.commits import nothing_compacted
from tests.kit.engine.databases import Database, contents
from tests.kit.engine.running_log import (
    DATABASE_ID,
    LOGICAL_TIME_MS,
    NEWER,
    OLDER,
    OWN,
    YieldingClock,
    slots_on,
)
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.samples import RANGES, SYSTEM, properties
from tests.kit.store import HeldStore

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class CountingWorkers(InlineWorkers):
    """Counts the calls that are given to workers."""

    def __init__(self) -> None:
        self.jobs = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self.jobs += 1
        return await super().run(function, *args)


def entries_of(count: int, value_bytes: int = 0) -> list[Entry]:
    return [Entry(b"%06d" % number, 7, Kind.PUT, b"v" * value_bytes) for number in range(count)]


async def test_object_names_its_owner() -> None:
    """A slot of ours has our epoch, nonce, logical time and entries, and a write id."""
    store = MemoryStore(lambda: 0)
    assert await slots_on(store, OWN).create(3, WalContents(entries_of(2))) is None
    stored = await store.get(names.wal_name(3))
    assert stored.metadata == {"writer_epoch": "5"}
    sst = open_sst(names.wal_name(3), stored.data, database_id=DATABASE_ID)
    assert (sst.properties.writer_epoch, sst.properties.writer_nonce) == (OWN.epoch, OWN.nonce)
    assert sst.properties.logical_time_ms == LOGICAL_TIME_MS
    assert len(set(sst.properties.write_id)) > 1
    assert list(sst.entries()) == entries_of(2)


async def test_object_without_puts_is_no_fence() -> None:
    """Range tombstones and records are contents as well."""
    store = MemoryStore(lambda: 0)
    ranges = [Entry(b"a", 7, Kind.RANGE_TOMBSTONE, b"c"), Entry(b"m", 6, Kind.RANGE_TOMBSTONE)]
    for slot, filling in enumerate((WalContents((), ranges), WalContents((), (), records_of(1)))):
        assert await slots_on(store, OLDER).create(slot, filling) is None
        expected = Occupant(OLDER, is_fence=False)
        assert await slots_on(store, OWN).create(slot, WalContents()) == expected


async def test_object_of_another_database_is_an_error() -> None:
    """An object of another database in one of our slots is an error, not a rival."""
    store = MemoryStore(lambda: 0)
    await slots_on(store, OLDER).create(3, WalContents())
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), InlineWorkers()), StoreSettings())
    other = ObjectStoreWal(
        cas,
        OWN,
        database_id=b"x" * 16,
        block_bytes=64,
        now_ms=lambda: 0,
        last_compacted=nothing_compacted,
    )
    with pytest.raises(WrongObject):
        await other.create(3, WalContents())


@pytest.mark.parametrize(("rival", "error"), [(NEWER, Fenced), (OLDER, OutcomeUnknown)])
async def test_slot_that_was_compacted_and_filled_again(
    rival: WriterId, error: type[ShaleError]
) -> None:
    """A writer that does not know whether its object was there before is fenced by a newer one."""

    async def last_compacted() -> int:
        return 3

    store = HeldStore()
    slots = slots_on(store, OWN, last_compacted)
    creating = asyncio.ensure_future(slots.create(3, WalContents(entries_of(1))))
    (await store.arrived(1)).lose_reply()
    await store.delete([names.wal_name(3)])
    filling = asyncio.ensure_future(slots_on(store, rival).create(3, WalContents()))
    while not filling.done():
        store.release_all()
        await asyncio.sleep(0)
    with pytest.raises(error):
        await creating


def records_of(count: int) -> list[Entry]:
    return [Entry(record_key(b"%06d" % n), 7, Kind.PUT, bytes(40)) for n in range(count)]


def ranges_of(count: int) -> list[Entry]:
    return [Entry(b"%06d" % n, 7, Kind.RANGE_TOMBSTONE, b"%06dx" % n) for n in range(count)]


@pytest.mark.parametrize(
    ("contents", "jobs"),
    [
        (WalContents(entries_of(ENCODE_INLINE_COUNT)), 0),
        (WalContents(entries_of(ENCODE_INLINE_COUNT + 1)), 1),
        (WalContents(entries_of(10, ENCODE_INLINE_BYTES // 10 - 6)), 0),
        (WalContents(entries_of(10, ENCODE_INLINE_BYTES // 10)), 1),
        (WalContents(entries_of(1), ranges_of(ENCODE_INLINE_COUNT - 1)), 0),
        (WalContents(entries_of(1), ranges_of(ENCODE_INLINE_COUNT)), 1),
        (WalContents(entries_of(1), (), records_of(ENCODE_INLINE_COUNT - 1)), 0),
        (WalContents(entries_of(1), (), records_of(ENCODE_INLINE_COUNT)), 1),
    ],
)
async def test_large_object_is_encoded_off_the_loop(contents: WalContents, jobs: int) -> None:
    """Many entries of any part, or many bytes, are encoded by a worker, to the same object."""
    store, workers = MemoryStore(lambda: 0), CountingWorkers()
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), workers), StoreSettings())
    slots = ObjectStoreWal(
        cas,
        OWN,
        database_id=DATABASE_ID,
        block_bytes=4_096,
        now_ms=lambda: 0,
        last_compacted=nothing_compacted,
    )
    assert await slots.create(0, contents) is None
    assert workers.jobs == jobs
    stored = await store.get(names.wal_name(0))
    found = open_sst(names.wal_name(0), stored.data, database_id=None)
    assert list(found.entries()) == contents.points


async def test_list_finds_the_filled_slots() -> None:
    """A list begins at its first slot, and omits what is no WAL object."""
    store = MemoryStore(lambda: 0)
    for wal_id in (0, 1, 2, 4):
        await slots_on(store, OWN).create(wal_id, WalContents())
    await store.create("wal/notes.txt", b"not ours")
    cas = CasStore(store, Runtime(YieldingClock(), Random(1), InlineWorkers()), StoreSettings())
    assert await list_wal(cas, 0) == WalListing(0, frozenset({0, 1, 2, 4}))
    assert await list_wal(cas, 2) == WalListing(2, frozenset({2, 4}))
    assert (await list_wal(cas, 0)).first_gap == 3
    assert (await list_wal(cas, 5)).first_gap == 5


def test_lost_objects_are_noticed() -> None:
    """A gap before a seen slot, or too far before a filled one, was filled once."""
    assert WalListing(0, frozenset({0, 2})).misses_an_object(width=1, last_seen=None)
    assert not WalListing(0, frozenset({0, 2})).misses_an_object(width=2, last_seen=0)
    assert WalListing(0, frozenset({0, 2})).misses_an_object(width=2, last_seen=1)
    assert WalListing(0, frozenset({0, 3})).misses_an_object(width=2, last_seen=0)
    assert not WalListing(0, frozenset({0, 9})).misses_an_object(width=None, last_seen=0)
    assert WalListing(0, frozenset({0, 9})).misses_an_object(width=None, last_seen=1)
    assert WalListing(3, frozenset()).misses_an_object(width=1, last_seen=3)
    assert not WalListing(3, frozenset()).misses_an_object(width=1, last_seen=2)


ENTRIES = [Entry(b"key %04d" % n, 7, Kind.PUT, b"value %04d" % n * 9) for n in range(500)]


@pytest.mark.parametrize("codec", list(Codec))
def test_a_wal_object_survives_a_round_trip(codec: Codec) -> None:
    """Points, range tombstones and records survive a round trip in every codec, in fewer bytes."""
    parts = WalContents(ENTRIES, RANGES, SYSTEM)
    data = encode_wal(properties(names.wal_name(1)), parts, 4_096, codec)
    sst = open_sst(names.wal_name(1), data, database_id=None)
    sst.audit()
    assert list(sst.entries()) == ENTRIES
    assert list(sst.range_tombstones()) == RANGES
    assert list(sst.system_entries()) == SYSTEM
    plain = encode_wal(properties(names.wal_name(1)), parts, 4_096)
    assert (data == plain) == (codec is Codec.NONE)
    assert len(data) < len(plain) / 2 or codec is Codec.NONE


async def test_objects_of_all_codecs_are_replayed() -> None:
    """A WAL of several codecs is replayed by a writer with any setting."""
    database = await Database.created()
    expected: dict[bytes, bytes] = {}
    for number, codec in enumerate([*WalCodec, *reversed(WalCodec)]):
        opened = await database.open(wal_codec=codec)
        assert contents(opened) == sorted(expected.items())
        seq = opened.first_seq
        entries = [
            Entry(b"key %04d" % n, seq, Kind.PUT, b"%d" % number * 50) for n in range(number, 99)
        ]
        wal_id = opened.last_wal_id + 1
        assert await opened.wal.create(wal_id, WalContents(entries), position=0) is None
        assert database.data(names.wal_name(wal_id))[0] == Codec[codec.name]
        expected |= {entry.key: entry.value for entry in entries}
    assert contents(await database.open()) == sorted(expected.items())
