"""What a database is to its clients: a dictionary on which one commit is done after the other.

Written without the code that it judges: operations are done one by one, word for word as the
protocol describes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Add,
    Compare,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    Operation,
    Operator,
    Put,
    SeqCompare,
    Transaction,
    ValueCompare,
)
from shalekv.errors import ConditionFailed, CounterOverflow, NotACounter, ShaleError

COUNTER_END = 2**63


class Version(NamedTuple):
    """The value of a key, when it expires (0: never), and the commit that wrote it."""

    seq: int
    value: bytes
    expire_at_ms: int = 0

    def is_visible(self, now_ms: int) -> bool:
        return not self.expire_at_ms or now_ms < self.expire_at_ms


class Written(NamedTuple):
    """A put, with the end of its life and without its beginning."""

    key: bytes
    value: bytes
    expire_at_ms: int


Effect: TypeAlias = Written | Delete | DeleteRange
State: TypeAlias = dict[bytes, Version]
Found: TypeAlias = Version | int | None


class Refused(Exception):
    """Nothing is done."""

    def __init__(self, kind: type[ShaleError]) -> None:
        super().__init__(kind.__name__)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transaction does."""

    effects: Sequence[Effect] = ()
    succeeded: bool = True
    results: Sequence[Found] = ()  # one for each operation
    counters: Sequence[int] = ()  # one for each add
    refused: type[ShaleError] | None = None


def contains(keys: KeyRange, key: bytes) -> bool:
    """Whether a key is in a range."""
    return keys.start <= key and (not keys.end or key < keys.end)


def do(state: State, effects: Sequence[Effect], seq: int) -> None:
    """Do a commit."""
    for effect in effects:
        match effect:
            case Written(key, value, expire_at_ms):
                state[key] = Version(seq, value, expire_at_ms)
            case Delete(key):
                state.pop(key, None)
            case DeleteRange(keys):
                for key in [key for key in state if contains(keys, key)]:
                    del state[key]


def state_after(commits: Mapping[int, Sequence[Effect]]) -> State:
    """What these commits make, each by its number."""
    state: State = {}
    for seq in sorted(commits):
        do(state, commits[seq], seq)
    return state


def visible(state: State, now_ms: int) -> State:
    """What can be read."""
    return {key: found for key, found in state.items() if found.is_visible(now_ms)}


def decide(transaction: Transaction, state: State, now_ms: int) -> Outcome:
    """What a transaction does to a state."""
    before = visible(state, now_ms)
    succeeded = all(holds(each, before) for each in transaction.compares)
    try:
        if succeeded:
            return done(transaction.then, before, now_ms, succeeded=True)
        if transaction.otherwise is None:
            return Outcome(refused=ConditionFailed)
        return done(transaction.otherwise, before, now_ms, succeeded=False)
    except Refused as refused:
        return Outcome(refused=refused.kind)


def done(
    operations: Sequence[Operation], before: State, now_ms: int, *, succeeded: bool
) -> Outcome:
    """The operations of a branch, one after the other."""
    now = dict(before)
    effects: list[Effect] = []
    results: list[Found] = []
    for operation in operations:
        effect: Effect | None = None
        result: Found = None
        match operation:
            case Get(key):
                result = before.get(key)
            case Put(key, value, ttl_ms):
                effect = Written(key, value, now_ms + ttl_ms if ttl_ms else 0)
            case Add(key, delta):
                result, effect = added(now.get(key), key, delta)
            case DeleteRange(keys):
                effect = operation if not keys.end or keys.start < keys.end else None
            case Delete():
                effect = operation
        if effect is not None:
            do(now, [effect], 0)
            effects.append(effect)
        results.append(result)
    counters = [result for result in results if isinstance(result, int)]
    return Outcome(effects, succeeded, results, counters)


def added(found: Version | None, key: bytes, delta: int) -> tuple[int, Written]:
    """The new value of a counter."""
    if found is not None and len(found.value) != 8:
        raise Refused(NotACounter)
    total = delta + (int.from_bytes(found.value, "little", signed=True) if found else 0)
    if not -COUNTER_END <= total < COUNTER_END:
        raise Refused(CounterOverflow)
    value = (total % 2**64).to_bytes(8, "little")
    return total, Written(key, value, found.expire_at_ms if found else 0)


def holds(compare: Compare, before: State) -> bool:
    """Whether a comparison holds."""
    match compare:
        case SeqCompare(key, given, by):
            found = before[key].seq if key in before else 0
            return compared(found, given, by)
        case ValueCompare(key, value, by):
            if key not in before:
                return by is Operator.NOT_EQUAL
            return compared(before[key].value, value, by)
        case ExistsCompare(key, exists):
            return (key in before) == exists
        case EmptyCompare(keys):
            return not any(contains(keys, key) for key in before)


def compared(found: int | bytes, given: int | bytes, by: Operator) -> bool:
    """Whether what was found stands so to what was given."""
    is_less = found < given  # type: ignore[operator]  # both are numbers, or both are bytes
    return {
        Operator.EQUAL: found == given,
        Operator.NOT_EQUAL: found != given,
        Operator.LESS: is_less,
        Operator.GREATER: not is_less and found != given,
    }[by]
