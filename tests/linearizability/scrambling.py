"""Changes a history at random: what comes out may be linearizable or not.

Checkers that disagree about such a history have shown that one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.linearizability.operations import Call, Get, Reply, Result, Seen

EDITS_MAX = 3


def scramble(random: Random, history: Sequence[Call]) -> list[Call]:
    """The history with one to three changes."""
    calls = list(history)
    for _ in range(random.randint(1, EDITS_MAX)):
        place = random.randrange(len(calls))
        edit = random.choice((_show_other, _renumber, _turn, _narrow, _forget_outcome, _swap))
        edit(random, calls, place)
    return calls


def _show_other(random: Random, calls: list[Call], place: int) -> None:
    """A result becomes one that another call was told, or another number."""
    reply, branch = calls[place].reply, calls[place].branch
    if reply is None or not reply.results:
        return
    number = random.randrange(len(reply.results))
    result: Result = reply.results[number]
    if isinstance(result, int):
        result += random.choice((-1, 1, 2, 5, 10))
    elif isinstance(branch[number], Get):
        shown = [each for call in calls for each in call.results if isinstance(each, Seen)]
        result = random.choice([None, *shown])
    results = (*reply.results[:number], result, *reply.results[number + 1 :])
    _tell(calls, place, replace(reply, results=results))


def _renumber(random: Random, calls: list[Call], place: int) -> None:
    """The number of a commit becomes another one, is told twice, or is not told."""
    reply = calls[place].reply
    if reply is None or reply.seq is None:
        return
    others = [call.reply.seq for call in calls if call.reply is not None]
    seq = random.choice((reply.seq + 1, reply.seq - 1, reply.seq + 8, None, random.choice(others)))
    _tell(calls, place, replace(reply, seq=seq))


def _turn(random: Random, calls: list[Call], place: int) -> None:
    """What was done was refused, or the other way round."""
    call = calls[place]
    if call.reply is None or not call.operation.tests:
        return
    succeeded = not call.reply.succeeded
    branch = call.operation.then if succeeded else call.operation.otherwise or ()
    is_refused = not succeeded and call.operation.otherwise is None
    is_numbered = call.reply.seq is not None
    found_seq = random.choice((None, 0, call.reply.seq)) if is_refused and is_numbered else None
    _tell(calls, place, Reply((None,) * len(branch), None, succeeded, found_seq))


def _narrow(random: Random, calls: list[Call], place: int) -> None:
    """A call began later, or ended earlier, than it did."""
    call = calls[place]
    if call.ended is None:
        return
    moment = random.randint(call.began, call.ended)
    if random.random() < 0.5:
        calls[place] = replace(call, began=moment)
    else:
        calls[place] = replace(call, ended=moment)


def _forget_outcome(_: Random, calls: list[Call], place: int) -> None:
    """The client was told nothing."""
    if not calls[place].operation.is_read:
        calls[place] = replace(calls[place], ended=None, reply=None)


def _swap(random: Random, calls: list[Call], place: int) -> None:
    """Two calls of one form were told each other's reply."""
    one = calls[place]

    def form(call: Call) -> object:
        succeeded = call.reply is not None and call.reply.succeeded
        return succeeded, [(type(each), each.key) for each in call.branch]

    alike = [n for n, call in enumerate(calls) if call.reply and form(call) == form(one)]
    if one.reply is None or not alike:
        return
    other = random.choice(alike)
    mine, others = one.reply, calls[other].reply
    assert others is not None
    _tell(calls, place, others)
    _tell(calls, other, mine)


def _tell(calls: list[Call], place: int, reply: Reply) -> None:
    calls[place] = replace(calls[place], reply=reply)
