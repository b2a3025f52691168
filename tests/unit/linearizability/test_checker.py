"""The checker accepts what is linearizable, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from tests.linearizability.checker import Undecided, Violation, check, judge, partitions
from tests.linearizability.scrambling import scramble
from tests.linearizability.synthetic import Shape, generate
from tests.unit.linearizability.brute_force import is_linearizable
from tests.unit.linearizability.histories import history

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


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    """A history with a legal order is accepted."""
    assert all(judge(part).is_linearizable for part in partitions(history(*LEGAL[name])))


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    """A history without a legal order is refused."""
    with pytest.raises(Violation, match="none of these is legal"):
        check(history(*ILLEGAL[name]))


@pytest.mark.parametrize("tied", [False, True])
def test_as_by_definition(*, tied: bool) -> None:
    """The search finds what trying every order finds."""
    shape = Shape(clients=3, operations=1, unknown=0.3, tied=tied, numbered=False)
    counts = {True: 0, False: 0}
    for seed in range(400):
        random = Random(seed)
        calls = scramble(random, generate(random, shape))
        expected = is_linearizable(calls)
        found = all(judge(part).is_linearizable for part in partitions(calls))
        assert found is expected, f"seed {seed}:\n" + "\n".join(map(str, calls))
        counts[expected] += 1
    assert min(counts.values()) >= 50, counts


def test_keys_are_judged_apart() -> None:
    """An error at one key is found whatever there is at others, and tied keys stay together."""
    calls = history("0 1 put a x", "2 3 put b x", "4 5 get a", "6 7 get b x")
    assert [len(part) for part in partitions(calls)] == [2, 2]
    with pytest.raises(Violation, match="get a"):
        check(calls)


def test_order_is_a_witness() -> None:
    """The order that is returned holds every answered call once and keeps their time."""
    for seed in range(50):
        calls = generate(Random(seed), Shape(tied=seed % 2 == 0))
        for part in partitions(calls):
            order = judge(part).order
            answered = [call for call in order if call.reply is not None]
            assert len(order) == len(set(order))
            assert set(answered) == {call for call in part if call.reply is not None}
            began = 0
            for call in order:
                began = max(began, call.began)
                assert call.ended is None or call.ended > began, f"seed {seed}: {call}"


def test_long_search_is_given_up() -> None:
    """A search that does not end is an error of its own, and no verdict."""
    lines = [f"{n} {100 + n} put a {n}" for n in range(30)]
    calls = history(*lines, "200 201 get a x")
    with pytest.raises(Undecided):
        judge(calls, steps_max=10_000)
