"""Requests: every field at its limit, and one past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shalekv.core.entry import NO_EXPIRY, Kind
from shalekv.core.key_range import KEY_BYTES_MAX, KeyRange
from shalekv.core.transaction import Change
from shalekv.errors import InvalidRequest
from shalekv.format.system_key import CLIENT_KEY_BYTES_MAX
from shalekv.roles import requests
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2

LIMITS = LimitSettings(
    value_bytes_max=100, batch_count_max=3, batch_bytes_max=1_024, ttl_ms_max=1_000
)
NOW_MS = 5_000
KEY_MAX = b"k" * KEY_BYTES_MAX
KEY_OVER = KEY_MAX + b"k"
UNKNOWN_ENUM = 99


def now_ms() -> int:
    """Logical time."""
    return NOW_MS


def put(key: bytes = b"k", value: bytes = b"", **fields: Any) -> kv_pb2.Change:
    """A put inside a batch."""
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, **fields))


def delete(key: bytes = b"k") -> kv_pb2.Change:
    """A delete inside a batch."""
    return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))


def check_put(**fields: Any) -> Change:
    """A put request."""
    return requests.put_change(kv_pb2.PutRequest(**fields), LIMITS, now_ms)


def check_delete(**fields: Any) -> Change:
    """A delete request."""
    return requests.delete_change(kv_pb2.DeleteRequest(**fields))


def check_write(*changes: kv_pb2.Change) -> list[Change] | None:
    """A batch."""
    return requests.write_changes(kv_pb2.WriteRequest(changes=changes), LIMITS, now_ms)


def check_keys(*keys: bytes) -> None:
    """A batch get."""
    requests.check_keys(kv_pb2.BatchGetRequest(keys=keys), LIMITS)


def check_range(**fields: Any) -> KeyRange:
    """A range."""
    return requests.key_range(kv_pb2.KeyRange(**fields))


def check_deleted(**fields: Any) -> KeyRange:
    """A range that is deleted."""
    return requests.deleted_range(kv_pb2.KeyRange(**fields))


def check_header(**fields: Any) -> Any:
    """The header of a read."""
    return requests.read_level(kv_pb2.RequestHeader(**fields))


def check_condition(level: Any) -> Any:
    """The header of a write with a condition."""
    return requests.condition_level(kv_pb2.RequestHeader(read_level=level))


ACCEPTED: list[tuple[str, Callable[[], Any]]] = [
    ("a key of one byte", lambda: check_put(key=b"\x00")),
    ("the longest key", lambda: check_put(key=KEY_MAX)),
    ("the longest key deleted", lambda: check_delete(key=KEY_MAX)),
    ("the longest value", lambda: check_put(key=b"k", value=b"v" * 100)),
    ("an empty value", lambda: check_put(key=b"k")),
    ("the longest life", lambda: check_put(key=b"k", ttl_ms=1_000)),
    ("the longest life in a batch", lambda: check_write(put(ttl_ms=1_000))),
    ("the most changes", lambda: check_write(put(b"a"), put(b"b"), delete(b"c"))),
    ("the most bytes", lambda: check_write(put(b"k" * 962, b"v" * 61), put(b"l"))),
    ("the most keys", lambda: check_keys(b"a", b"a", KEY_MAX)),
    ("the longest bounds", lambda: check_range(start=KEY_MAX, end=b"l" * KEY_BYTES_MAX)),
    ("the longest prefix", lambda: check_range(prefix=KEY_MAX)),
    ("an empty range", lambda: check_range(start=b"a", end=b"a")),
    ("a start without an end", lambda: check_range(start=b"b")),
    ("all keys read", check_range),
    ("an empty range deleted", lambda: check_deleted(start=b"a", end=b"a")),
    ("all from a key on deleted", lambda: check_deleted(start=b"b")),
    ("all before a key deleted", lambda: check_deleted(end=b"b")),
    ("the last prefix deleted", lambda: check_deleted(prefix=b"\xff")),
    ("every read level", lambda: [check_header(read_level=n) for n in range(4)]),
    ("a bound on staleness", lambda: check_header(max_staleness_ms=1)),
    ("the longest idempotency key", lambda: check_header(idempotency_key=b"i" * 64)),
]

INVALID: list[tuple[str, Callable[[], Any]]] = [
    ("key", check_put),
    ("key", lambda: check_put(key=KEY_OVER)),
    ("value", lambda: check_put(key=b"k", value=b"v" * 101)),
    ("ttl_ms", lambda: check_put(key=b"k", ttl_ms=1_001)),
    ("ttl_ms", lambda: check_put(key=b"k", ttl_ms=2**64 - 1)),
    ("key", check_delete),
    ("key", lambda: check_delete(key=KEY_OVER)),
    ("changes", check_write),
    ("changes", lambda: check_write(put(b"a"), put(b"a"), put(b"a"), put(b"a"))),
    ("changes", lambda: check_write(put(b"k" * 963, b"v" * 61), put(b"l"))),
    ("changes", lambda: check_write(put(b"k" * 500), put(b"k" * 500), put(b"k" * 500))),
    ("changes[0].put.key", lambda: check_write(put(b""))),
    ("changes[1].put.key", lambda: check_write(put(), put(KEY_OVER))),
    ("changes[1].put.value", lambda: check_write(put(), put(b"k", b"v" * 101))),
    ("changes[1].put.ttl_ms", lambda: check_write(put(), put(ttl_ms=1_001))),
    ("changes[2].delete.key", lambda: check_write(put(), put(), delete(b""))),
    ("keys", check_keys),
    ("keys", lambda: check_keys(b"a", b"b", b"c", b"d")),
    ("keys[1]", lambda: check_keys(b"a", b"")),
    ("keys[0]", lambda: check_keys(KEY_OVER)),
    ("range.start", lambda: check_range(start=KEY_OVER)),
    ("range.end", lambda: check_range(end=KEY_OVER)),
    ("range.prefix", lambda: check_range(prefix=KEY_OVER)),
    ("range.prefix", lambda: check_range(prefix=b"a", start=b"a")),
    ("range.prefix", lambda: check_range(prefix=b"a", end=b"a")),
    ("range.start", lambda: check_range(start=b"b", end=b"a")),
    ("range", check_deleted),
    ("range.start", lambda: check_deleted(start=b"b", end=b"a")),
    ("header.read_level", lambda: check_header(read_level=UNKNOWN_ENUM)),
    ("header.read_level", lambda: check_condition(kv_pb2.READ_LEVEL_UNCOMMITTED)),
    ("header.idempotency_key", lambda: check_header(idempotency_key=b"i" * 65)),
    ("durability", lambda: requests.durability(UNKNOWN_ENUM)),
    ("durability", lambda: requests.durability(kv_pb2.DURABILITY_QUORUM)),
]


@pytest.mark.parametrize(("what", "check"), ACCEPTED, ids=[what for what, _ in ACCEPTED])
def test_limit_is_accepted(what: str, check: Callable[[], Any]) -> None:
    """What is at its limit is accepted."""
    assert what
    check()


@pytest.mark.parametrize(("field", "check"), INVALID)
def test_bad_field_is_named(field: str, check: Callable[[], Any]) -> None:
    """What is past its limit, or makes no sense, is refused with the path of the field."""
    with pytest.raises(InvalidRequest) as caught:
        check()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_snapshot_is_not_written() -> None:
    """A write that names a snapshot is refused: it cannot change what was."""
    with pytest.raises(InvalidRequest) as caught:
        requests.check_write_header(kv_pb2.RequestHeader(snapshot_id=bytes(16)))
    assert caught.value.field == "header.snapshot_id"


def test_limit_of_idempotency_keys_is_that_of_their_records() -> None:
    """The documented 64 bytes are what a record can hold."""
    assert CLIENT_KEY_BYTES_MAX == 64


def test_last_change_of_a_key_wins() -> None:
    """Each key stands once in a commit, with its last change, where it first stood."""
    assert check_write(put(b"a", b"1"), delete(b"b"), put(b"a", b"2")) == [
        Change(b"a", Kind.PUT, b"2"),
        Change(b"b", Kind.TOMBSTONE),
    ]
    assert check_write(put(b"a", b"1"), delete(b"a")) == [Change(b"a", Kind.TOMBSTONE)]


@pytest.mark.parametrize(
    "change",
    [
        kv_pb2.Change(),
        kv_pb2.Change(add=kv_pb2.AddChange(key=b"k")),
        kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange()),
    ],
    ids=["nothing", "add", "delete_range"],
)
def test_more_than_puts_and_deletes_is_a_transaction(change: kv_pb2.Change) -> None:
    """A batch with anything but puts and deletes is judged where transactions are."""
    assert check_write(put(), change) is None


def test_life_counts_from_now() -> None:
    """A value expires so long after the moment of its put; without a life it never does."""
    assert check_put(key=b"k", ttl_ms=7).expire_at_ms == NOW_MS + 7
    assert check_put(key=b"k").expire_at_ms == NO_EXPIRY
    assert check_write(put(b"a", ttl_ms=1_000), put(b"b")) == [
        Change(b"a", Kind.PUT, b"", NOW_MS + 1_000),
        Change(b"b", Kind.PUT, b"", NO_EXPIRY),
    ]


def test_defaults_are_filled_in() -> None:
    """What is not specified is the documented default."""
    assert check_header() == kv_pb2.READ_LEVEL_COMMITTED
    unspecified = kv_pb2.READ_LEVEL_UNSPECIFIED
    assert check_condition(unspecified) == kv_pb2.READ_LEVEL_LINEARIZABLE
    assert check_condition(kv_pb2.READ_LEVEL_COMMITTED) == kv_pb2.READ_LEVEL_COMMITTED
    default = requests.durability(kv_pb2.DURABILITY_UNSPECIFIED)
    assert default == kv_pb2.DURABILITY_DURABLE
    for wanted in (kv_pb2.DURABILITY_MEMORY, kv_pb2.DURABILITY_ARCHIVED):
        assert requests.durability(wanted) == wanted


def test_interval_of_a_range() -> None:
    """A prefix is the interval of its keys; no range at all is everything."""
    assert check_range() == KeyRange(b"", b"")
    assert check_range(start=b"a", end=b"c") == KeyRange(b"a", b"c")
    assert check_range(prefix=b"ab") == KeyRange(b"ab", b"ac")
    assert check_range(prefix=b"\xff") == KeyRange(b"\xff", b"")
    assert check_deleted(prefix=b"a\xff") == KeyRange(b"a\xff", b"b")
