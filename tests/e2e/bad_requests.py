"""Requests that a server must refuse, each with what its error names and says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

from shalekv.settings import KEY_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2, kv_pb2_grpc

LIMITS = LimitSettings()
KEY, VALUE = b"key", b"value"
LONG_KEY = bytes(KEY_BYTES_MAX + 1)
UNKNOWN = 99  # a number that no enum has

Kv: TypeAlias = kv_pb2_grpc.KVStub
Call: TypeAlias = Callable[[Kv], Any]


class Case(NamedTuple):
    """A call, the field or feature that its error names, and what its message says."""

    call: Call
    names: str
    says: str


def put(key: bytes = KEY, value: bytes = VALUE, **fields: Any) -> Call:
    """A put."""
    return lambda kv: kv.Put(kv_pb2.PutRequest(key=key, value=value, **fields))


def delete(key: bytes = KEY, **fields: Any) -> Call:
    """A delete."""
    return lambda kv: kv.Delete(kv_pb2.DeleteRequest(key=key, **fields))


def get(key: bytes = KEY, **header: Any) -> Call:
    """A get with requirements."""
    return lambda kv: kv.Get(kv_pb2.GetRequest(header=kv_pb2.RequestHeader(**header), key=key))


def batch_get(*keys: bytes) -> Call:
    """A batch get."""
    return lambda kv: kv.BatchGet(kv_pb2.BatchGetRequest(keys=keys))


def scan(start: bytes = b"", end: bytes = b"", prefix: bytes = b"", **fields: Any) -> Call:
    """A scan."""
    key_range = kv_pb2.KeyRange(start=start, end=end, prefix=prefix)
    return lambda kv: kv.Scan(kv_pb2.ScanRequest(range=key_range, **fields))


def write(*changes: kv_pb2.Change) -> Call:
    """A batch."""
    return lambda kv: kv.Write(kv_pb2.WriteRequest(changes=changes))


def put_change(key: bytes = KEY, value: bytes = VALUE, ttl_ms: int = 0) -> kv_pb2.Change:
    """A put in a batch."""
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, ttl_ms=ttl_ms))


def durability(number: int) -> Any:
    """A level by its number, known or not."""
    return cast("Any", number)


INVALID = {
    "empty key": Case(put(b""), "key", "must not be empty"),
    "empty key of a get": Case(get(b""), "key", "must not be empty"),
    "empty key of a delete": Case(delete(b""), "key", "must not be empty"),
    "empty key among many": Case(batch_get(KEY, b""), "keys[1]", "must not be empty"),
    "empty key in a batch": Case(
        write(put_change(), put_change(b"")), "changes[1].put.key", "empty"
    ),
    "long key": Case(put(LONG_KEY), "key", "65537 bytes, and a key has 65536 at most"),
    "long key of a get": Case(get(LONG_KEY), "key", "65536 at most"),
    "long key in a batch": Case(
        write(kv_pb2.Change(delete=kv_pb2.DeleteChange(key=LONG_KEY))),
        "changes[0].delete.key",
        "65536 at most",
    ),
    "long start": Case(scan(LONG_KEY), "range.start", "65536 at most"),
    "long value": Case(
        put(value=bytes(LIMITS.value_bytes_max + 1)),
        "value",
        "3145729 bytes, and value_bytes_max is 3145728",
    ),
    "long value in a batch": Case(
        write(put_change(value=bytes(LIMITS.value_bytes_max + 1))),
        "changes[0].put.value",
        "value_bytes_max is 3145728",
    ),
    "unknown durability": Case(
        put(durability=durability(UNKNOWN)), "durability", "99 is not a known value"
    ),
    "quorum without safekeepers": Case(
        delete(durability=durability(kv_pb2.DURABILITY_QUORUM)), "durability", "no safekeepers"
    ),
    "unknown read level": Case(get(read_level=UNKNOWN), "header.read_level", "99 is not a known"),
    "start after end": Case(scan(b"b", b"a"), "range.start", "after its end"),
    "prefix and start": Case(scan(b"a", prefix=b"a"), "range.prefix", "excludes start and end"),
    "prefix and end": Case(scan(end=b"b", prefix=b"a"), "range.prefix", "excludes start and end"),
    "unset oneof": Case(write(put_change(), kv_pb2.Change()), "changes[1]", "no change is set"),
    "empty batch": Case(write(), "changes", "at least one is needed"),
    "no keys": Case(batch_get(), "keys", "at least one is needed"),
    "too many changes": Case(
        write(*[put_change()] * (LIMITS.batch_count_max + 1)),
        "changes",
        "10001 of them, and batch_count_max is 10000",
    ),
    "too many keys": Case(
        batch_get(*[KEY] * (LIMITS.batch_count_max + 1)), "keys", "batch_count_max is 10000"
    ),
}

ABSENT = {
    "time to live": Case(put(ttl_ms=1), "ttl_ms", ""),
    "time to live in a batch": Case(write(put_change(ttl_ms=1)), "changes[0].put.ttl_ms", ""),
    "precondition": Case(put(precondition=kv_pb2.Precondition(absent=True)), "precondition", ""),
    "precondition of a delete": Case(
        delete(precondition=kv_pb2.Precondition(present=True)), "precondition", ""
    ),
    "idempotency key": Case(
        put(header=kv_pb2.RequestHeader(idempotency_key=b"once")), "header.idempotency_key", ""
    ),
    "snapshot": Case(get(snapshot_id=bytes(16)), "header.snapshot_id", ""),
    "page token": Case(scan(page_token=b"next"), "page_token", ""),
    "counter": Case(
        write(kv_pb2.Change(add=kv_pb2.AddChange(key=KEY, delta=1))), "changes[0].add", ""
    ),
    "range delete in a batch": Case(
        write(kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange())), "changes[0].delete_range", ""
    ),
    "range delete": Case(
        lambda kv: kv.DeleteRange(kv_pb2.DeleteRangeRequest(all=True)), "KV.DeleteRange", ""
    ),
    "transaction": Case(lambda kv: kv.Txn(kv_pb2.TxnRequest()), "KV.Txn", ""),
    "session": Case(lambda kv: kv.Session(iter([kv_pb2.SessionRequest()])), "KV.Session", ""),
    "watch": Case(lambda kv: kv.Watch(iter([kv_pb2.WatchRequest()])), "KV.Watch", ""),
}
