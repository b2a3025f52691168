"""Messages of requests in one line each."""

from __future__ import annotations

from typing import Any

from shalekv.v1 import kv_pb2

Compare = kv_pb2.Compare


def put(key: bytes = b"k", value: bytes = b"", **fields: Any) -> kv_pb2.Change:
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, **fields))


def delete(key: bytes = b"k") -> kv_pb2.Change:
    return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))


def delete_range(**fields: Any) -> kv_pb2.Change:
    key_range = kv_pb2.KeyRange(**fields)
    return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=key_range))


def add(key: bytes = b"k", delta: int = 1) -> kv_pb2.Change:
    return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))


def change(changed: kv_pb2.Change) -> kv_pb2.TxnOperation:
    return kv_pb2.TxnOperation(change=changed)


def get(key: bytes = b"k", **fields: Any) -> kv_pb2.TxnOperation:
    return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=key, **fields))


def absent() -> kv_pb2.Precondition:
    return kv_pb2.Precondition(absent=True)


def present() -> kv_pb2.Precondition:
    return kv_pb2.Precondition(present=True)


def seq_equals(seq: int) -> kv_pb2.Precondition:
    """The key must have the value of this commit."""
    return kv_pb2.Precondition(seq_equals=seq)


def key_header(idempotency_key: bytes, **fields: Any) -> kv_pb2.RequestHeader:
    return kv_pb2.RequestHeader(idempotency_key=idempotency_key, **fields)
