"""Transactions: comparisons, then reads and changes, decided against one state. Pure.

A put with a precondition, a batch with counters and a `Txn` are all a `Transaction`: comparisons,
and the operations of the branch that they select. `Transaction.decide` can be called again if the
state has changed before the outcome was durable.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeAlias

from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    InvalidRequest,
    NotACounter,
    ReplyTooLarge,
    ShaleError,
)
from shalekv.protocol.entry import NEVER_MS, NO_EXPIRY, Entry, KeyRange, Kind, coalesced
from shalekv.wording import counted

COUNTER_BYTES = 8
RESULT_FRAME_BYTES = 40  # size of a result in a message, without the value
_COUNTER_MIN, _COUNTER_MAX = -(2**63), 2**63 - 1
_SHOWN_BYTES = 64  # longest part of a key in an error
_new: Callable[..., Entry] = tuple.__new__  # what `Entry()` calls in the end


class DatabaseState(Protocol):
    """One state of the database, by which a transaction is decided."""

    @property
    def now_ms(self) -> int:
        """The logical time, from which the TTL of new values counts."""
        ...

    @property
    def found_until_ms(self) -> int:
        """The last logical time at which no value that was found so far has expired."""
        ...

    def visible(self, key: bytes) -> Entry | None:
        """Return the version of `key` that has a value now; None if there is no value."""
        ...

    def latest(self, key: bytes) -> Entry | None:
        """Return the newest version of `key` of any kind; None if no version is known."""
        ...

    def has_keys(self, keys: KeyRange) -> bool:
        """Return whether any key of the range has a value. Raises `RangeTooCostly`."""
        ...

    def count_keys(self, keys: KeyRange) -> KeyCount:
        """Count the keys of the range that have a value; the number of keys read is limited."""
        ...


class Operator(enum.Enum):
    """The relation that a comparison demands between the found and the given operand."""

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
    """A comparison of the sequence number of a key's value; 0 if the key has no value."""

    key: bytes
    seq: int
    by: Operator = Operator.EQUAL

    def holds(self, state: DatabaseState) -> bool:
        found = state.visible(self.key)
        return _TEST[self.by](found.seq if found else 0, self.seq)


class ValueCompare(NamedTuple):
    """A comparison of the value of a key. A key without a value satisfies `NOT_EQUAL` alone."""

    key: bytes
    value: bytes
    by: Operator = Operator.EQUAL

    def holds(self, state: DatabaseState) -> bool:
        found = state.visible(self.key)
        if found is None:
            return self.by is Operator.NOT_EQUAL
        return _TEST[self.by](found.value, self.value)


class ExistsCompare(NamedTuple):
    """A test whether a key has a value, or has none."""

    key: bytes
    exists: bool

    def holds(self, state: DatabaseState) -> bool:
        return (state.visible(self.key) is not None) is self.exists


class EmptyCompare(NamedTuple):
    """A test that no key of a range has a value."""

    keys: KeyRange

    def holds(self, state: DatabaseState) -> bool:
        return not state.has_keys(self.keys)


Compare: TypeAlias = SeqCompare | ValueCompare | ExistsCompare | EmptyCompare


class Get(NamedTuple):
    """Read a key as it was before the transaction."""

    key: bytes


class Put(NamedTuple):
    """Set a key. The value expires after `ttl_ms`; 0: never."""

    key: bytes
    value: bytes
    ttl_ms: int = 0


class Delete(NamedTuple):
    """Delete a key. The result says whether it had a value before the transaction, if counted."""

    key: bytes
    is_counted: bool = False


class DeleteRange(NamedTuple):
    """Delete all keys of a range. The result is how many had a value before, if counted."""

    keys: KeyRange
    is_counted: bool = False


class Add(NamedTuple):
    """Add to a counter."""

    key: bytes
    delta: int


class Touch(NamedTuple):
    """Change when the value of a key expires: after `ttl_ms`; 0: never.

    The value is written again. A key without a value stays without one.
    """

    key: bytes
    ttl_ms: int = 0


class Expire(NamedTuple):
    """Delete a key if its newest version is an expired value, for the sweep of expired keys.

    `known` is that version, if it is known without a read of the levels.
    """

    key: bytes
    known: Entry | None = None


Operation: TypeAlias = Get | Put | Delete | DeleteRange | Add | Touch | Expire


class Read(NamedTuple):
    """The result of a get; None if there is no value."""

    entry: Entry | None


class KeyCount(NamedTuple):
    """The result of a counted delete: how many keys had a value; `has_more`: perhaps more did."""

    key_count: int
    has_more: bool = False


class Touched(NamedTuple):
    """The result of a touch: whether the key has a value."""

    has_value: bool


# Of a get, of a counted delete, of a touch, of an add, of any other operation.
Result: TypeAlias = Read | KeyCount | Touched | int | None


class Change(NamedTuple):
    """The change of one key by a commit."""

    key: bytes
    kind: Kind
    value: bytes = b""
    expire_at_ms: int = NO_EXPIRY


@dataclass(frozen=True, slots=True)
class Puts:
    """Puts without an expiry, by columns; iterated over, they are changes.

    A batch has thousands: without an object for each, it costs two thirds.
    """

    keys: Sequence[bytes]
    values: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Change]:
        return map(Change, self.keys, repeat(Kind.PUT), self.values)

    @property
    def payload_bytes(self) -> int:
        """Size of keys and values."""
        return sum(map(len, self.keys)) + sum(map(len, self.values))

    def entries(self, seq: int) -> list[Entry]:
        """Return the entries that these puts become, with one sequence number."""
        rows = zip(self.keys, repeat(seq), repeat(Kind.PUT), self.values, repeat(NO_EXPIRY))
        return [*map(_new, repeat(Entry), rows)]


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a transaction: its changes and results, or a refusal."""

    changes: Sequence[Change] = ()  # at most one for each key
    deleted: Sequence[KeyRange] = ()  # disjoint, in order; applied before `changes`
    succeeded: bool = True  # whether all comparisons held
    results: Sequence[Result] = ()  # one for each operation of the branch that was taken
    refusal: ShaleError | None = None  # the error, if nothing is applied
    found_until_ms: int = NEVER_MS  # last logical time at which no value that it found has expired
    touched_bytes: int = 0  # of the values that its touches write again

    @property
    def writes(self) -> bool:
        """Return whether the transaction changes anything."""
        return bool(self.changes or self.deleted)


@dataclass(frozen=True, slots=True)
class Needs:
    """The keys and ranges that have to be read before a write is decided."""

    keys: Sequence[bytes] = ()
    ranges: Sequence[KeyRange] = ()
    counts_ranges: bool = False  # whether the keys of `ranges` are counted
    record_key: bytes = b""  # the key of its idempotency record; empty: none


@dataclass(frozen=True, slots=True)
class Transaction:
    """Comparisons, the operations if all of them hold, and those if one fails."""

    then: Sequence[Operation]
    compares: Sequence[Compare] = ()
    otherwise: Sequence[Operation] | None = None  # None: a failed comparison is a refusal
    results_bytes_max: int = 2**63  # of all gets: values and a `RESULT_FRAME_BYTES` for each
    touched_bytes_max: int = 2**63  # of all values that are written again by touches

    @property
    def depends_on_state(self) -> bool:
        """Return whether its outcome depends on what is in the database."""
        return bool(self.compares) or any(map(_reads, self.then))

    def needs(self, record_key: bytes = b"") -> Needs:
        """Return all keys and ranges that it may read, whichever branch it takes."""
        operations = (*self.then, *(self.otherwise or ()))
        read = [e for e in operations if _reads(e) and not (isinstance(e, Expire) and e.known)]
        keys = [each.key for each in read if not isinstance(each, DeleteRange)]
        counted = [each.keys for each in read if isinstance(each, DeleteRange)]
        ranges = [each.keys for each in self.compares if isinstance(each, EmptyCompare)]
        compared = [each.key for each in self.compares if not isinstance(each, EmptyCompare)]
        return Needs((*compared, *keys), (*ranges, *counted), bool(counted), record_key)

    def decide(self, state: DatabaseState) -> Decision:
        """Decide the transaction against `state`. An error is returned as `Decision.refusal`."""
        try:
            failed = next((each for each in self.compares if not each.holds(state)), None)
            if failed is None:
                return self._run(self.then, state, succeeded=True)
            if self.otherwise is not None:
                return self._run(self.otherwise, state, succeeded=False)
        except ShaleError as refusal:
            # The traceback would keep `state` in memory for as long as the refusal is kept.
            refused = refusal.with_traceback(None)
        else:
            refused = _condition_failed(failed, state)
        return Decision(refusal=refused, found_until_ms=state.found_until_ms)

    def _run(
        self, operations: Sequence[Operation], state: DatabaseState, *, succeeded: bool
    ) -> Decision:
        draft = _Draft(state)
        results = [draft.apply(operation) for operation in operations]
        if draft.read_bytes > self.results_bytes_max:
            raise ReplyTooLarge(
                f"the results of this transaction exceed the {self.results_bytes_max} bytes of one "
                "reply: read fewer keys at once"
            )
        if draft.touched_bytes > self.touched_bytes_max:
            raise InvalidRequest(
                "touch",
                f"the values that are written again have {draft.touched_bytes} bytes, and "
                f"batch_bytes_max leaves {self.touched_bytes_max} for them: touch fewer keys at "
                "once",
            )
        return Decision(
            list(draft.changes.values()),
            coalesced(draft.deleted),
            succeeded,
            results,
            found_until_ms=state.found_until_ms,
            touched_bytes=draft.touched_bytes,
        )


def _reads(operation: Operation) -> bool:
    """Return whether an operation depends on what is in the database."""
    match operation:
        case Get() | Add() | Touch() | Expire():
            return True
        case Delete(_, is_counted) | DeleteRange(_, is_counted):
            return is_counted
        case Put():
            return False


@dataclass(slots=True)
class _Draft:
    """The changes of the operations so far, which later operations of the same commit see."""

    state: DatabaseState
    changes: dict[bytes, Change] = field(default_factory=dict)
    deleted: list[KeyRange] = field(default_factory=list)
    read_bytes: int = 0  # of the results of gets
    touched_bytes: int = 0  # of values that touches write again

    def apply(self, operation: Operation) -> Result:
        """Add the change of an operation, and return its result."""
        match operation:
            case Get(key):
                found = self.state.visible(key)
                self.read_bytes += RESULT_FRAME_BYTES + (len(found.value) if found else 0)
                return Read(found)
            case Add():
                return self.add(operation)
            case Touch():
                return Touched(self.touch(operation))
            case Put():
                self.put(operation)
            case Delete(key, is_counted):
                self.changes[key] = Change(key, Kind.TOMBSTONE)
                return KeyCount(int(self.state.visible(key) is not None)) if is_counted else None
            case DeleteRange(keys, is_counted):
                self.delete_range(keys)
                return self.state.count_keys(keys) if is_counted else None
            case Expire():
                self.expire(operation)
        return None

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
        value, expire_at_ms = self._found(add.key) or (bytes(COUNTER_BYTES), NO_EXPIRY)
        if len(value) != COUNTER_BYTES:
            raise NotACounter(
                f"nothing was changed: {_shown(add.key)} holds no counter: its value has "
                f"{counted(len(value), 'byte')}, and a counter has {COUNTER_BYTES}"
            )
        total = int.from_bytes(value, "little", signed=True) + add.delta
        if not _COUNTER_MIN <= total <= _COUNTER_MAX:
            raise CounterOverflow(
                f"nothing was changed: adding {add.delta} to {_shown(add.key)} gives {total}, "
                "which is more than a counter of 64 bits holds"
            )
        new = total.to_bytes(COUNTER_BYTES, "little", signed=True)
        self.changes[add.key] = Change(add.key, Kind.PUT, new, expire_at_ms)
        return total

    def touch(self, touch: Touch) -> bool:
        found = self._found(touch.key)
        if found is None:
            return False
        if touch.key not in self.changes:
            self.touched_bytes += len(found[0])
        self.put(Put(touch.key, found[0], touch.ttl_ms))
        return True

    def _found(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the value and the expiry of a key after the changes so far; None: no value."""
        change = self.changes.get(key)
        if change is not None and change.kind is Kind.PUT:
            return change.value, change.expire_at_ms
        is_deleted = change is not None or any(
            start <= key and (not end or key < end) for start, end in self.deleted
        )
        found = None if is_deleted else self.state.visible(key)
        return (found.value, found.expire_at_ms) if found else None


def _condition_failed(failed: Compare, state: DatabaseState) -> ConditionFailed:
    """Return the refusal of a put or delete, whose preconditions are comparisons of one key."""
    if isinstance(failed, EmptyCompare):
        raise AssertionError("a precondition compares one key")  # noqa: TRY004 (a bug, not an input)
    found = state.visible(failed.key)
    found_seq = found.seq if found else 0
    has = f"exists, with seq {found_seq}" if found else "does not exist"
    match failed:
        case ExistsCompare(_, exists):
            wanted = "present" if exists else "absent"
        case _:
            wanted = "seq_equals"
    return ConditionFailed(
        f"nothing was changed: {_shown(failed.key)} {has}",
        condition=wanted,
        found_seq=found_seq,
    )


def _shown(key: bytes) -> str:
    shown = key[:_SHOWN_BYTES]
    try:
        return f"key {shown.decode()!r}"
    except UnicodeDecodeError:
        return f"key {repr(shown)[1:]}"
