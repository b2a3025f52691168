"""What one step of the model allows, where a history would show it only in a roundabout way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.linearizability.checker import judge
from tests.linearizability.history import Recorder
from tests.linearizability.model import Model
from tests.linearizability.operations import (
    Action,
    Add,
    Delete,
    Exists,
    Get,
    Kind,
    Operation,
    Put,
    Reply,
    Result,
    Seen,
    SeqIs,
    Test,
    ValueIs,
    counter_value,
)

GET_A = Operation(Kind.GET, (Get(b"a"),))


def _write(*actions: Action) -> Operation:
    return Operation(Kind.WRITE, actions)


def _txn(test: Test, then: Sequence[Action], otherwise: Sequence[Action] = ()) -> Operation:
    return Operation(Kind.TXN, tuple(then), (test,), tuple(otherwise))


def _is_legal(*steps: tuple[Operation, Reply | None]) -> bool:
    """Whether operations, one after another in this order, can be answered so."""
    states = [Model((b"a", b"b")).initial]
    model = Model((b"a", b"b"))
    for operation, reply in steps:
        states = [after for state in states for after in model.step(state, operation, reply)]
    return bool(states)


BOTH = _write(Put(b"a", b"1"), Put(b"b", b"2"))
READ_BOTH = Operation(Kind.BATCH_GET, (Get(b"a"), Get(b"b")))


@pytest.mark.parametrize(
    ("results", "legal"),
    [
        ((Seen(b"1", 5), Seen(b"2", 5)), True),
        ((Seen(b"1", 5), Seen(b"2", 6)), False),
        ((Seen(b"1", 5), None), False),
        ((None, None), False),
    ],
)
def test_batch_is_one_commit(results: tuple[Result, ...], *, legal: bool) -> None:
    """A batch whose number was not told shows whole, and under one number."""
    assert _is_legal((BOTH, None), (READ_BOTH, Reply(results))) is legal


def test_number_of_an_earlier_commit_is_smaller() -> None:
    """What came before a commit with a number can't show a greater one."""
    put_a = _write(Put(b"a", b"1"))
    put_b = (_write(Put(b"b", b"2")), Reply((None,), 7))
    assert _is_legal((put_a, None), put_b, (GET_A, Reply((Seen(b"1", 6),))))
    assert not _is_legal((put_a, None), put_b, (GET_A, Reply((Seen(b"1", 8),))))


def test_gets_of_a_transaction_see_what_was_before() -> None:
    """In a transaction a get shows the value from before its changes, an addition what they did."""
    operation = _write(Get(b"a"), Add(b"a", 2), Get(b"a"), Add(b"a", 3))
    assert _is_legal((operation, Reply((None, 2, None, 5), 1)))
    assert not _is_legal((operation, Reply((None, 2, Seen(counter_value(2)), 5), 1)))


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        (Exists(b"a"), True),
        (Exists(b"a", wanted=False), False),
        (Exists(b"b", wanted=False), True),
        (SeqIs(b"a", 7), True),
        (SeqIs(b"a", 6), False),
        (SeqIs(b"b", 7), False),
        (ValueIs(b"a", b"1"), True),
        (ValueIs(b"a", b"2"), False),
        (ValueIs(b"b", b"1"), False),
    ],
)
def test_branch_is_that_of_the_test(test: Test, *, holds: bool) -> None:
    """A transaction takes the branch that its comparison demands, and tells so."""
    put = (_write(Put(b"a", b"1")), Reply((None,), 7))
    operation = _txn(test, [Delete(b"a")], [Get(b"a")])
    then, otherwise = Reply((None,), 8), Reply((Seen(b"1", 7),), succeeded=False)
    assert _is_legal(put, (operation, then)) is holds
    assert _is_legal(put, (operation, otherwise)) is not holds


def test_only_a_counter_is_added_to() -> None:
    """An addition to a value of another length is refused, and to nothing else."""
    add = Operation(Kind.ADD, (Add(b"a", 1),))
    refused = Reply(not_a_counter=True)
    put = (_write(Put(b"a", b"text")), Reply((None,), 7))
    assert _is_legal(put, (add, refused))
    assert not _is_legal((add, refused))
    assert not _is_legal(put, (add, Reply((1,), 8)))


def test_unknown_condition_may_turn_out_either_way() -> None:
    """Whether a number was that of a write of unknown outcome, only what is seen later tells."""
    replace = Operation(Kind.PUT, (Put(b"a", b"2"),), (SeqIs(b"a", 7),))
    put = (_write(Put(b"a", b"1")), None)
    assert _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"2", 8),))))
    assert _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"1", 5),))))
    assert not _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"2", 7),))))


def test_recorder_keeps_what_tells_something() -> None:
    """A history has what was answered, and changes of unknown outcome; reads without answer not."""
    recorder = Recorder()
    answered, forgotten = recorder.begin(0, GET_A), recorder.begin(1, BOTH)
    recorder.begin(2, BOTH)
    recorder.begin(3, GET_A)
    recorder.answer(answered, Reply((None,)))
    recorder.forget(forgotten)
    history = recorder.history()
    assert [(call.client, call.ended) for call in history] == [(0, 5), (2, None)]
    assert judge(history).is_linearizable
