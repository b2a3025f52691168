"""The operations that are judged, and their replies, in one form for all calls.

Every call of the API that is judged is a transaction: tests, actions if all of them hold, and
actions otherwise. A get is a transaction of one action without tests; a put with a condition has
one test, and is refused if the test fails. `kind` is the call by which it is sent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Exists:
    """The key has a value, or has none."""

    key: bytes
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class SeqIs:
    """The value of the key was written by the commit with this number (not 0)."""

    key: bytes
    seq: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """The key has this value."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Read the key as it was before the changes of this operation."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Set the key."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Add:
    """Add to a counter: 8 bytes, signed, least significant first; no value counts as 0."""

    key: bytes
    delta: int


Test: TypeAlias = Exists | SeqIs | ValueIs
Action: TypeAlias = Get | Put | Delete | Add

COUNTER_BYTES = 8


def counter_value(number: int) -> bytes:
    return number.to_bytes(COUNTER_BYTES, "little", signed=True)


class Kind(enum.Enum):
    """The call by which an operation is sent.

    A scan or a delete of a range names every key that there can be in its range.
    """

    GET = "get"
    BATCH_GET = "batch_get"
    SCAN = "scan"
    PUT = "put"
    DELETE = "delete"
    DELETE_RANGE = "delete_range"
    ADD = "add"
    WRITE = "write"
    TXN = "txn"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: `otherwise` None means that it is refused where a test fails."""

    kind: Kind
    then: tuple[Action, ...]
    tests: tuple[Test, ...] = ()
    otherwise: tuple[Action, ...] | None = None

    @property
    def keys(self) -> tuple[bytes, ...]:
        parts = (*self.tests, *self.then, *(self.otherwise or ()))
        return tuple(dict.fromkeys(part.key for part in parts))

    @property
    def is_read(self) -> bool:
        return all(isinstance(action, Get) for action in (*self.then, *(self.otherwise or ())))


@dataclass(frozen=True, slots=True)
class Seen:
    """A value that was shown, and the number of its commit; None: it was not shown."""

    value: bytes
    seq: int | None = None


Result: TypeAlias = Seen | int | None  # of a get (None: no value); of an add; None: of the others


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a client: certain, since an unknown outcome has no reply."""

    results: tuple[Result, ...] = ()  # one for each action of the branch that was taken
    seq: int | None = None  # number of the commit, if one was made and reported
    succeeded: bool = True  # all tests held
    found_seq: int | None = None  # when a test failed that is refused: what it met; 0: no value
    not_a_counter: bool = False  # refused since an add met a value of another length


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of one client. Moments are counted, not measured: each is unique.

    `reply` None: the outcome is unknown. The operation may take effect at any moment after `began`,
    or never.
    """

    client: int
    operation: Operation
    began: int
    ended: int | None = None
    reply: Reply | None = None

    @property
    def results(self) -> tuple[Result, ...]:
        """The result of each action; empty if the outcome is unknown."""
        return () if self.reply is None else self.reply.results

    @property
    def branch(self) -> tuple[Action, ...]:
        if self.reply is None or self.reply.succeeded:
            return self.operation.then
        return self.operation.otherwise or ()
