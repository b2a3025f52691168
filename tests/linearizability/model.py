"""Legal replies of a database of a few keys: the sequential specification. Pure.

A state holds for each key its value and what is known of its sequence number. A reported commit
number must be greater than that of every commit before it. A commit whose number was not reported
may have any greater number, until a reply shows it. So a get that shows an old value under a new
number is refused, too.

An operation with unknown outcome is always legal: it has its effect at its moment. The search
decides whether it happens at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from shalekv.v1 import kv_pb2
from tests.linearizability.operations import (
    COUNTER_BYTES,
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

ANY_SEQ = 2**64  # greater than every number


_OPERATORS: Mapping[int, Callable[[Any, Any], bool]] = {
    kv_pb2.Compare.OPERATOR_NOT_EQUAL: operator.ne,
    kv_pb2.Compare.OPERATOR_LESS: operator.lt,
    kv_pb2.Compare.OPERATOR_GREATER: operator.gt,
}


@dataclass(frozen=True, slots=True)
class Comparison(ValueIs):
    """The number or the value of a key compares so with this one."""

    by: int
    seq: int | None  # None: the value is compared

    @classmethod
    def of(cls, compare: kv_pb2.Compare) -> Comparison:
        seq = compare.seq if compare.WhichOneof("test") == "seq" else None
        return cls(compare.key, compare.value, compare.operator, seq)


@dataclass(frozen=True, slots=True)
class Expiry(Operation):
    """Expiry of a value, if it is there: no client requests it, and it has no number."""

    @classmethod
    def of(cls, key: bytes, value: bytes) -> Expiry:
        return cls(Kind.DELETE, (Delete(key),), (ValueIs(key, value),))


class Cell(NamedTuple):
    """One key: its value, and the bounds of its number, which is known when they are equal."""

    value: bytes | None
    seq_min: int
    seq_max: int


class State(NamedTuple):
    """All keys. `newest_seq` is the least that the number of the last commit can be."""

    newest_seq: int
    cells: tuple[Cell, ...]


ABSENT = Cell(None, 0, 0)
Changes: TypeAlias = dict[int, bytes | None]


class Model:
    """The specification for some keys. States are asked for by `step`."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._index: Mapping[bytes, int] = {key: number for number, key in enumerate(keys)}

    @property
    def initial(self) -> State:
        return State(0, (ABSENT,) * len(self._index))

    def step(self, state: State, operation: Operation, reply: Reply | None) -> tuple[State, ...]:
        """The states that `state` can become by this operation with this reply; none: illegal.

        More than one only when a test compares a number that is not known.
        """
        if isinstance(operation, Expiry):
            return (self._expire(state, operation),)
        if reply is None:
            return self._step_unknown(state, operation)
        if reply.not_a_counter:
            return self._step_not_a_counter(state, operation)
        found = []
        for narrowed, holds in self._judge(state, operation.tests):
            if holds is not reply.succeeded:
                continue
            after: State | None
            if holds:
                after = self._answer(narrowed, operation.then, reply)
            elif operation.otherwise is not None:
                after = self._answer(narrowed, operation.otherwise, reply)
            else:
                after = self._refuse(narrowed, operation.tests, reply.found_seq)
            if after is not None:
                found.append(after)
        return tuple(found)

    def _expire(self, state: State, operation: Expiry) -> State:
        test, index = operation.tests[0], self._index[operation.tests[0].key]
        if not isinstance(test, ValueIs) or state.cells[index].value != test.value:
            return state
        cells = list(state.cells)
        cells[index] = ABSENT
        return State(state.newest_seq, tuple(cells))

    def _step_unknown(self, state: State, operation: Operation) -> tuple[State, ...]:
        found = []
        for narrowed, holds in self._judge(state, operation.tests):
            branch = operation.then if holds else operation.otherwise or ()
            changes = self._changes(narrowed, branch)
            if changes:
                after = _commit(narrowed, changes, None)
                if after is not None:
                    found.append(after)
            else:  # nothing to do, or refused
                found.append(narrowed)
        return tuple(found)

    def _step_not_a_counter(self, state: State, operation: Operation) -> tuple[State, ...]:
        found = []
        for narrowed, holds in self._judge(state, operation.tests):
            branch = operation.then if holds else operation.otherwise or ()
            if self._changes(narrowed, branch) is None:
                found.append(narrowed)
        return tuple(found)

    def _judge(self, state: State, tests: Sequence[Test]) -> list[tuple[State, bool]]:
        """Judge whether all tests hold: each way in which they may, with what is then known."""
        passed, failed = [state], []
        for test in tests:
            holding = []
            for each in passed:
                holds, fails = self._test(each, test)
                holding += holds
                failed += fails
            passed = holding
        return [(each, True) for each in passed] + [(each, False) for each in failed]

    def _test(self, state: State, test: Test) -> tuple[list[State], list[State]]:
        """The states in which a test holds, and those in which it fails."""
        index = self._index[test.key]
        cell = state.cells[index]
        if isinstance(test, Comparison):
            return _compare(state, cell, test)
        if isinstance(test, Exists):
            holds = (cell.value is not None) is test.wanted
        elif not isinstance(test, SeqIs):
            holds = cell.value == test.value
        elif cell.value is None or not cell.seq_min <= test.seq <= cell.seq_max:
            holds = False
        elif cell.seq_min == cell.seq_max:
            holds = True
        else:  # the number may be any within the bounds: that it is not this one is not kept
            known = _know(state, index, test.seq)
            return ([] if known is None else [known]), [state]
        return ([state], []) if holds else ([], [state])

    def _answer(self, state: State, actions: Sequence[Action], reply: Reply) -> State | None:
        """Return the part of `state` that fits these results of the actions, with their changes."""
        if len(reply.results) != len(actions):
            return None
        for action, result in zip(actions, reply.results, strict=True):
            if isinstance(action, Get):
                known = self._show(state, action.key, result)
                if known is None:
                    return None
                state = known
        changes = self._changes(state, actions, reply.results)
        if not changes:
            return state if changes is not None else None
        return _commit(state, changes, reply.seq)

    def _show(self, state: State, key: bytes, result: Result) -> State | None:
        index = self._index[key]
        cell = state.cells[index]
        if not isinstance(result, Seen):
            return state if cell.value is None else None
        if cell.value != result.value:
            return None
        return state if result.seq is None else _know(state, index, result.seq)

    def _changes(
        self, state: State, actions: Sequence[Action], results: Sequence[Result] | None = None
    ) -> Changes | None:
        """Return the changes of the actions; None: an add can't have this result, or meets no
        counter.
        """
        changes: Changes = {}
        for number, action in enumerate(actions):
            match action:
                case Put(key, value):
                    changes[self._index[key]] = value
                case Delete(key):
                    changes[self._index[key]] = None
                case Add(key, delta):
                    index = self._index[key]
                    before = changes[index] if index in changes else state.cells[index].value
                    if before is not None and len(before) != COUNTER_BYTES:
                        return None
                    total = int.from_bytes(before or b"", "little", signed=True) + delta
                    if results is not None and results[number] != total:
                        return None
                    if not -(2**63) <= total < 2**63:  # refused as if it were no counter
                        return None
                    changes[index] = counter_value(total)
                case Get():
                    pass
        return changes

    def _refuse(self, state: State, tests: Sequence[Test], found_seq: int | None) -> State | None:
        """Return what is known when an operation of one test was refused with this number."""
        if found_seq is None:
            return state
        index = self._index[tests[0].key]
        is_absent = state.cells[index].value is None
        if is_absent or not found_seq:
            return state if is_absent and not found_seq else None
        test = tests[0]
        if isinstance(test, SeqIs) and test.seq == found_seq:
            return None
        return _know(state, index, found_seq)


def _compare(state: State, cell: Cell, test: Comparison) -> tuple[list[State], list[State]]:
    compare: Callable[[Any, Any], object] = _OPERATORS.get(test.by, operator.eq)
    if test.seq is None:
        is_there = cell.value is not None
        holds = bool(compare(cell.value, test.value)) if is_there else compare is operator.ne
    elif cell.seq_min != cell.seq_max:  # either may be true: nothing is learnt from it
        return [state], [state]
    else:
        holds = bool(compare(cell.seq_min, test.seq))
    return ([state], []) if holds else ([], [state])


def _know(state: State, index: int, seq: int) -> State | None:
    """The number of a key's value is this; None: it can't be."""
    cell = state.cells[index]
    if not cell.seq_min <= seq <= cell.seq_max:
        return None
    if cell.seq_min == cell.seq_max:
        return state
    # No two commits without a number have the same `seq_min`: those that have are one commit.
    cells = tuple(
        Cell(each.value, seq, seq)
        if each.seq_min == cell.seq_min and each.seq_max == cell.seq_max
        else each
        for each in state.cells
    )
    return State(max(state.newest_seq, seq), cells)


def _commit(state: State, changes: Mapping[int, bytes | None], seq: int | None) -> State | None:
    """The state after a commit; None: its number is not greater than that of the last one."""
    if seq is not None and seq <= state.newest_seq:
        return None
    newest_seq = state.newest_seq + 1 if seq is None else seq
    seq_max = ANY_SEQ if seq is None else seq
    cells = list(state.cells)
    if seq is not None and len(cells) > 1:  # earlier commits have smaller numbers
        cells = [
            Cell(each.value, each.seq_min, seq - 1) if each.seq_max == ANY_SEQ else each
            for each in cells
        ]
    for index, value in changes.items():
        cells[index] = ABSENT if value is None else Cell(value, newest_seq, seq_max)
    return State(newest_seq, tuple(cells))
