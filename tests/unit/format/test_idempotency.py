"""Idempotency records and the files of members are stored as specified, and others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadChecksum, BadMagic, CorruptObject, Truncated, UnsupportedVersion
from shalekv.format.coding import MAX_U64, crc32c
from shalekv.format.quorum.member_files import (
    CONTROL_BYTES,
    HEAD_BYTES,
    SYNCED_BYTES,
    URL_BYTES_MAX,
    Control,
    MemberIdentity,
    SegmentHead,
    Synced,
    decode_control,
    decode_head,
    decode_synced,
    encode_control,
    encode_head,
    encode_synced,
)
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    decode_idempotency_record,
    encode_idempotency_record,
)
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth
from tests.kit.samples import WAL_NAME

RECORD = IdempotencyRecord(b"hash of request!", 0x0102030405060708, ReplyKind.WRITE, b"reply")

records = st.builds(
    IdempotencyRecord,
    st.binary(min_size=16, max_size=16),
    st.integers(0, MAX_U64),
    st.sampled_from(ReplyKind),
    st.binary(max_size=40),
)


@given(records)
def test_records_come_back(record: IdempotencyRecord) -> None:
    """A record returns what it was made of."""
    found = decode_idempotency_record(WAL_NAME, encode_idempotency_record(record))
    assert found == record
    assert type(found.reply_kind) is ReplyKind


@pytest.mark.parametrize(
    ("at", "new", "offset"),
    [(24, 0, 24), (24, 6, 24), (24, 255, 24), (25, 1, 25), (31, 128, 25)],
)
def test_what_a_later_version_defines_is_refused(at: int, new: int, offset: int) -> None:
    """Another kind of reply, or reserved bytes that are not 0, are for a later version."""
    data = bytearray(encode_idempotency_record(RECORD))
    data[at] = new
    with pytest.raises(UnsupportedVersion, match="idempotency record") as caught:
        decode_idempotency_record(WAL_NAME, bytes(data))
    assert (caught.value.name, caught.value.offset) == (WAL_NAME, offset)


@pytest.mark.parametrize(
    "change",
    [
        {"request_hash": b""},
        {"request_hash": bytes(15)},
        {"request_hash": bytes(17)},
        {"wal_id": -1},
        {"wal_id": 2**64},
        {"reply_kind": 0},
        {"reply_kind": 6},
    ],
)
def test_records_out_of_their_limits_are_not_written(change: dict[str, Any]) -> None:
    """Hashes of another length, ids beyond 64 bits and unknown kinds of replies are refused."""
    with pytest.raises(ValueError, match=r"."):
        encode_idempotency_record(replace(RECORD, **change))


IDENTITY = MemberIdentity(b"d" * 16, b"m" * 16, "s3://bucket/dätä", b"r" * 16)
FULL = Control(
    IDENTITY, Ballot(2**63, b"n" * 16), LogHealth.REFILLING, 3, LogEnd(5, 6, 7, 8, False), 9, 10
)
SYNCED = Synced(1, 2, 3, 4, 5)
HEAD = SegmentHead(b"m" * 16, 2, 3)


@pytest.mark.parametrize(
    "control",
    [
        Control(IDENTITY),
        FULL,
        replace(FULL, base=LogEnd(1, 1, 1, 0), health=LogHealth.DAMAGED),
        replace(FULL, identity=replace(IDENTITY, url="u" * URL_BYTES_MAX)),
    ],
)
def test_a_control_slot(control: Control) -> None:
    """A slot of the control file returns what it was made of, at any offset."""
    slot = encode_control(control)
    assert len(slot) == CONTROL_BYTES
    assert decode_control("c", slot) == control
    assert decode_control("c", bytes(10) + slot + bytes(10), 10) == control


def test_the_other_slots() -> None:
    """A slot of the synced file and the head of a segment return what they were made of."""
    assert len(encode_synced(SYNCED)) == SYNCED_BYTES
    assert decode_synced("s", encode_synced(SYNCED)) == SYNCED
    assert len(encode_head(HEAD)) == HEAD_BYTES
    assert decode_head("h", encode_head(HEAD)) == HEAD


def test_a_url_that_is_too_long_is_refused() -> None:
    """A URL that does not fit is refused, and not cut."""
    with pytest.raises(ValueError, match="URL"):
        encode_control(replace(FULL, identity=replace(IDENTITY, url="u" * (URL_BYTES_MAX + 1))))


Decode = Callable[[str, bytes], object]


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (encode_control(FULL), decode_control),
        (encode_synced(SYNCED), decode_synced),
        (encode_head(HEAD), decode_head),
    ],
)
def test_damage_is_seen(data: bytes, decode: Decode) -> None:
    """Any changed bit or missing byte is an error, and another file or version a typed one."""
    for at in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(BadChecksum):
            decode("x", bytes(damaged))
    for length in range(0, len(data), 7):
        with pytest.raises(Truncated):
            decode("x", data[:length])
    with pytest.raises(CorruptObject):
        decode("x", bytes(len(data)))
    for magic, error in ((b"SSTX", BadMagic), (data[:3] + b"7", UnsupportedVersion)):
        forged = magic + data[4:-4]
        with pytest.raises(error):
            decode("x", forged + crc32c(forged).to_bytes(4, "little"))
