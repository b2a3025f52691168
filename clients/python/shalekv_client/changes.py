"""What a write changes: puts, deletes and counters, alone or many in one commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from shalekv.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key. An empty value is a value."""

    key: bytes
    value: bytes
    ttl_ms: int = 0  # the value expires after so many milliseconds; 0: never


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key. One that has no value is not an error."""

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


Change: TypeAlias = Put | Delete | DeleteRange | Add


class Batch:
    """Changes that are written in one commit: all of them or none.

    They are applied in their order: when a key is changed more than once, the last change wins.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        """A batch that begins with `changes`."""
        self._changes: list[Change] = []
        self._size_bytes = 0
        for change in changes:
            self.append(change)

    def put(self, key: bytes, value: bytes, ttl_ms: int = 0) -> Self:
        """Add a put; returns the batch, so that calls can be chained."""
        return self.append(Put(key, value, ttl_ms))

    def delete(self, key: bytes) -> Self:
        """Add a delete; returns the batch, so that calls can be chained."""
        return self.append(Delete(key))

    def delete_range(self, *, start: bytes = b"", end: bytes = b"", prefix: bytes = b"") -> Self:
        """Add a range delete; returns the batch, so that calls can be chained."""
        return self.append(DeleteRange(start, end, prefix))

    def add(self, key: bytes, delta: int = 1) -> Self:
        """Add an addition to a counter; returns the batch, so that calls can be chained."""
        return self.append(Add(key, delta))

    def append(self, change: Change) -> Self:
        """Add a change; returns the batch, so that calls can be chained."""
        self._changes.append(change)
        self._size_bytes += _size_bytes(change)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._size_bytes

    def __len__(self) -> int:
        """How many changes there are."""
        return len(self._changes)

    def __iter__(self) -> Iterator[Change]:
        """The changes, in the order in which they were added."""
        return iter(self._changes)


def to_message(change: Change) -> kv_pb2.Change:
    """The change as the wire has it."""
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


def _size_bytes(change: Change) -> int:
    match change:
        case Put(key, value):
            return len(key) + len(value)
        case Delete(key) | Add(key):
            return len(key)
        case DeleteRange(start, end, prefix):
            return len(start) + len(end) + len(prefix)
