"""Transactions against a dictionary on which operations are done one after the other."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import NO_EXPIRY, Kind
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
    Read,
    Result,
    SeqCompare,
    Transaction,
    ValueCompare,
)
from shalekv.errors import ConditionFailed, CounterOverflow, NotACounter
from tests.kit.states import NOW_MS, DictState, counter, entry_of, in_range

KEYS = st.sampled_from([b"a", b"aa", b"b", b"c", b"d"])
BOUNDS = st.just(b"") | KEYS
RANGES = st.builds(KeyRange, BOUNDS, BOUNDS)
VALUES = st.sampled_from([b"", b"x", counter(1), counter(-5), counter(2**63 - 1)])
DELTAS = st.sampled_from([1, -1, 0, 7, 2**63 - 1, -(2**63)])
LIVES_MS = st.sampled_from([0, 0, 1, 500])
EXPIRIES_MS = st.sampled_from([NO_EXPIRY, NO_EXPIRY, NOW_MS - 1, NOW_MS, NOW_MS + 1])
OPERATIONS = st.lists(
    st.one_of(
        st.builds(Get, KEYS),
        st.builds(Put, KEYS, VALUES, LIVES_MS),
        st.builds(Delete, KEYS),
        st.builds(DeleteRange, RANGES),
        st.builds(Add, KEYS, DELTAS),
    ),
    max_size=8,
)
COMPARES = st.one_of(
    st.builds(SeqCompare, KEYS, st.integers(0, 6), st.sampled_from(Operator)),
    st.builds(ValueCompare, KEYS, VALUES, st.sampled_from(Operator)),
    st.builds(ExistsCompare, KEYS, st.booleans()),
)
STATES = st.dictionaries(KEYS, st.tuples(VALUES, st.integers(1, 5), EXPIRIES_MS)).map(
    lambda found: DictState({key: entry_of(key, *fields) for key, fields in found.items()})
)
SEQ = 9  # of the commit


class Refused(Exception):
    """An operation cannot be done."""


def do(operation: Operation, state: DictState, before: DictState) -> Result:
    """One operation, done to `state`."""
    match operation:
        case Get(key):
            return Read(before.visible(key))
        case Put(key, value, ttl_ms):
            expire_at_ms = NOW_MS + ttl_ms if ttl_ms else NO_EXPIRY
            state.entries[key] = entry_of(key, value, SEQ, expire_at_ms)
        case Delete(key):
            state.entries.pop(key, None)
        case DeleteRange(keys):
            for key in [key for key in state.entries if in_range(keys, key)]:
                del state.entries[key]
        case Add(key, delta):
            found = state.visible(key)
            value, expire_at_ms = (found.value, found.expire_at_ms) if found else (bytes(8), 0)
            total = int.from_bytes(value, "little", signed=True) + delta
            if len(value) != 8 or not -(2**63) <= total < 2**63:
                raise Refused
            state.entries[key] = entry_of(key, counter(total), SEQ, expire_at_ms)
            return total
    return None


@given(state=STATES, operations=OPERATIONS)
def test_operations_are_done_in_their_order(state: DictState, operations: list[Operation]) -> None:
    """What is decided does, at once, what the operations do one after the other, or nothing."""
    expected = deepcopy(state)
    decision = Transaction(operations).decide(state)
    try:
        results = [do(operation, expected, state) for operation in operations]
    except Refused:
        assert isinstance(decision.refusal, NotACounter | CounterOverflow)
        assert not decision.writes
        return
    assert decision.refusal is None
    assert decision.results == results
    keys = [change.key for change in decision.changes]
    assert len(set(keys)) == len(keys)
    assert all(
        before.end and before.end < after.start for before, after in pairwise(decision.deleted)
    )
    state.apply(decision, SEQ)
    assert state.values() == expected.values()


@given(state=STATES, operations=OPERATIONS)
def test_nothing_is_written_without_a_change(state: DictState, operations: list[Operation]) -> None:
    """What only reads, or deletes empty ranges, writes nothing; every other change is written."""
    decision = Transaction(operations).decide(state)
    changes = [
        operation
        for operation in operations
        if not isinstance(operation, Get)
        and not (isinstance(operation, DeleteRange) and operation.keys.is_empty)
    ]
    assert decision.writes is (decision.refusal is None and bool(changes))
    assert all(change.kind in (Kind.PUT, Kind.TOMBSTONE) for change in decision.changes)


@given(
    state=STATES,
    compares=st.lists(COMPARES | st.builds(EmptyCompare, RANGES), max_size=3),
    then=OPERATIONS,
    otherwise=OPERATIONS,
)
def test_branch_is_that_of_the_comparisons(
    state: DictState, compares: list[Compare], then: list[Operation], otherwise: list[Operation]
) -> None:
    """A transaction does what its branch would do alone, and its comparisons change nothing."""
    decision = Transaction(then, compares, otherwise).decide(state)
    succeeded = all(each.holds(state) for each in compares)
    alone = Transaction(then if succeeded else otherwise).decide(state)
    assert repr(decision.refusal) == repr(alone.refusal)
    assert decision.changes == alone.changes
    assert decision.deleted == alone.deleted
    assert decision.results == alone.results
    assert decision.refusal or decision.succeeded is succeeded


@given(state=STATES, compare=COMPARES, then=OPERATIONS)
def test_refusal_tells_what_was_found(
    state: DictState, compare: Compare, then: list[Operation]
) -> None:
    """A condition that fails names the sequence number of the value, 0 if there is none."""
    refusal = Transaction(then, [compare]).decide(state).refusal
    assert isinstance(refusal, ConditionFailed) is not compare.holds(state)
    if isinstance(refusal, ConditionFailed):
        assert not isinstance(compare, EmptyCompare)
        found = state.visible(compare.key)
        assert refusal.found_seq == (found.seq if found else 0)
