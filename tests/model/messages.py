"""Requests of the API, made from transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Add,
    Compare,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Expire,
    Get,
    Operation,
    Operator,
    Put,
    SeqCompare,
    ValueCompare,
)
from shalekv.v1 import kv_pb2

OPERATORS = {
    Operator.EQUAL: kv_pb2.Compare.OPERATOR_EQUAL,
    Operator.NOT_EQUAL: kv_pb2.Compare.OPERATOR_NOT_EQUAL,
    Operator.LESS: kv_pb2.Compare.OPERATOR_LESS,
    Operator.GREATER: kv_pb2.Compare.OPERATOR_GREATER,
}


def range_of(keys: KeyRange) -> kv_pb2.KeyRange:
    """A range."""
    return kv_pb2.KeyRange(start=keys.start, end=keys.end)


def change_of(operation: Operation) -> kv_pb2.Change:
    """A change."""
    match operation:
        case Put(key, value, ttl_ms):
            return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, ttl_ms=ttl_ms))
        case Delete(key):
            return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))
        case DeleteRange(keys):
            return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=range_of(keys)))
        case Add(key, delta):
            return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))
        case Get() | Expire():
            raise AssertionError(f"{operation} is no change that a client asks for")


def operation_of(operation: Operation) -> kv_pb2.TxnOperation:
    """An operation of a transaction."""
    if isinstance(operation, Get):
        return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=operation.key))
    return kv_pb2.TxnOperation(change=change_of(operation))


def compare_of(compare: Compare) -> kv_pb2.Compare:
    """A comparison."""
    match compare:
        case SeqCompare(key, seq, by):
            return kv_pb2.Compare(key=key, seq=seq, operator=OPERATORS[by])
        case ValueCompare(key, value, by):
            return kv_pb2.Compare(key=key, value=value, operator=OPERATORS[by])
        case ExistsCompare(key, exists):
            return kv_pb2.Compare(key=key, exists=exists)
        case EmptyCompare(keys):
            return kv_pb2.Compare(range_empty=range_of(keys))


def precondition_of(compare: Compare | None) -> kv_pb2.Precondition | None:
    """The precondition of a put or delete."""
    match compare:
        case ExistsCompare(_, exists):
            return kv_pb2.Precondition(present=True) if exists else kv_pb2.Precondition(absent=True)
        case SeqCompare(_, seq):
            return kv_pb2.Precondition(seq_equals=seq)
        case _:
            return None


def write_of(changes: Sequence[Operation], durability: Any) -> kv_pb2.WriteRequest:
    """A batch."""
    return kv_pb2.WriteRequest(changes=map(change_of, changes), durability=durability)


def txn_of(
    compares: Sequence[Compare],
    then: Sequence[Operation],
    otherwise: Sequence[Operation],
    durability: Any,
) -> kv_pb2.TxnRequest:
    """A transaction."""
    return kv_pb2.TxnRequest(
        compares=map(compare_of, compares),
        then=map(operation_of, then),
        otherwise=map(operation_of, otherwise),
        durability=durability,
    )
