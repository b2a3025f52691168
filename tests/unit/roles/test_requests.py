"""Requests: every field at its limit, and one past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shalekv.core.entry import Kind
from shalekv.engine.commit import Change
from shalekv.errors import InvalidRequest, NotImplementedYet
from shalekv.roles import requests
from shalekv.roles.requests import KeyInterval
from shalekv.settings import KEY_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2

LIMITS = LimitSettings(value_bytes_max=100, batch_count_max=3, batch_bytes_max=1_024)
KEY_MAX = b"k" * KEY_BYTES_MAX
KEY_OVER = KEY_MAX + b"k"
UNKNOWN_ENUM = 99


def put(key: bytes = b"k", value: bytes = b"", **fields: Any) -> kv_pb2.Change:
    """A put inside a batch."""
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, **fields))


def delete(key: bytes = b"k") -> kv_pb2.Change:
    """A delete inside a batch."""
    return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))


def check_put(**fields: Any) -> Any:
    """A put request."""
    return requests.put_changes(kv_pb2.PutRequest(**fields), LIMITS)


def check_delete(**fields: Any) -> Any:
    """A delete request."""
    return requests.delete_changes(kv_pb2.DeleteRequest(**fields))


def check_write(*changes: kv_pb2.Change) -> Any:
    """A batch."""
    return requests.write_changes(kv_pb2.WriteRequest(changes=changes), LIMITS)


def check_keys(*keys: bytes) -> Any:
    """A batch get."""
    return requests.check_keys(kv_pb2.BatchGetRequest(keys=keys), LIMITS)


def check_range(**fields: Any) -> Any:
    """A range."""
    return requests.key_interval(kv_pb2.KeyRange(**fields))


def check_scan(**fields: Any) -> Any:
    """A scan."""
    return requests.scan_interval(kv_pb2.ScanRequest(**fields))


def check_header(**fields: Any) -> Any:
    """The header of a read."""
    return requests.read_level(kv_pb2.RequestHeader(**fields))


ACCEPTED: list[tuple[str, Callable[[], Any]]] = [
    ("a key of one byte", lambda: check_put(key=b"\x00")),
    ("the longest key", lambda: check_put(key=KEY_MAX)),
    ("the longest key deleted", lambda: check_delete(key=KEY_MAX)),
    ("the longest value", lambda: check_put(key=b"k", value=b"v" * 100)),
    ("an empty value", lambda: check_put(key=b"k")),
    ("the most changes", lambda: check_write(put(b"a"), put(b"b"), delete(b"c"))),
    ("the most bytes", lambda: check_write(put(b"k" * 962, b"v" * 61), put(b"l"))),
    ("the most keys", lambda: check_keys(b"a", b"a", KEY_MAX)),
    ("the longest bounds", lambda: check_range(start=KEY_MAX, end=b"l" * KEY_BYTES_MAX)),
    ("the longest prefix", lambda: check_range(prefix=KEY_MAX)),
    ("an empty range", lambda: check_range(start=b"a", end=b"a")),
    ("a start without an end", lambda: check_range(start=b"b")),
    ("every read level", lambda: [check_header(read_level=n) for n in range(4)]),
    ("a bound on staleness", lambda: check_header(max_staleness_ms=1)),
]

INVALID: list[tuple[str, Callable[[], Any]]] = [
    ("key", check_put),
    ("key", lambda: check_put(key=KEY_OVER)),
    ("value", lambda: check_put(key=b"k", value=b"v" * 101)),
    ("key", check_delete),
    ("key", lambda: check_delete(key=KEY_OVER)),
    ("changes", check_write),
    ("changes", lambda: check_write(put(b"a"), put(b"a"), put(b"a"), put(b"a"))),
    ("changes", lambda: check_write(put(b"k" * 963, b"v" * 61), put(b"l"))),
    ("changes", lambda: check_write(put(b"k" * 500), put(b"k" * 500), put(b"k" * 500))),
    ("changes[1]", lambda: check_write(put(), kv_pb2.Change())),
    ("changes[0].put.key", lambda: check_write(put(b""))),
    ("changes[1].put.key", lambda: check_write(put(), put(KEY_OVER))),
    ("changes[1].put.value", lambda: check_write(put(), put(b"k", b"v" * 101))),
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
    ("range.start", lambda: check_scan(range=kv_pb2.KeyRange(start=b"b", end=b"a"))),
    ("header.read_level", lambda: check_header(read_level=UNKNOWN_ENUM)),
    ("durability", lambda: requests.durability(UNKNOWN_ENUM)),
    ("durability", lambda: requests.durability(kv_pb2.DURABILITY_QUORUM)),
]

NOT_IMPLEMENTED: list[tuple[str, Callable[[], Any]]] = [
    ("precondition", lambda: check_put(key=b"k", precondition=kv_pb2.Precondition(absent=True))),
    ("precondition", lambda: check_delete(key=b"k", precondition=kv_pb2.Precondition())),
    ("ttl_ms", lambda: check_put(key=b"k", ttl_ms=1)),
    ("changes[0].put.ttl_ms", lambda: check_write(put(ttl_ms=1))),
    (
        "changes[1].delete_range",
        lambda: check_write(put(), kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange())),
    ),
    ("changes[0].add", lambda: check_write(kv_pb2.Change(add=kv_pb2.AddChange(key=b"k")))),
    ("header.min_seq", lambda: check_header(min_seq=1)),
    ("header.snapshot_id", lambda: check_header(snapshot_id=b"s")),
    ("header.idempotency_key", lambda: check_header(idempotency_key=b"i")),
    ("page_token", lambda: check_scan(page_token=b"t")),
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


@pytest.mark.parametrize(("feature", "check"), NOT_IMPLEMENTED)
def test_what_is_not_there_is_not_ignored(feature: str, check: Callable[[], Any]) -> None:
    """An option that this version does not have is refused by name, never ignored."""
    with pytest.raises(NotImplementedYet) as caught:
        check()
    assert caught.value.feature == feature


def test_last_change_of_a_key_wins() -> None:
    """Each key stands once in a commit, with its last change, where it first stood."""
    assert check_write(put(b"a", b"1"), delete(b"b"), put(b"a", b"2")) == [
        Change(b"a", Kind.PUT, b"2"),
        Change(b"b", Kind.TOMBSTONE),
    ]
    assert check_write(put(b"a", b"1"), delete(b"a")) == [Change(b"a", Kind.TOMBSTONE)]


def test_defaults_are_filled_in() -> None:
    """What is not specified is the documented default."""
    assert check_header() == kv_pb2.READ_LEVEL_COMMITTED
    default = requests.durability(kv_pb2.DURABILITY_UNSPECIFIED)
    assert default == kv_pb2.DURABILITY_DURABLE
    for wanted in (kv_pb2.DURABILITY_MEMORY, kv_pb2.DURABILITY_ARCHIVED):
        assert requests.durability(wanted) == wanted


def test_interval_of_a_range() -> None:
    """A prefix is the interval of its keys; no range at all is everything."""
    assert check_scan() == KeyInterval(b"", b"")
    assert check_range(start=b"a", end=b"c") == KeyInterval(b"a", b"c")
    assert check_range(prefix=b"ab") == KeyInterval(b"ab", b"ac")
    assert check_range(prefix=b"\xff") == KeyInterval(b"\xff", b"")
