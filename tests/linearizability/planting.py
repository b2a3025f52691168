"""Plants an error into a linearizable history: each kind leaves no legal order.

A history without a fitting place is left alone: the planter then returns None. Values of text are
written once (`Workload`), so one that was overwritten or deleted, for certain and in the order of
time, can't show again. "For certain" is what an answered put or delete without a condition does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import TypeAlias

from tests.linearizability.checker import judge
from tests.linearizability.operations import (
    Add,
    Call,
    Delete,
    Exists,
    Get,
    Kind,
    Put,
    Reply,
    Result,
    Seen,
    counter_value,
)

History: TypeAlias = list[Call]
Planter: TypeAlias = Callable[[Random, Sequence[Call]], History | None]


def stale_read(random: Random, history: Sequence[Call]) -> History | None:
    """A get shows what was overwritten or deleted before it began."""
    places = []
    for before, after in _overwritten(history):
        old = _written(before)
        places += [
            (get, old)
            for get in _gets(history)
            if old is not None and _key(get) == _key(after) and _precedes(after, get)
        ]
    if not places:
        return None
    get, shown = random.choice(places)
    return _with_results(history, {get: (shown,)})


def lost_write(random: Random, history: Sequence[Call]) -> History | None:
    """What was acknowledged is not there: whoever saw it sees what was there before."""
    places = []
    for before, after in _overwritten(history):
        value, old = _written(after), _written(before)
        if value is None or old is None:
            continue
        seen_by = [get for get in _gets(history) if _seen(get) == value]
        if any(_precedes(after, get) for get in seen_by):
            places.append((seen_by, old))
    if not places:
        return None
    seen_by, shown = random.choice(places)
    return _with_results(history, dict.fromkeys(seen_by, (shown,)))


def doubled_add(random: Random, history: Sequence[Call]) -> History | None:
    """An addition counts twice: in itself or not, and in all that comes after it."""
    order = list(judge(history).order)
    keys = {_key(call) for call in order if isinstance(call.operation.then[0], Add)}
    places = [
        number
        for number, call in enumerate(order)
        if call.operation.kind is Kind.ADD and _counts_only(history, _key(call))
    ]
    if not places or len(keys) != 1:
        return None
    place = random.choice(places)
    doubled = order[place].operation.then[0]
    assert isinstance(doubled, Add)
    first = place + random.choice((0, 1))
    changed: dict[Call, tuple[Result, ...]] = {}
    for call in order[first:]:
        assert call.reply is not None
        changed[call] = tuple(_raised(result, doubled.delta) for result in call.reply.results)
    return _with_results(history, changed)


def swapped_reads(random: Random, history: Sequence[Call]) -> History | None:
    """Of two gets, one after the other, the first shows the newer value."""
    places = []
    for before, after in _overwritten(history):
        old, new = _written(before), _written(after)
        if old is None or new is None:
            continue
        firsts = [get for get in _gets(history) if _seen(get) == old]
        seconds = [get for get in _gets(history) if _seen(get) == new]
        places += [(one, two) for one in firsts for two in seconds if _precedes(one, two)]
    if not places:
        return None
    first, second = random.choice(places)
    assert first.reply is not None
    assert second.reply is not None
    return _with_results(history, {first: second.reply.results, second: first.reply.results})


def second_winner(random: Random, history: Sequence[Call]) -> History | None:
    """A put is done although the key must be absent and, for certain, has a value."""
    deleted = {
        action.key
        for call in history
        for action in (*call.operation.then, *(call.operation.otherwise or ()))
        if isinstance(action, Delete)
    }
    puts = [call for call in history if _is_plain(call, Kind.PUT)]
    places = [
        call
        for call in history
        if call.operation.kind is Kind.PUT
        and call.operation.tests == (Exists(_key(call), wanted=False),)
        and call.reply is not None
        and not call.reply.succeeded
        and _key(call) not in deleted
        and any(_key(put) == _key(call) and _precedes(put, call) for put in puts)
    ]
    if not places:
        return None
    winner = random.choice(places)
    return [replace(c, reply=Reply((None,))) if c is winner else c for c in history]


def torn_batch(random: Random, history: Sequence[Call]) -> History | None:
    """A read of several keys shows one half of a batch, and of the other what was before it."""
    places = []
    for batch in history:
        if batch.operation.kind is not Kind.WRITE or batch.reply is None:
            continue
        puts = [action for action in batch.operation.then if isinstance(action, Put)]
        for read in _reads_of_all(history):
            assert read.reply is not None
            values = [result.value if isinstance(result, Seen) else b"" for result in read.results]
            shown = [values.index(put.value) for put in puts if put.value in values]
            for place in shown if len(shown) > 1 else ():
                key = read.operation.then[place].key
                olds = [
                    _written(put)
                    for put in history
                    if _is_plain(put, Kind.PUT) and _key(put) == key and _precedes(put, batch)
                ]
                places += [(read, place, old) for old in olds]
    if not places:
        return None
    read, place, old = random.choice(places)
    results = (*read.results[:place], old, *read.results[place + 1 :])
    return _with_results(history, {read: results})


PLANTERS: Mapping[str, Planter] = MappingProxyType(
    {
        "stale read": stale_read,
        "lost write": lost_write,
        "doubled add": doubled_add,
        "swapped reads": swapped_reads,
        "second winner": second_winner,
        "torn batch": torn_batch,
    }
)


def _overwritten(history: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Puts, and what took their place afterwards."""
    puts = [call for call in history if _is_plain(call, Kind.PUT)]
    deletes = [call for call in history if _is_plain(call, Kind.DELETE)]
    for before in puts:
        for after in puts + deletes:
            if _key(before) == _key(after) and _precedes(before, after):
                yield before, after


def _is_plain(call: Call, kind: Kind) -> bool:
    """Whether it was done, whatever the state."""
    is_done = call.reply is not None and call.reply.succeeded
    return call.operation.kind is kind and is_done and not call.operation.tests


def _gets(history: Sequence[Call]) -> list[Call]:
    return [call for call in history if call.operation.kind is Kind.GET]


def _reads_of_all(history: Sequence[Call]) -> list[Call]:
    kinds = (Kind.BATCH_GET, Kind.SCAN)
    return [call for call in history if call.operation.kind in kinds]


def _seen(get: Call) -> Result:
    return get.results[0]


def _written(write: Call) -> Seen | None:
    """What a get shows of a put; None: it is a delete."""
    action = write.operation.then[0]
    assert write.reply is not None
    return Seen(action.value, write.reply.seq) if isinstance(action, Put) else None


def _key(call: Call) -> bytes:
    return call.operation.then[0].key


def _precedes(first: Call, second: Call) -> bool:
    return first.ended is not None and first.ended < second.began


def _counts_only(history: Sequence[Call], key: bytes) -> bool:
    """Whether the key is only added to and read, so that at its end it shows the sum of all."""
    calls = [call for call in history if key in call.operation.keys]
    return all(
        call.reply is not None
        and not call.operation.tests
        and all(isinstance(action, Add | Get) for action in call.operation.then)
        for call in calls
    )


def _raised(result: Result, delta: int) -> Result:
    match result:
        case Seen(value, seq):
            return Seen(counter_value(int.from_bytes(value, "little", signed=True) + delta), seq)
        case int():
            return result + delta
        case None:
            return None


def _with_results(
    history: Sequence[Call], changed: Mapping[Call, tuple[Result, ...]]
) -> History | None:
    """The history in which these calls were told something else; None: nothing was changed."""
    found = []
    for call in history:
        if call in changed and call.reply is not None:
            found.append(replace(call, reply=replace(call.reply, results=changed[call])))
        else:
            found.append(call)
    return None if found == list(history) else found
