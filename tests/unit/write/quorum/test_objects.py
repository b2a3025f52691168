"""Objects of the archive: the contents of records in the bytes of one SST."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shalekv.errors import BadStructure, CorruptObject, Truncated, WrongObject
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
    record_key,
)
from shalekv.format.sst import Sst, open_sst
from shalekv.format.wal_record import make_record
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.quorum_records import LogEnd, Record
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, apply_object
from shalekv.write.commit import WalContents
from shalekv.write.quorum.wal import (
    last_properties,
    object_bytes,
    same_contents,
)
from shalekv.write.wal import encode_wal
from tests.kit.samples import properties

WAL_ID = 7
NAME = names.wal_name(WAL_ID)
BYTES_SHA256 = "e222ef2303e1ffa0a067cf32f063d0ab0ba11b2147efa0b4b96dd942ff8c88ff"
KEYS = [b"", b"a", b"b", b"bb", b"c", b"d\xff"]


def drawn(random: Random, seq: int) -> WalContents:
    """A commit with this number: at most one version of each of some keys."""
    points = [
        Entry(key, seq, Kind.TOMBSTONE)
        if random.random() < 0.2
        else Entry(
            key,
            seq,
            Kind.PUT,
            random.randbytes(random.choice([0, 9, 300])),
            random.choice([0, 0, 99]),
        )
        for key in KEYS
        if random.random() < 0.4
    ]
    tombstones = []
    if random.random() < 0.3:
        start, end = sorted(random.sample(KEYS, 2))
        tombstones = [Entry(start, seq, Kind.RANGE_TOMBSTONE, random.choice([end, b""]))]
    records = []
    if random.random() < 0.4:
        reply = IdempotencyRecord(b"h" * 16, WAL_ID, ReplyKind.PUT, b"reply")
        key = record_key(random.choice([b"one", b"two"]))
        records = [Entry(key, seq, Kind.PUT, encode_idempotency_record(reply), 99)]
    return WalContents(points, tombstones, records)


def together(parts: Sequence[WalContents]) -> WalContents:
    def joined(number: int) -> list[Entry]:
        entries = [entry for part in parts for entry in part[number]]
        return sorted(entries, key=lambda entry: (entry.key, -entry.seq))

    return WalContents(joined(0), joined(1), joined(2), joined(3))


def payload_of(
    contents: WalContents, number: int, *, codec: Codec = Codec.NONE, block_bytes: int = 4_096
) -> bytes:
    own = replace(
        properties(NAME), write_id=b"write id %07d" % number, logical_time_ms=1_000 + number
    )
    return encode_wal(own, contents, block_bytes, codec)


def records_of(payloads: Sequence[bytes]) -> list[Record]:
    """The records of one object; the last one ends it."""
    mark, found = LogEnd(lsn=40, epoch=3, wal_id=WAL_ID - 1), []
    for number, payload in enumerate(payloads):
        ends_object = number == len(payloads) - 1
        found.append(
            make_record(mark, epoch=3, wal_id=WAL_ID, ends_object=ends_object, payload=payload)
        )
        mark = found[-1].mark
    return found


def opened(payload: bytes) -> Sst:
    """The SST with these bytes, after all of it was verified."""
    sst = open_sst(NAME, payload, database_id=None)
    sst.audit()
    return sst


def replayed(payloads: Sequence[bytes]) -> Replayed:
    found = Replayed(Memtable(), last_seq=0, logical_time_ms=0)
    for payload in payloads:
        apply_object(opened(payload), found)
    return found


def state_of(found: Replayed) -> object:
    versions = [found.memtable.get(key) for key in KEYS]
    newest = [entry for entry in versions if entry and not found.memtable.hides(entry)]
    # Each commit has one number, so that all that is older than any of them can be selected.
    hidden = [
        found.memtable.hides(Entry(key, seq, Kind.PUT))
        for key in KEYS
        for seq in range(found.last_seq + 1)
    ]
    return newest, hidden, found.last_seq, found.logical_time_ms, found.records, found.loads


def commits_of(payloads: Sequence[bytes]) -> dict[int, list[Entry]]:
    """The entries of each commit by its number, as a watch would report them."""
    by_seq: dict[int, list[Entry]] = {}
    for sst in map(opened, payloads):
        for entry in (*sst.entries(), *sst.range_tombstones(), *sst.control_entries()):
            by_seq.setdefault(entry.seq, []).append(entry)
    return {seq: sorted(entries) for seq, entries in by_seq.items()}


@st.composite
def groups(draw: st.DrawFn) -> list[bytes]:
    """The payloads of one object: groups of some commits each, and records without a payload."""
    random = Random(draw(st.integers(0, 2**32)))
    codec = draw(st.sampled_from(Codec))
    seq, payloads = 0, []
    for number, size in enumerate(draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))):
        parts = []
        for _ in range(size):
            seq += draw(st.integers(1, 2))  # some numbers belong to commits that write nothing
            parts.append(drawn(random, seq))
        block_bytes = draw(st.sampled_from([64, 4_096]))
        payloads.append(
            payload_of(together(parts), number, codec=codec, block_bytes=block_bytes)
            if parts
            else b""
        )
    return payloads if any(payloads) else [payload_of(drawn(random, 1), 0)]


@given(payloads=groups())
def test_a_merged_object_replays_as_its_parts(payloads: list[bytes]) -> None:
    """A merged object replays to the same state as its parts, and keeps every version.

    Its owner, write id and logical time are those of the last group that wrote anything.
    """
    records = records_of(payloads)
    parts = [payload for payload in payloads if payload]
    # A fence is alone in its object: its time proves nothing, and must not become that of others.
    assume(len(parts) == 1 or opened(parts[-1]).footer.contents.entry_count)
    merged = object_bytes(NAME, records)
    assert state_of(replayed([merged])) == state_of(replayed(parts))
    assert commits_of([merged]) == commits_of(parts)
    properties_of_last = opened(parts[-1]).properties
    assert opened(merged).properties == properties_of_last == last_properties(NAME, records)


def test_one_payload_is_the_object() -> None:
    """A single group is archived byte for byte; records without a payload leave no trace."""
    payload = payload_of(drawn(Random(1), 1), 0, codec=Codec.ZSTD, block_bytes=64)
    assert object_bytes(NAME, records_of([payload])) == payload
    assert object_bytes(NAME, records_of([b"", payload, b""])) == payload


def test_bytes_never_change() -> None:
    """The same records make the same bytes in every version.

    Safekeepers of two versions archive side by side: a change that breaks this test makes them
    contradict each other.
    """
    random = Random(5)
    payloads = [payload_of(drawn(random, seq), seq) for seq in range(1, 30)]
    merged = object_bytes(NAME, records_of(payloads))
    assert hashlib.sha256(merged).hexdigest() == BYTES_SHA256


def test_records_that_cannot_be_one_object_are_refused() -> None:
    """All records that cannot be one object raise a typed error."""
    fine = payload_of(WalContents([Entry(b"k", 5, Kind.PUT)]), 0)
    strange = encode_wal(
        replace(properties(NAME), database_id=b"another database"),
        WalContents([Entry(b"k", 6, Kind.PUT)]),
        64,
    )
    elsewhere = encode_wal(
        properties(names.wal_name(8)), WalContents([Entry(b"k", 6, Kind.PUT)]), 64
    )
    for payloads, expected in (
        ([b""], BadStructure),
        ([fine, fine], BadStructure),  # the same number twice
        ([payload_of(WalContents([Entry(b"k", 6, Kind.PUT)]), 1), fine], BadStructure),
        ([strange, fine], WrongObject),
        ([elsewhere], WrongObject),
        ([fine, elsewhere], WrongObject),
        ([b"short"], Truncated),
    ):
        with pytest.raises(CorruptObject) as raised:
            object_bytes(NAME, records_of(payloads))
        assert isinstance(raised.value, expected), payloads


def test_objects_are_the_same_whatever_compressed_them() -> None:
    """Objects are equal under another compression, and differ by write id, entry or damage."""
    contents = WalContents([Entry(b"k%d" % n, 5, Kind.PUT, b"v" * 500) for n in range(9)])
    one = payload_of(contents, 0)
    assert same_contents(NAME, one, payload_of(contents, 0, codec=Codec.LZ4, block_bytes=64))
    assert not same_contents(NAME, one, payload_of(contents, 1))
    fewer = WalContents([Entry(b"k%d" % n, 5, Kind.PUT, b"w" * 500) for n in range(9)])
    assert not same_contents(NAME, one, payload_of(fewer, 0))
    assert not same_contents(NAME, one, one[:-1])
    assert not same_contents(NAME, one, bytes([one[0], 7]) + one[2:])
