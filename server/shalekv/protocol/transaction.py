"""Transactions: compare, then read and change, decided against one state. Pure.

A put with a precondition, a batch with counters and a `Txn` are all this: comparisons, and the
operations of the branch that is taken. `decide` can be asked again when the state has changed
before the outcome became durable.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    NotACounter,
    ReplyTooLarge,
    ShaleError,
)
from shalekv.protocol.entry import NO_EXPIRY, Entry, KeyRange, Kind, coalesced

COUNTER_BYTES = 8
RESULT_FRAME_BYTES = 40  # what a result costs in a message beside the value
_COUNTER_MIN, _COUNTER_MAX = -(2**63), 2**63 - 1
_SHOWN_BYTES = 64  # of a key in an error


class DatabaseState(Protocol):
    """What a transaction is decided by: one state of the database at one moment."""

    @property
    def now_ms(self) -> int:
        """Logical time, from which the life of new values counts."""
        ...

    def visible(self, key: bytes) -> Entry | None:
        """The version of `key` that has a value now."""
        ...

    def latest(self, key: bytes) -> Entry | None:
        """The newest version of `key`, whatever it is; None: nothing is known of one."""
        ...

    def has_keys(self, keys: KeyRange) -> bool:
        """Whether any key of the range has a value. Raises `RangeTooCostly`."""
        ...


class Operator(enum.Enum):
    """How the found is compared with the given."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    GREATER = ">"


_TEST: Mapping[Operator, Callable[[Any, Any], bool]] = {
    Operator.EQUAL: operator.eq,
    Operator.NOT_EQUAL: operator.ne,
    Operator.LESS: operator.lt,
    Operator.GREATER: operator.gt,
}


class SeqCompare(NamedTuple):
    """Compares the sequence number of a key's value; 0 where it has none."""

    key: bytes
    seq: int
    by: Operator = Operator.EQUAL

    def holds(self, state: DatabaseState) -> bool:
        found = state.visible(self.key)
        return _TEST[self.by](found.seq if found else 0, self.seq)


class ValueCompare(NamedTuple):
    """Compares the value of a key; one without a value only differs."""

    key: bytes
    value: bytes
    by: Operator = Operator.EQUAL

    def holds(self, state: DatabaseState) -> bool:
        found = state.visible(self.key)
        if found is None:
            return self.by is Operator.NOT_EQUAL
        return _TEST[self.by](found.value, self.value)


class ExistsCompare(NamedTuple):
    """Whether a key has a value, or has none."""

    key: bytes
    exists: bool

    def holds(self, state: DatabaseState) -> bool:
        return (state.visible(self.key) is not None) is self.exists


class EmptyCompare(NamedTuple):
    """No key of a range has a value."""

    keys: KeyRange

    def holds(self, state: DatabaseState) -> bool:
        return not state.has_keys(self.keys)


Compare: TypeAlias = SeqCompare | ValueCompare | ExistsCompare | EmptyCompare


class Get(NamedTuple):
    """Read a key as it was before the transaction."""

    key: bytes


class Put(NamedTuple):
    """Set a key; the value lives for `ttl_ms`, 0: for ever."""

    key: bytes
    value: bytes
    ttl_ms: int = 0


class Delete(NamedTuple):
    """Delete a key."""

    key: bytes


class DeleteRange(NamedTuple):
    """Delete all keys of a range."""

    keys: KeyRange


class Add(NamedTuple):
    """Add to a counter."""

    key: bytes
    delta: int


class Expire(NamedTuple):
    """Delete a key if its newest version is a value that has expired: no request, but a sweep.

    `known` is that version, as far as it is known without a look at the levels.
    """

    key: bytes
    known: Entry | None = None


Operation: TypeAlias = Get | Put | Delete | DeleteRange | Add | Expire


class Read(NamedTuple):
    """What a get has found; None: no value."""

    entry: Entry | None


Result: TypeAlias = Read | int | None  # of a get, of an add, of anything else


class Change(NamedTuple):
    """What a commit does to one key."""

    key: bytes
    kind: Kind
    value: bytes = b""
    expire_at_ms: int = NO_EXPIRY


@dataclass(frozen=True, slots=True)
class Decision:
    """What a transaction does."""

    changes: Sequence[Change] = ()  # each key once
    deleted: Sequence[KeyRange] = ()  # disjoint, in order; `changes` come after them
    succeeded: bool = True
    results: Sequence[Result] = ()  # one for each operation of the branch that was taken
    refusal: ShaleError | None = None

    @property
    def writes(self) -> bool:
        """Whether anything is changed."""
        return bool(self.changes or self.deleted)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a write asks of the database before it is decided."""

    keys: Sequence[bytes] = ()
    ranges: Sequence[KeyRange] = ()
    record_key: bytes = b""  # that of its idempotency record; empty: none


@dataclass(frozen=True, slots=True)
class Transaction:
    """Comparisons, and what is done when all hold or one fails."""

    then: Sequence[Operation]
    compares: Sequence[Compare] = ()
    otherwise: Sequence[Operation] | None = None  # None: a comparison that fails is refused
    results_bytes_max: int = 2**63  # of all that is read, as `RESULT_FRAME_BYTES` counts it

    @property
    def rests_on_state(self) -> bool:
        """Whether its outcome depends on what is in the database."""
        return bool(self.compares) or any(isinstance(e, Get | Add | Expire) for e in self.then)

    def needs(self, record_key: bytes = b"") -> Needs:
        """What it may ask, whichever branch it takes."""
        operations = (*self.then, *(self.otherwise or ()))
        asked = [each.key for each in operations if isinstance(each, Get | Add)]
        asked += [e.key for e in operations if isinstance(e, Expire) and e.known is None]
        ranges = [each.keys for each in self.compares if isinstance(each, EmptyCompare)]
        compared = [each.key for each in self.compares if not isinstance(each, EmptyCompare)]
        return Needs((*compared, *asked), ranges, record_key)

    def decide(self, state: DatabaseState) -> Decision:
        """What it does to `state`; a refusal is an outcome, too."""
        try:
            failed = next((each for each in self.compares if not each.holds(state)), None)
            if failed is None:
                return self._done(self.then, state, succeeded=True)
            if self.otherwise is not None:
                return self._done(self.otherwise, state, succeeded=False)
        except ShaleError as refusal:
            # Its traceback would keep `state`, and what that keeps, for as long as it is kept.
            return Decision(refusal=refusal.with_traceback(None))
        return Decision(refusal=_condition_failed(failed, state))

    def _done(
        self, operations: Sequence[Operation], state: DatabaseState, *, succeeded: bool
    ) -> Decision:
        draft = _Draft(state)
        results: list[Result] = []
        left_bytes = self.results_bytes_max
        for operation in operations:
            result: Result = None
            match operation:
                case Put():
                    draft.put(operation)
                case Delete(key):
                    draft.changes[key] = Change(key, Kind.TOMBSTONE)
                case DeleteRange(keys):
                    draft.delete_range(keys)
                case Add():
                    result = draft.add(operation)
                case Expire():
                    draft.expire(operation)
                case Get(key):
                    found = state.visible(key)
                    result = Read(found)
                    left_bytes -= RESULT_FRAME_BYTES + (len(found.value) if found else 0)
            results.append(result)
        if left_bytes < 0:
            raise ReplyTooLarge(
                f"what this transaction reads passes the {self.results_bytes_max} bytes of one "
                "reply: read fewer keys at once"
            )
        return Decision(list(draft.changes.values()), coalesced(draft.deleted), succeeded, results)


@dataclass(slots=True)
class _Draft:
    """The changes so far: what later ones of the same commit see."""

    state: DatabaseState
    changes: dict[bytes, Change] = field(default_factory=dict)
    deleted: list[KeyRange] = field(default_factory=list)

    def put(self, put: Put) -> None:
        expire_at_ms = self.state.now_ms + put.ttl_ms if put.ttl_ms else NO_EXPIRY
        self.changes[put.key] = Change(put.key, Kind.PUT, put.value, expire_at_ms)

    def delete_range(self, keys: KeyRange) -> None:
        if keys.is_empty:
            return
        for key in [k for k in self.changes if keys.start <= k and (not keys.end or k < keys.end)]:
            del self.changes[key]
        self.deleted.append(keys)

    def expire(self, expire: Expire) -> None:
        found = self.state.latest(expire.key) or expire.known
        if found is None or found.kind is not Kind.PUT or not found.expire_at_ms:
            return
        if not found.is_visible(self.state.now_ms):
            change = Change(expire.key, Kind.TOMBSTONE, b"", found.expire_at_ms)
            self.changes[expire.key] = change

    def add(self, add: Add) -> int:
        value, expire_at_ms = self._counter(add.key)
        if len(value) != COUNTER_BYTES:
            raise NotACounter(
                f"the value of {_shown(add.key)} has {len(value)} bytes, and a counter has "
                f"{COUNTER_BYTES}: nothing was applied"
            )
        total = int.from_bytes(value, "little", signed=True) + add.delta
        if not _COUNTER_MIN <= total <= _COUNTER_MAX:
            raise CounterOverflow(
                f"adding {add.delta} to {_shown(add.key)} gives {total}, which is more than a "
                "counter of 64 bits holds: nothing was applied"
            )
        new = total.to_bytes(COUNTER_BYTES, "little", signed=True)
        self.changes[add.key] = Change(add.key, Kind.PUT, new, expire_at_ms)
        return total

    def _counter(self, key: bytes) -> tuple[bytes, int]:
        """The bytes and the expiry of a counter as the changes so far have left it."""
        change = self.changes.get(key)
        if change is not None and change.kind is Kind.PUT:
            return change.value, change.expire_at_ms
        is_deleted = change is not None or any(
            start <= key and (not end or key < end) for start, end in self.deleted
        )
        found = None if is_deleted else self.state.visible(key)
        return (found.value, found.expire_at_ms) if found else (bytes(COUNTER_BYTES), NO_EXPIRY)


def _condition_failed(failed: Compare, state: DatabaseState) -> ConditionFailed:
    """The refusal of a put or delete, whose preconditions are comparisons of one key."""
    if isinstance(failed, EmptyCompare):
        raise AssertionError("a precondition compares one key")  # noqa: TRY004 (a bug, not an input)
    found = state.visible(failed.key)
    found_seq = found.seq if found else 0
    has = f"has a value of sequence number {found_seq}" if found else "has no value"
    match failed:
        case ExistsCompare(_, exists):
            wanted = "present" if exists else "absent"
        case _:
            wanted = "seq_equals"
    return ConditionFailed(
        f"{_shown(failed.key)} {has}: the condition {wanted} does not hold, nothing was applied",
        condition=wanted,
        found_seq=found_seq,
    )


def _shown(key: bytes) -> str:
    return f"key {key[:_SHOWN_BYTES]!r}"
