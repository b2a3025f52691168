"""Transactions, one property at a time: what is compared, changed, counted, read and refused."""

from __future__ import annotations

import operator

import pytest

from shalekv.core.entry import NO_EXPIRY, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    RESULT_FRAME_BYTES,
    Add,
    Change,
    Compare,
    Decision,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    Operation,
    Operator,
    Put,
    Read,
    SeqCompare,
    Transaction,
    ValueCompare,
)
from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    NotACounter,
    RangeTooCostly,
    ReplyTooLarge,
)
from tests.kit.states import NOW_MS, DictState, counter, entry_of, state_of

EQUAL, NOT_EQUAL, LESS, GREATER = Operator
STATE = state_of(
    entry_of(b"live", b"bb", 5),
    entry_of(b"brief", b"bb", 6, NOW_MS + 1),
    entry_of(b"expired", b"bb", 7, NOW_MS),
    entry_of(b"counter", counter(40), 8),
    entry_of(b"brief counter", counter(-2), 9, NOW_MS + 50),
    entry_of(b"expired counter", counter(1), 10, NOW_MS - 1),
)
NO_VALUE = (b"absent", b"expired")


def decide(*then: Operation, state: DictState = STATE) -> Decision:
    return Transaction(then).decide(state)


def holds(compare: Compare) -> bool:
    return Transaction([], [compare], []).decide(STATE).succeeded


@pytest.mark.parametrize("key", [b"live", b"brief"])
def test_value_is_compared_as_bytes(key: bytes) -> None:
    """Shorter is less than longer with the same beginning, and 0xff is above all letters."""
    given = [b"", b"b", b"ba", b"bb", b"bb\x00", b"c", b"\xff"]
    expected = {
        EQUAL: [b"bb"],
        NOT_EQUAL: [b"", b"b", b"ba", b"bb\x00", b"c", b"\xff"],
        LESS: [b"bb\x00", b"c", b"\xff"],
        GREATER: [b"", b"b", b"ba"],
    }
    for by in Operator:
        assert [v for v in given if holds(ValueCompare(key, v, by))] == expected[by]


@pytest.mark.parametrize("key", NO_VALUE)
@pytest.mark.parametrize("by", Operator)
def test_key_without_a_value_only_differs(key: bytes, by: Operator) -> None:
    """One that is absent, or expired by now, matches no value but by NOT_EQUAL."""
    for value in (b"", b"bb"):
        assert holds(ValueCompare(key, value, by)) is (by is NOT_EQUAL)


@pytest.mark.parametrize("by", Operator)
def test_sequence_number_is_that_of_the_value(by: Operator) -> None:
    """The number that wrote the value is compared; without a value it is 0."""
    test = {EQUAL: operator.eq, NOT_EQUAL: operator.ne, LESS: operator.lt, GREATER: operator.gt}[by]
    for key, found in ((b"live", 5), (b"brief", 6), *((key, 0) for key in NO_VALUE)):
        for given in (0, 4, 5, 6, 2**63):
            assert holds(SeqCompare(key, given, by)) is test(found, given)


def test_what_has_expired_does_not_exist() -> None:
    """A key exists while it has a value that has not expired."""
    for key, exists in ((b"live", True), (b"brief", True), *((key, False) for key in NO_VALUE)):
        assert holds(ExistsCompare(key, exists=True)) is exists
        assert holds(ExistsCompare(key, exists=False)) is not exists


def test_all_comparisons_must_hold_for_the_first_branch() -> None:
    """One that fails, wherever it stands, and the other branch is taken, and only that."""
    good, bad = ExistsCompare(b"live", exists=True), ExistsCompare(b"live", exists=False)
    for compares in ([], [good], [good, good], [bad], [bad, good], [good, bad]):
        decision = Transaction([Put(b"a", b"then")], compares, [Put(b"a", b"else")]).decide(STATE)
        assert decision.succeeded is (bad not in compares)
        value = b"else" if bad in compares else b"then"
        assert decision.changes == [Change(b"a", Kind.PUT, value)]


@pytest.mark.parametrize(
    ("compare", "condition", "found_seq"),
    [
        (ExistsCompare(b"live", exists=False), "absent", 5),
        (ExistsCompare(b"absent", exists=True), "present", 0),
        (ExistsCompare(b"expired", exists=True), "present", 0),
        (SeqCompare(b"live", 4), "seq_equals", 5),
        (SeqCompare(b"expired", 7), "seq_equals", 0),
    ],
)
def test_precondition_that_fails_is_a_refusal(
    compare: Compare, condition: str, found_seq: int
) -> None:
    """Without another branch nothing is done, and what was found is told."""
    decision = Transaction([Put(b"a", b"1")], [compare]).decide(STATE)
    assert isinstance(decision.refusal, ConditionFailed)
    assert (decision.refusal.condition, decision.refusal.found_seq) == (condition, found_seq)
    assert not decision.writes


def test_range_delete_takes_what_stood_before_it_and_nothing_after() -> None:
    """Within a commit, changes in the range go, later ones stay, and each key stands once."""
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


@pytest.mark.parametrize(
    ("key", "delta", "total", "expire_at_ms"),
    [
        (b"counter", 2, 42, NO_EXPIRY),
        (b"counter", -41, -1, NO_EXPIRY),
        (b"counter", 0, 40, NO_EXPIRY),
        (b"absent", -3, -3, NO_EXPIRY),
        (b"brief counter", 1, -1, NOW_MS + 50),
        (b"expired counter", 7, 7, NO_EXPIRY),
        (b"counter", 2**63 - 41, 2**63 - 1, NO_EXPIRY),
        (b"counter", -(2**63), 40 - 2**63, NO_EXPIRY),
        (b"absent", -(2**63), -(2**63), NO_EXPIRY),
    ],
)
def test_counter_is_added_to(key: bytes, delta: int, total: int, expire_at_ms: int) -> None:
    """Missing or expired counts as 0, the sign is kept, and so is the time to live."""
    decision = decide(Add(key, delta))
    assert decision.changes == [Change(key, Kind.PUT, counter(total), expire_at_ms)]
    assert decision.results == [total]


@pytest.mark.parametrize(
    ("key", "delta"),
    [(b"counter", 2**63 - 40), (b"brief counter", -(2**63) + 1), (b"absent", 2**63)],
)
def test_sum_beyond_64_bits_is_refused(key: bytes, delta: int) -> None:
    """At either end nothing is applied, not even what stands before it."""
    decision = decide(Put(b"a", b"1"), Add(key, delta))
    assert isinstance(decision.refusal, CounterOverflow)
    assert not decision.writes


@pytest.mark.parametrize("length", [0, 7, 9])
def test_value_of_another_length_is_no_counter(length: int) -> None:
    """Stored, or put by this very commit: 8 bytes it must be, or nothing is applied."""
    stored = state_of(entry_of(b"k", bytes(length), 1))
    for decision in (
        decide(Put(b"a", b"1"), Add(b"k", 1), state=stored),
        decide(Put(b"k", bytes(length)), Add(b"k", 1), state=state_of()),
    ):
        assert isinstance(decision.refusal, NotACounter)
        assert f"{length} bytes" in str(decision.refusal)
        assert not decision.writes


def test_counter_sees_the_changes_before_it() -> None:
    """Added to, put with a life, deleted alone or with its range: in the order of the commit."""
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


def test_gets_read_what_was_before_the_transaction() -> None:
    """Wherever a get stands, it does not see the changes of its own commit, nor what expired."""
    decision = decide(
        Put(b"live", b"new"), Get(b"live"), DeleteRange(KeyRange(b"", b"")), Get(b"brief"),
        Get(b"expired"), Get(b"absent"), Add(b"counter", 1), Get(b"counter"),
    )  # fmt: skip
    assert decision.results == [
        None,
        Read(STATE.entries[b"live"]),
        None,
        Read(STATE.entries[b"brief"]),
        Read(None),
        Read(None),
        1,
        Read(STATE.entries[b"counter"]),
    ]


def test_reply_that_would_be_too_large_is_refused() -> None:
    """What is read, and a frame for each get, found or not, fits the limit, or nothing is done."""
    gets = [Get(b"live"), Get(b"absent"), Get(b"counter")]
    fits = 2 + 8 + 3 * RESULT_FRAME_BYTES
    assert Transaction(gets, results_bytes_max=fits).decide(STATE).refusal is None
    decision = Transaction([*gets, Put(b"a", b"1")], results_bytes_max=fits - 1).decide(STATE)
    assert isinstance(decision.refusal, ReplyTooLarge)
    assert not decision.writes


def test_refusal_keeps_nothing_of_the_state() -> None:
    """It is kept for those who ask again, and a traceback would keep the state with it."""
    decision = decide(Add(b"live", 1))
    assert isinstance(decision.refusal, NotACounter)
    assert decision.refusal.__traceback__ is None


def test_costly_range_is_a_refusal() -> None:
    """What the state refuses to look at refuses the transaction, whichever branches it has."""
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
        (Transaction([Put(b"a", b"1")], [ExistsCompare(b"a", exists=False)]), True),
        (Transaction([], [EmptyCompare(KeyRange(b"", b""))], []), True),
    ],
)
def test_what_rests_on_state(transaction: Transaction, rests: bool) -> None:  # noqa: FBT001 - what is expected
    """Only what compares, reads or counts depends on the commits before it."""
    assert transaction.rests_on_state is rests
