"""The checkers of linearizability accept what has a legal order, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.linearizability import porcupine
from tests.linearizability.checker import Undecided, Violation, check, judge, partitions
from tests.linearizability.model import Model
from tests.linearizability.operations import (
    Action,
    Add,
    Call,
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

LEGAL = {
    "nothing": (),
    "read of nothing": ("0 1 get a",),
    "read of a write": ("0 1 put a x", "2 3 get a x"),
    "concurrent read sees it": ("0 3 put a x", "1 2 get a x"),
    "concurrent read does not see it": ("0 3 put a x", "1 2 get a"),
    "concurrent writes in either order": ("0 4 put a x", "1 5 put a y", "6 7 get a x"),
    "read between concurrent writes": ("0 9 put a x", "1 8 put a y", "2 3 get a y", "4 5 get a x"),
    "an end and a beginning at one moment": ("0 1 put a x", "1 2 get a"),
    "unknown write is seen": ("0 . put a x", "1 2 get a x"),
    "unknown write is not seen": ("0 . put a x", "1 2 get a"),
    "unknown write comes late": ("0 . put a x", "1 2 get a", "3 4 put a y", "5 6 get a x"),
    "unknown addition counts": ("0 . add n 5", "1 2 add n 1 6"),
    "unknown addition does not count": ("0 . add n 5", "1 2 add n 1 1"),
    "one of two creates": ("0 3 create a x", "1 2 create a y refused", "4 5 get a x"),
    "create after a delete": ("0 1 put a x", "2 3 delete a", "4 5 create a y"),
    "unknown create was refused": ("0 1 put a x", "2 . create a y", "3 4 get a x"),
    "additions in any order": ("0 9 add n 1 6", "1 8 add n 5 5"),
    "numbers of writes": ("0 1 put a x@3", "2 3 get a x@3", "4 5 put a y@9", "6 7 get a y@9"),
    "number of an unknown write": ("0 1 put a x@3", "2 . put a y", "3 4 get a y@4"),
    "replaced by number": ("0 1 put a x@3", "2 3 replace a y@4 3", "4 5 get a y@4"),
    "replaced what an unknown write put": ("0 . put a x", "1 2 replace a y@9 8", "3 4 get a y@9"),
}

ILLEGAL = {
    "read of what nobody wrote": ("0 1 get a x",),
    "read before the write": ("0 1 get a x", "2 3 put a x"),
    "write is not seen": ("0 1 put a x", "2 3 get a"),
    "overwritten value comes back": ("0 1 put a x", "2 3 put a y", "4 5 get a x"),
    "deleted value comes back": ("0 1 put a x", "2 3 delete a", "4 5 get a x"),
    "new value, then the old one": ("0 1 put a x", "2 9 put a y", "3 4 get a y", "5 6 get a x"),
    "readers disagree on the order": (
        "0 9 put a x",
        "1 8 put a y",
        "2 3 get a x",
        "4 5 get a y",
        "6 7 get a x",
    ),
    "unknown write is taken back": ("0 . put a x", "1 2 get a x", "3 4 get a"),
    "unknown write before it began": ("0 1 get a x", "2 . put a x"),
    "unknown addition counts twice": ("0 . add n 5", "1 2 add n 1 6", "3 4 add n 1 12"),
    "addition counts twice": ("0 1 add n 5 5", "2 3 add n 1 11"),
    "addition is lost": ("0 1 add n 5 5", "2 3 add n 1 1"),
    "two creates": ("0 1 create a x", "2 3 create a y"),
    "refused without a reason": ("0 1 create a x refused", "2 3 get a"),
    "numbers against the order of time": ("0 1 put a x@9", "2 3 put a y@3"),
    "numbers against what is seen": ("0 9 put a x@5", "1 8 put a y@4", "10 11 get a y@4"),
    "the number of another write": ("0 1 put a x@3", "2 3 get a x@4"),
    "two numbers for one write": ("0 . put a x", "1 2 get a x@3", "3 4 get a x@4"),
    "old number for an unknown write": ("0 1 put a x@3", "2 . put a y", "3 4 get a y@2"),
    "replaced by an old number": ("0 1 put a x@3", "2 3 put a y@4", "4 5 replace a z@5 3"),
}


def history(*lines: str) -> list[Call]:
    """The calls of some lines, each `began ended call reported`, in the order of their beginnings.

    An end of "." is an unknown outcome. `get a` alone saw no value; `x@7` has a sequence number,
    for a put its own.
    """
    return [_call(number, line) for number, line in enumerate(lines)]


def _call(client: int, line: str) -> Call:
    began, ended, *words = line.split()
    operation, reply = _parsed(*words)
    if ended == ".":
        return Call(client, operation, int(began))
    return Call(client, operation, int(began), int(ended), reply)


def _parsed(name: str, key: str, *rest: str) -> tuple[Operation, Reply]:
    at = key.encode()
    words = [*rest, "", ""]
    value, seq = _valued(words[0])
    match name:
        case "get":
            seen = Seen(value, seq) if rest else None
            return Operation(Kind.GET, (Get(at),)), Reply((seen,))
        case "put":
            return Operation(Kind.PUT, (Put(at, value),)), Reply((None,), seq)
        case "create":  # a put if absent; "refused" as the second word
            operation = Operation(Kind.PUT, (Put(at, value),), (Exists(at, wanted=False),))
            return operation, _outcome(words[1], seq)
        case "replace":  # a put if the number is that of the second word
            test = SeqIs(at, int(words[1]))
            return Operation(Kind.PUT, (Put(at, value),), (test,)), Reply((None,), seq)
        case "delete":
            return Operation(Kind.DELETE, (Delete(at),)), Reply((None,), seq)
        case "add":  # the delta, then the sum
            adds = Operation(Kind.ADD, (Add(at, int(words[0])),))
            return adds, Reply((int(words[1] or 0),))
        case _:
            raise AssertionError(name)


def _outcome(word: str, seq: int | None) -> Reply:
    return Reply(succeeded=False) if word == "refused" else Reply((None,), seq)


def _valued(word: str) -> tuple[bytes, int | None]:
    value, _, seq = word.partition("@")
    return value.encode(), int(seq) if seq else None


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    """A history with a legal order is accepted."""
    assert all(judge(part).is_linearizable for part in partitions(history(*LEGAL[name])))


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    """A history without a legal order is refused."""
    with pytest.raises(Violation, match="none of these is legal"):
        check(history(*ILLEGAL[name]))


def test_porcupine_agrees() -> None:
    """Porcupine, which shares no code with our checker, gives the same verdicts."""
    named = {**LEGAL, **ILLEGAL}
    verdicts = porcupine.judge_all(porcupine.build(), [history(*named[name]) for name in named])
    assert dict(zip(named, verdicts, strict=True)) == {name: name in LEGAL for name in named}


def test_keys_are_judged_apart() -> None:
    """An error at one key is found, whatever the history of others; tied keys stay together."""
    calls = history("0 1 put a x", "2 3 put b x", "4 5 get a", "6 7 get b x")
    assert [len(part) for part in partitions(calls)] == [2, 2]
    with pytest.raises(Violation, match=r"key=b'a'"):
        check(calls)


def test_long_search_is_given_up() -> None:
    """A search that does not end is an error of its own, and no verdict."""
    lines = [f"{n} {100 + n} put a {n}" for n in range(30)]
    calls = history(*lines, "200 201 get a x")
    with pytest.raises(Undecided):
        judge(calls, steps_max=10_000)


# Single steps of the model that a history would show only indirectly.

GET_A = Operation(Kind.GET, (Get(b"a"),))


def _write(*actions: Action) -> Operation:
    return Operation(Kind.WRITE, actions)


def _txn(test: Test, then: Sequence[Action], otherwise: Sequence[Action] = ()) -> Operation:
    return Operation(Kind.TXN, tuple(then), (test,), tuple(otherwise))


def _is_legal(*steps: tuple[Operation, Reply | None]) -> bool:
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
    """A batch with an unreported number shows whole, and under one number."""
    assert _is_legal((BOTH, None), (READ_BOTH, Reply(results))) is legal


def test_number_of_an_earlier_commit_is_smaller() -> None:
    """Earlier commits than one with a number can't show a greater one."""
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
    """A transaction takes the branch that its comparison demands, and reports that."""
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
    """Only later replies decide whether a number was that of a write of unknown outcome."""
    replace = Operation(Kind.PUT, (Put(b"a", b"2"),), (SeqIs(b"a", 7),))
    put = (_write(Put(b"a", b"1")), None)
    assert _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"2", 8),))))
    assert _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"1", 5),))))
    assert not _is_legal(put, (replace, None), (GET_A, Reply((Seen(b"2", 7),))))
