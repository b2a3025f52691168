"""What a write may demand: conditions of a put or delete, and the comparisons of a transaction."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from shalekv.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Absent:
    """The key must have no value."""


@dataclass(frozen=True, slots=True)
class Present:
    """The key must have a value."""


@dataclass(frozen=True, slots=True)
class SeqEquals:
    """The value must be the one that the commit with this sequence number wrote."""

    seq: int


Condition: TypeAlias = Absent | Present | SeqEquals


class Operator(enum.Enum):
    """How the found is compared with the given. The numbers are the wire's."""

    EQUAL = 1
    NOT_EQUAL = 2
    LESS = 3  # the found is less than the given
    GREATER = 4  # the found is greater than the given


@dataclass(frozen=True, slots=True)
class SeqIs:
    """Compares the sequence number of the key's value; it is 0 when the key has none."""

    key: bytes
    seq: int
    op: Operator = Operator.EQUAL


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Compares the value. A key without a value never matches, except by NOT_EQUAL."""

    key: bytes
    value: bytes
    op: Operator = Operator.EQUAL


@dataclass(frozen=True, slots=True)
class Exists:
    """The key has a value."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """The key has no value."""

    key: bytes


@dataclass(frozen=True, slots=True)
class RangeEmpty:
    """No key from `start` to `end` (exclusive), or with the prefix, has a value."""

    start: bytes = b""
    end: bytes = b""
    prefix: bytes = b""


Compare: TypeAlias = SeqIs | ValueIs | Exists | Missing | RangeEmpty


def precondition(condition: Condition) -> kv_pb2.Precondition:
    """The condition as the wire has it."""
    match condition:
        case Absent():
            return kv_pb2.Precondition(absent=True)
        case Present():
            return kv_pb2.Precondition(present=True)
        case SeqEquals(seq):
            return kv_pb2.Precondition(seq_equals=seq)


def comparison(compare: Compare) -> kv_pb2.Compare:
    """The comparison as the wire has it."""
    match compare:
        case SeqIs(key, seq, op):
            return kv_pb2.Compare(key=key, operator=_operator(op), seq=seq)
        case ValueIs(key, value, op):
            return kv_pb2.Compare(key=key, operator=_operator(op), value=value)
        case Exists(key):
            return kv_pb2.Compare(key=key, exists=True)
        case Missing(key):
            return kv_pb2.Compare(key=key, exists=False)
        case RangeEmpty(start, end, prefix):
            keys = kv_pb2.KeyRange(start=start, end=end, prefix=prefix)
            return kv_pb2.Compare(range_empty=keys)


def _operator(op: Operator) -> kv_pb2.Compare.Operator.ValueType:
    return kv_pb2.Compare.Operator.ValueType(op.value)
