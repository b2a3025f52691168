"""Tests of transactions: comparisons, changes, counters, reads and refusals."""

from __future__ import annotations

import pytest

from shalekv.errors import (
    InvalidRequest,
    NotACounter,
    RangeTooCostly,
    ReplyTooLarge,
)
from shalekv.protocol.entry import KeyRange, Kind
from shalekv.protocol.transaction import (
    RESULT_FRAME_BYTES,
    Add,
    Change,
    Decision,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    KeyCount,
    Operation,
    Put,
    Touch,
    Touched,
    Transaction,
)
from tests.kit.states import NOW_MS, DictState, counter, entry_of, state_of

STATE = state_of(
    entry_of(b"live", b"bb", 5),
    entry_of(b"expired", b"bb", 7, NOW_MS),
    entry_of(b"counter", counter(40), 8),
)


def decide(*then: Operation, state: DictState = STATE) -> Decision:
    return Transaction(then).decide(state)


def test_range_delete_takes_what_stood_before_it_and_nothing_after() -> None:
    """A range delete drops earlier changes of the commit in its range, and no later ones."""
    decision = decide(
        Put(b"a", b"1"), Put(b"b", b"1"), Delete(b"c"), Add(b"d", 1), Put(b"e", b"1"),
        DeleteRange(KeyRange(b"b", b"e")),
        Put(b"c", b"2"), Put(b"e", b"2"),
    )  # fmt: skip
    assert decision.deleted == [KeyRange(b"b", b"e")]
    assert list(decision.changes) == [
        Change(b"a", Kind.PUT, b"1"),
        Change(b"e", Kind.PUT, b"2"),
        Change(b"c", Kind.PUT, b"2"),
    ]


def test_counter_sees_the_changes_before_it() -> None:
    """A counter follows the puts, adds and deletes of its commit in their order."""
    decision = decide(
        Add(b"counter", 1), Add(b"counter", 1),
        Delete(b"counter"), Add(b"counter", 5),
        Put(b"counter", counter(7), 30), Add(b"counter", 1),
        DeleteRange(KeyRange(b"c", b"d")), Add(b"counter", 3),
    )  # fmt: skip
    assert [result for result in decision.results if result is not None] == [41, 42, 5, 8, 3]
    assert decision.changes == [Change(b"counter", Kind.PUT, counter(3))]
    with_life = decide(Put(b"counter", counter(7), 30), Add(b"counter", 1))
    assert with_life.changes == [Change(b"counter", Kind.PUT, counter(8), NOW_MS + 30)]


def test_touch_sees_the_changes_before_it() -> None:
    """A touch writes the value again, as the commit has it by then; nothing where there is none."""
    decision = decide(
        Touch(b"live", 30), Touch(b"absent", 30), Touch(b"expired"),
        Put(b"a", b"1"), Touch(b"a", 5), Touch(b"a", 7),
        Add(b"counter", 1), Touch(b"counter"),
        Put(b"b", b"1"), DeleteRange(KeyRange(b"b", b"c")), Touch(b"b", 5),
        Delete(b"d"), Touch(b"d", 5),
    )  # fmt: skip
    touched = [result.has_value for result in decision.results if isinstance(result, Touched)]
    assert touched == [True, False, False, True, True, True, False, False]
    assert list(decision.changes) == [
        Change(b"live", Kind.PUT, b"bb", NOW_MS + 30),
        Change(b"a", Kind.PUT, b"1", NOW_MS + 7),
        Change(b"counter", Kind.PUT, counter(41)),
        Change(b"d", Kind.TOMBSTONE),
    ]
    assert not decide(Touch(b"absent")).writes


def test_values_that_are_touched_are_bounded() -> None:
    """What touches write again counts once for a key, unless the commit has put it itself."""
    touches: list[Operation] = [
        Touch(b"live"), Touch(b"live", 5), Put(b"a", b"1"), Touch(b"a"), Touch(b"counter"),
    ]  # fmt: skip
    decision = Transaction(touches, touched_bytes_max=10).decide(STATE)
    assert (decision.refusal, decision.touched_bytes) == (None, 10)
    refused = Transaction(touches, touched_bytes_max=9).decide(STATE)
    assert isinstance(refused.refusal, InvalidRequest)
    assert not refused.writes


def test_counted_deletes_tell_what_was_there_before() -> None:
    """They count values of the state, and not those of the commit; others have no result."""
    decision = decide(
        Delete(b"live", is_counted=True), Delete(b"expired", is_counted=True), Delete(b"live"),
        DeleteRange(KeyRange(b"", b""), is_counted=True), DeleteRange(KeyRange(b"", b"")),
    )  # fmt: skip
    assert decision.results == [KeyCount(1), KeyCount(0), None, KeyCount(2), None]


def test_needs_of_what_is_counted() -> None:
    """The keys of touches and the ranges of counted deletes are read, and of no others."""
    keys = KeyRange(b"a", b"b")
    plain = Transaction([Delete(b"x"), DeleteRange(keys), Put(b"y", b"")]).needs()
    assert (plain.keys, plain.ranges, plain.counts_ranges) == ((), (), False)
    compared = Transaction([Touch(b"x")], [EmptyCompare(keys)]).needs()
    assert (compared.keys, compared.ranges, compared.counts_ranges) == ((b"x",), (keys,), False)
    counted = Transaction([Delete(b"x", is_counted=True), DeleteRange(keys, is_counted=True)])
    needs = counted.needs()
    assert (needs.keys, needs.ranges, needs.counts_ranges) == ((b"x",), (keys,), True)


def test_reply_that_would_be_too_large_is_refused() -> None:
    """Values and a frame for each get must fit the limit, or the transaction is refused."""
    gets = [Get(b"live"), Get(b"absent"), Get(b"counter")]
    fits = 2 + 8 + 3 * RESULT_FRAME_BYTES
    assert Transaction(gets, results_bytes_max=fits).decide(STATE).refusal is None
    decision = Transaction([*gets, Put(b"a", b"1")], results_bytes_max=fits - 1).decide(STATE)
    assert isinstance(decision.refusal, ReplyTooLarge)
    assert not decision.writes


def test_refusal_keeps_nothing_of_the_state() -> None:
    """A refusal, which is kept for retries, has no traceback: that would keep the state."""
    decision = decide(Add(b"live", 1))
    assert isinstance(decision.refusal, NotACounter)
    assert decision.refusal.__traceback__ is None


def test_costly_range_is_a_refusal() -> None:
    """A range that the state refuses to read makes the transaction a refusal."""
    compare = EmptyCompare(KeyRange(b"a", b"b"))
    decision = Transaction([], [compare], [Put(b"a", b"1")]).decide(DictState(is_costly=True))
    assert isinstance(decision.refusal, RangeTooCostly)
    assert not decision.writes


@pytest.mark.parametrize(
    ("transaction", "rests"),
    [
        (Transaction([Put(b"a", b"1", 5), Delete(b"b"), DeleteRange(KeyRange(b"a", b"b"))]), False),
        (Transaction([Get(b"a")]), True),
        (Transaction([Put(b"a", b"1"), Add(b"b", 1)]), True),
        (Transaction([Touch(b"a")]), True),
        (Transaction([Delete(b"a", is_counted=True)]), True),
        (Transaction([DeleteRange(KeyRange(b"a", b"b"), is_counted=True)]), True),
        (Transaction([Put(b"a", b"1")], [ExistsCompare(b"a", exists=False)]), True),
        (Transaction([], [EmptyCompare(KeyRange(b"", b""))], []), True),
    ],
)
def test_what_rests_on_state(transaction: Transaction, rests: bool) -> None:  # noqa: FBT001 - what is expected
    """Only a transaction that compares, reads or counts depends on the commits before it."""
    assert transaction.depends_on_state is rests
