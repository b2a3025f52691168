"""The changes of writes, and their conditions.

Changes are puts, deletes, range deletes, additions to counters and changes of an expiry, alone or
many in one commit. Conditions belong to a put or a delete, whose key they are about, or to a
transaction, where they name their key.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from shalekv.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key. The value may be empty."""

    key: bytes
    value: bytes
    ttl_ms: int = 0  # the value expires after so many milliseconds; 0: never


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key. A key without a value is not an error."""

    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Deletes the keys from `start` to `end` (exclusive), or those that begin with `prefix`.

    An empty `start` or `end` means the first or last of all keys; all keys at once are refused.
    """

    start: bytes = b""
    end: bytes = b""
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class Add:
    """Adds to a counter: a value of 8 bytes, a signed integer, least significant byte first.

    A key without a value counts as 0.
    """

    key: bytes
    delta: int = 1


@dataclass(frozen=True, slots=True)
class Touch:
    """Changes when the value of a key expires, and not the value. Without a value it does nothing.

    The value gets the sequence number of the commit, and watches see a put.
    """

    key: bytes
    ttl_ms: int = 0  # the value expires after so many milliseconds from now on; 0: never


Change: TypeAlias = Put | Delete | DeleteRange | Add | Touch


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key inside a transaction, as it was before the changes of the transaction."""

    key: bytes


TxnOperation: TypeAlias = Get | Change


class Batch:
    """Changes that are written in one commit: all of them or none.

    They are applied in order: when a key is changed more than once, the last change wins.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        """Create a batch that begins with `changes`."""
        self._changes: list[Change] = []
        self._size_bytes = 0
        for change in changes:
            self.append(change)

    def put(self, key: bytes, value: bytes, ttl_ms: int = 0) -> Self:
        """Add a put; return the batch, so that calls can be chained."""
        return self.append(Put(key, value, ttl_ms))

    def delete(self, key: bytes) -> Self:
        """Add a delete; return the batch, so that calls can be chained."""
        return self.append(Delete(key))

    def delete_range(self, *, start: bytes = b"", end: bytes = b"", prefix: bytes = b"") -> Self:
        """Add a range delete; return the batch, so that calls can be chained."""
        return self.append(DeleteRange(start, end, prefix))

    def add(self, key: bytes, delta: int = 1) -> Self:
        """Add an addition to a counter; return the batch, so that calls can be chained."""
        return self.append(Add(key, delta))

    def touch(self, key: bytes, ttl_ms: int = 0) -> Self:
        """Add a change of an expiry; return the batch, so that calls can be chained."""
        return self.append(Touch(key, ttl_ms))

    def append(self, change: Change) -> Self:
        """Add a change; return the batch, so that calls can be chained."""
        self._changes.append(change)
        self._size_bytes += _size_bytes(change)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._size_bytes

    def __len__(self) -> int:
        """Return the number of changes."""
        return len(self._changes)

    def __iter__(self) -> Iterator[Change]:
        """Iterate over the changes, in the order in which they were added."""
        return iter(self._changes)


def to_message(change: Change) -> kv_pb2.Change:
    """Encode a change as a message."""
    match change:
        case Put(key, value, ttl_ms):
            return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, ttl_ms=ttl_ms))
        case Delete(key):
            return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))
        case DeleteRange(start, end, prefix):
            keys = kv_pb2.KeyRange(start=start, end=end, prefix=prefix)
            return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=keys))
        case Add(key, delta):
            return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))
        case Touch(key, ttl_ms):
            return kv_pb2.Change(touch=kv_pb2.TouchChange(key=key, ttl_ms=ttl_ms))


def txn_operation(operation: TxnOperation) -> kv_pb2.TxnOperation:
    """Encode an operation of a transaction as a message."""
    if isinstance(operation, Get):
        return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=operation.key))
    return kv_pb2.TxnOperation(change=to_message(operation))


def _size_bytes(change: Change) -> int:
    match change:
        case Put(key, value):
            return len(key) + len(value)
        case Delete(key) | Add(key) | Touch(key):
            return len(key)
        case DeleteRange(start, end, prefix):
            return len(start) + len(end) + len(prefix)


class Operator(enum.Enum):
    """Relation of the stored value to the given one. The numbers are those of the protocol."""

    EQUAL = 1
    NOT_EQUAL = 2
    LESS = 3  # the stored value is less than the given one
    GREATER = 4  # the stored value is greater than the given one


@dataclass(frozen=True, slots=True)
class Exists:
    """The key has a value."""

    key: bytes = b""  # not given: that of the put or delete; a transaction needs it


@dataclass(frozen=True, slots=True)
class Missing:
    """The key has no value."""

    key: bytes = b""  # as in `Exists`


@dataclass(frozen=True, slots=True)
class SeqIs:
    """The key's value is from the commit `seq`; 0: the key has no value.

    In a transaction `op` may be another relation between the value's sequence number and `seq`.
    """

    key: bytes = b""  # as in `Exists`
    seq: int = field(kw_only=True)
    op: Operator = field(default=Operator.EQUAL, kw_only=True)


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Compares the value. A key without a value never matches, except by NOT_EQUAL."""

    key: bytes
    value: bytes
    op: Operator = Operator.EQUAL


@dataclass(frozen=True, slots=True)
class RangeEmpty:
    """No key from `start` to `end` (exclusive), or with the prefix, has a value."""

    start: bytes = b""
    end: bytes = b""
    prefix: bytes = b""


Condition: TypeAlias = Exists | Missing | SeqIs  # of a put, a delete, or a transaction
Compare: TypeAlias = Condition | ValueIs | RangeEmpty  # of a transaction


def precondition(condition: Condition, key: bytes) -> kv_pb2.Precondition:
    """Encode the condition of a put or delete of `key`.

    Raises ValueError for one that only a transaction can have.
    """
    match condition:
        case Exists(other) | Missing(other) | SeqIs(other) if other not in {b"", key}:
            raise ValueError(
                f"a condition of a put or delete is about its own key, {key!r}, and not about "
                f"{other!r}: use txn()"
            )
        case Missing() | SeqIs(seq=0, op=Operator.EQUAL):
            return kv_pb2.Precondition(absent=True)
        case Exists():
            return kv_pb2.Precondition(present=True)
        case SeqIs(seq=seq, op=Operator.EQUAL):
            return kv_pb2.Precondition(seq_equals=seq)
        case _:  # never None, which would write without a condition
            raise ValueError(f"{condition!r} is no condition of a put or delete: use txn()")


def comparison(compare: Compare) -> kv_pb2.Compare:
    """Encode a condition of a transaction. Raises ValueError: it has no key."""
    if not isinstance(compare, RangeEmpty) and not compare.key:
        raise ValueError(f"{compare!r} has no key: in a transaction a condition needs one")
    match compare:
        case SeqIs(key, seq=seq, op=op):
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
