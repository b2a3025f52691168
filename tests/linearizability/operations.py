"""The operations that are judged, and what a client was told of them: one form for all calls.

Every call of the API that is judged is a transaction: tests, what is done when all of them hold,
and what is done otherwise. A get is a transaction of one action without tests; a put with a
condition has one test, and is refused where the test fails. `kind` tells as which call it is sent.
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
    """A counter as a value."""
    return number.to_bytes(COUNTER_BYTES, "little", signed=True)


class Kind(enum.Enum):
    """As which call an operation is sent.

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

    def __str__(self) -> str:
        text = f"{self.kind.value} "
        if self.tests:
            text += f"if {_listed(self.tests)} "
        text += _listed(self.then)
        return text if self.otherwise is None else f"{text} else {_listed(self.otherwise)}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A value that was shown, and the number of its commit; None: it was not shown."""

    value: bytes
    seq: int | None = None


Result: TypeAlias = Seen | int | None  # of a get (None: no value); of an add; None: of the others


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client was told: certain, since an unknown outcome has no reply."""

    results: tuple[Result, ...] = ()  # one for each action of the branch that was taken
    seq: int | None = None  # the number of the commit, where one was made and told
    succeeded: bool = True  # all tests held
    found_seq: int | None = None  # when a test failed that is refused: what it met; 0: no value
    not_a_counter: bool = False  # refused since an add met a value of another length

    def __str__(self) -> str:
        if self.not_a_counter:
            return "not a counter"
        words = [] if self.succeeded else ["failed"]
        words += [_shown(each) for each in self.results if each is not None]
        words += [] if self.seq is None else [f"seq {self.seq}"]
        words += [] if self.found_seq is None else [f"found seq {self.found_seq}"]
        return ", ".join(words) or "nothing"


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
        """What it was told of each action; nothing, if the outcome is unknown."""
        return () if self.reply is None else self.reply.results

    @property
    def branch(self) -> tuple[Action, ...]:
        if self.reply is None or self.reply.succeeded:
            return self.operation.then
        return self.operation.otherwise or ()

    def __str__(self) -> str:
        told = "outcome unknown" if self.reply is None else str(self.reply)
        until = "" if self.ended is None else self.ended
        return f"client {self.client} [{self.began}..{until}] {self.operation} -> {told}"


def _listed(parts: tuple[Test | Action, ...]) -> str:
    return "[" + ", ".join(_shown(part) for part in parts) + "]"


def _shown(part: Test | Action | Seen | int) -> str:
    match part:
        case Exists(key, wanted):
            return f"{_text(key)} {'exists' if wanted else 'is absent'}"
        case SeqIs(key, seq):
            return f"{_text(key)} has seq {seq}"
        case ValueIs(key, value):
            return f"{_text(key)} is {_text(value)}"
        case Get(key):
            return f"get {_text(key)}"
        case Put(key, value):
            return f"put {_text(key)} {_text(value)}"
        case Delete(key):
            return f"delete {_text(key)}"
        case Add(key, delta):
            return f"add {delta} to {_text(key)}"
        case Seen(value, seq):
            return f"{_text(value)}@{seq}"
        case int():
            return str(part)


def _text(data: bytes) -> str:
    if len(data) == COUNTER_BYTES:
        return f"#{int.from_bytes(data, 'little', signed=True)}"
    return data.decode(errors="replace")
