"""Idempotency records are stored as specified, and what is not one is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import MAX_U64
from shalekv.format.idempotency import (
    IdempotencyRecord,
    ReplyKind,
    decode_record,
    encode_record,
)
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
    """A record gives back what it was made of."""
    found = decode_record(WAL_NAME, encode_record(record))
    assert found == record
    assert type(found.reply_kind) is ReplyKind


def test_a_record_is_laid_out_as_specified() -> None:
    """Each byte stands where server/docs/formats.md says."""
    expected = b"hash of request!" + bytes.fromhex("0807060504030201") + b"\x04" + bytes(7)
    assert encode_record(RECORD) == expected + b"reply"


def test_the_kinds_of_replies_have_their_numbers() -> None:
    """The numbers of the kinds are part of the format."""
    assert {kind.name: int(kind) for kind in ReplyKind} == {
        "PUT": 1,
        "DELETE": 2,
        "DELETE_RANGE": 3,
        "WRITE": 4,
        "TXN": 5,
    }


@pytest.mark.parametrize(
    ("at", "new", "offset"),
    [(24, 0, 24), (24, 6, 24), (24, 255, 24), (25, 1, 25), (31, 128, 25)],
)
def test_what_a_later_version_defines_is_refused(at: int, new: int, offset: int) -> None:
    """Another kind of reply, or reserved bytes that are not 0, are for a later version."""
    data = bytearray(encode_record(RECORD))
    data[at] = new
    with pytest.raises(UnsupportedVersion, match="idempotency record") as caught:
        decode_record(WAL_NAME, bytes(data))
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
        encode_record(replace(RECORD, **change))
