"""What a write changes: puts and deletes, alone or many in one commit."""

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


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key. One that has no value is not an error."""

    key: bytes


Change: TypeAlias = Put | Delete


class Batch:
    """Changes that are written in one commit: all of them or none.

    When a key is changed more than once, the last change wins.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        """A batch that begins with `changes`."""
        self._changes: list[Change] = []
        self._size_bytes = 0
        for change in changes:
            self.add(change)

    def put(self, key: bytes, value: bytes) -> Self:
        """Add a put; returns the batch, so that calls can be chained."""
        return self.add(Put(key, value))

    def delete(self, key: bytes) -> Self:
        """Add a delete; returns the batch, so that calls can be chained."""
        return self.add(Delete(key))

    def add(self, change: Change) -> Self:
        """Add a change; returns the batch, so that calls can be chained."""
        self._changes.append(change)
        self._size_bytes += len(change.key)
        if isinstance(change, Put):
            self._size_bytes += len(change.value)
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
        case Put(key, value):
            return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value))
        case Delete(key):
            return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))
