"""The definition itself: every order is tried. For histories of a few calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from tests.linearizability.operations import Call
from tests.linearizability.synthetic import Dictionary


def is_linearizable(history: Sequence[Call]) -> bool:
    """Whether some order of all answered calls, and of any others, is legal.

    REQUIRES: no sequence numbers.
    """
    return any(_keeps_time(order) and _is_legal(order) for order in _orders(history))


def _orders(history: Sequence[Call]) -> Iterator[tuple[Call, ...]]:
    answered = [call for call in history if call.reply is not None]
    unknown = [call for call in history if call.reply is None]
    for count in range(len(unknown) + 1):
        for some in combinations(unknown, count):
            yield from permutations([*answered, *some])


def _keeps_time(order: Sequence[Call]) -> bool:
    return not any(
        later.ended is not None and later.ended < earlier.began
        for place, earlier in enumerate(order)
        for later in order[place + 1 :]
    )


def _is_legal(order: Sequence[Call]) -> bool:
    database = Dictionary(numbered=False)
    replies = [(call.reply, database.apply(call.operation)) for call in order]
    return all(told is None or told == done for told, done in replies)
