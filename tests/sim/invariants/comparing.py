"""The model of the checker of linearizability, with what only the simulation asks for.

That is any comparison of numbers and values, values that expire, and counters that would overflow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shalekv.v1 import kv_pb2
from tests.linearizability.model import ABSENT, Changes, Model, State
from tests.linearizability.operations import (
    Action,
    Delete,
    Kind,
    Operation,
    Reply,
    Result,
    Test,
    ValueIs,
)

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
    """A value is gone, if it is there: nobody asks for that, and it has no number."""

    @classmethod
    def of(cls, key: bytes, value: bytes) -> Expiry:
        return cls(Kind.DELETE, (Delete(key),), (ValueIs(key, value),))


class ExpiringModel(Model):
    """A database of a few keys, some of whose values have a life."""

    def step(self, state: State, operation: Operation, reply: Reply | None) -> tuple[State, ...]:
        """As of any operation; an expiry takes effect where its value stands."""
        if not isinstance(operation, Expiry):
            return super().step(state, operation, reply)
        test, index = operation.tests[0], self._index[operation.tests[0].key]
        if not isinstance(test, ValueIs) or state.cells[index].value != test.value:
            return (state,)
        cells = list(state.cells)
        cells[index] = ABSENT
        return (State(state.newest_seq, tuple(cells)),)

    def _test(self, state: State, test: Test) -> tuple[list[State], list[State]]:
        if not isinstance(test, Comparison):
            return super()._test(state, test)
        cell = state.cells[self._index[test.key]]
        compare: Callable[[Any, Any], object] = _OPERATORS.get(test.by, operator.eq)
        if test.seq is None:
            is_there = cell.value is not None
            holds = bool(compare(cell.value, test.value)) if is_there else compare is operator.ne
        elif cell.seq_min != cell.seq_max:  # either may be true: nothing is learnt from it
            return [state], [state]
        else:
            holds = bool(compare(cell.seq_min, test.seq))
        return ([state], []) if holds else ([], [state])

    def _changes(
        self, state: State, actions: Sequence[Action], results: Sequence[Result] | None = None
    ) -> Changes | None:
        try:
            return super()._changes(state, actions, results)
        except OverflowError:  # a counter has no more bytes: refused as if there were none
            return None
