"""Histories of a database that does not exist: what the checkers are tested with.

A dictionary does each operation at one moment between its beginning and its end, so every history
is linearizable. An operation whose outcome is unknown is done late, while its client goes on
already, or never.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.linearizability.history import Recorder, Ticket
from tests.linearizability.operations import (
    COUNTER_BYTES,
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
    counter_value,
)
from tests.linearizability.workload import ALL_KINDS, UNTIED_KINDS, Workload

LATE = 20  # times as long as usual takes an operation whose outcome is unknown


class Dictionary:
    """A database at one moment after another."""

    def __init__(self, *, numbered: bool = True) -> None:
        """It is empty. Replies tell sequence numbers if it is `numbered`."""
        self._numbered = numbered
        self._values: dict[bytes, tuple[bytes, int]] = {}
        self._newest_seq = 100

    def apply(self, operation: Operation) -> Reply:
        """Do the operation, whole, now."""
        failed = next((test for test in operation.tests if not self._holds(test)), None)
        if failed is not None and operation.otherwise is None:
            found_seq = self._values.get(failed.key, (b"", 0))[1]
            return Reply((), succeeded=False, found_seq=found_seq if self._numbered else None)
        actions = operation.then if failed is None else operation.otherwise or ()
        return self._do(actions, succeeded=failed is None)

    def _holds(self, test: Test) -> bool:
        value, seq = self._values.get(test.key, (None, 0))
        match test:
            case Exists(_, wanted):
                return (value is not None) == wanted
            case SeqIs():
                return seq == test.seq
            case _:
                return value == test.value

    def _do(self, actions: tuple[Action, ...], *, succeeded: bool) -> Reply:
        after = dict(self._values)
        seq = self._newest_seq + 7
        results: list[Result] = []
        for action in actions:
            result: Result = None
            match action:
                case Get(key):
                    if key in self._values:
                        value, found_seq = self._values[key]
                        result = Seen(value, found_seq if self._numbered else None)
                case Put(key, value):
                    after[key] = value, seq
                case Delete(key):
                    after.pop(key, None)
                case Add(key, delta):
                    value, _ = after.get(key, (counter_value(0), 0))
                    if len(value) != COUNTER_BYTES:
                        return Reply(succeeded=succeeded, not_a_counter=True)
                    result = int.from_bytes(value, "little", signed=True) + delta
                    after[key] = counter_value(result), seq
            results.append(result)
        if all(isinstance(action, Get) for action in actions):
            return Reply(tuple(results), succeeded=succeeded)
        self._values, self._newest_seq = after, seq
        return Reply(tuple(results), seq if self._numbered else None, succeeded)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a synthetic history is like."""

    clients: int = 8
    operations: int = 15  # of each client
    unknown: float = 0.03  # how many outcomes are unknown
    tied: bool = False
    numbered: bool = True
    without: frozenset[Kind] = frozenset()  # operations that nobody sends


class Simulation:
    """Clients and a dictionary in a time of their own."""

    def __init__(self, random: Random, shape: Shape) -> None:
        """Use `generate`."""
        self._random = random
        self._shape = shape
        kinds = (ALL_KINDS if shape.tied else UNTIED_KINDS) - shape.without
        self._workload = Workload(random, b"", tied=shape.tied, kinds=kinds)
        self._database = Dictionary(numbered=shape.numbered)
        self._recorder = Recorder()
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0

    def run(self) -> list[Call]:
        """The history, with a read of each key at its end."""
        for client in range(self._shape.clients):
            self._after(1, self._begin_next(client, self._shape.operations))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for operation in self._workload.last_reads():
            ticket = self._recorder.begin(0, operation)
            self._recorder.answer(ticket, self._database.apply(operation))
        return self._recorder.history()

    def _begin_next(self, client: int, left: int) -> Callable[[], None]:
        def begin() -> None:
            if not left:
                return
            operation = self._workload.draw()
            ticket = self._recorder.begin(client, operation)
            go_on = self._begin_next(client, left - 1)
            if self._random.random() >= self._shape.unknown:
                self._after(1, lambda: self._do(operation, ticket, go_on))
                return
            self._after(1, go_on)
            if self._random.random() < 0.5:
                self._after(self._random.choice((1, LATE)), self._do_unseen(operation))

        return begin

    def _do(self, operation: Operation, ticket: Ticket, go_on: Callable[[], None]) -> None:
        reply = self._database.apply(operation)

        def answer() -> None:
            self._recorder.answer(ticket, reply)
            self._workload.learn(operation, reply)
            self._after(0.2, go_on)

        self._after(1, answer)

    def _do_unseen(self, operation: Operation) -> Callable[[], None]:
        def do() -> None:
            self._database.apply(operation)

        return do

    def _after(self, mean: float, event: Callable[[], None]) -> None:
        self._event_count += 1
        at = self._now + self._random.expovariate(1 / mean)
        heapq.heappush(self._events, (at, self._event_count, event))


def generate(random: Random, shape: Shape) -> list[Call]:
    """A history that is linearizable."""
    return Simulation(random, shape).run()
