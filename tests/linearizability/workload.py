"""Draws the operations of the clients of one round: any mixture on a few fresh keys.

Two keys hold text, every value unique, so that a value identifies the operation that wrote it; the
third is a counter, which in half of the rounds is only added to, so that its value is the number of
adds. A tied workload also has operations over several keys.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

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
    Seen,
    SeqIs,
    Test,
    ValueIs,
    counter_value,
)

REMEMBERED_SEQS = 3

Value = TypeVar("Value")


class Workload:
    """One round: its keys, and what its clients have learnt about them."""

    def __init__(self, random: Random, prefix: bytes, *, tied: bool = False) -> None:
        """The keys begin with `prefix`, and no other round's do.

        Operations over several keys are drawn only if it is `tied`.
        """
        self._random = random
        self._texts = (prefix + b"a", prefix + b"b")
        self._counter = prefix + b"n"
        self.keys = (*self._texts, self._counter)
        self._only_counted = random.random() < 0.5
        self._tied = tied
        self._value_count = 0
        self._values: dict[bytes, list[bytes]] = {key: [] for key in self.keys}
        self._seqs: dict[bytes, list[int]] = {key: [] for key in self.keys}
        draws: list[tuple[int, Callable[[], Operation]]] = [
            (28, self.draw_read),
            (20, self._put),
            (14, self._put_if),
            (6, self._delete),
            (4, self._delete_if),
            (16, self._add),
            (16, self._txn),
            (10 if tied else 0, lambda: self._read_all(Kind.BATCH_GET)),
            (6 if tied else 0, lambda: self._read_all(Kind.SCAN)),
            (3 if tied else 0, self._delete_all),
            (20 if tied else 0, self._write),
        ]
        self._weights = [weight for weight, _ in draws]
        self._draws = [draw for _, draw in draws]

    def draw(self) -> Operation:
        return self._random.choices(self._draws, self._weights)[0]()

    def last_reads(self) -> list[Operation]:
        """A get of each key, for when all else has ended: what was lost, shows."""
        return [Operation(Kind.GET, (Get(key),)) for key in self.keys]

    def learn(self, operation: Operation, reply: Reply) -> None:
        """Learn the numbers in a reply, which later conditions name."""
        branch = operation.then if reply.succeeded else operation.otherwise or ()
        for action, result in zip(branch, reply.results, strict=False):
            if isinstance(result, Seen) and result.seq is not None:
                self._remember(action.key, result.seq)
            elif not isinstance(action, Get) and reply.seq is not None:
                self._remember(action.key, reply.seq)

    def _remember(self, key: bytes, seq: int) -> None:
        seqs = self._seqs[key]
        if seq not in seqs:
            self._seqs[key] = sorted([*seqs, seq])[-REMEMBERED_SEQS:]

    def _key(self) -> bytes:
        only_text = self._only_counted or self._random.random() < 0.9
        return self._random.choice(self._texts if only_text else self.keys)

    def _value(self, key: bytes) -> bytes:
        self._value_count += 1
        if key == self._counter:
            value = counter_value(1000 * self._value_count)
        else:
            value = b"v%d" % self._value_count
        self._values[key].append(value)
        return value

    def draw_read(self) -> Operation:
        return Operation(Kind.GET, (Get(self._random.choice(self.keys)),))

    def _put(self) -> Operation:
        key = self._random.choice(self._texts)
        return Operation(Kind.PUT, (Put(key, self._value(key)),))

    def _put_if(self) -> Operation:
        key = self._key()
        test = self._condition(key)
        return Operation(Kind.PUT, (Put(key, self._value(key)),), (test,))

    def _delete(self) -> Operation:
        return Operation(Kind.DELETE, (Delete(self._key()),))

    def _delete_if(self) -> Operation:
        key = self._key()
        return Operation(Kind.DELETE, (Delete(key),), (self._condition(key),))

    def _add(self) -> Operation:
        key = self._counter if self._random.random() < 0.95 else self._key()
        return Operation(Kind.ADD, (self._add_to(key),))

    def _add_to(self, key: bytes) -> Add:
        return Add(key, self._random.choice((1, 1, 2, 5, 10, -3)))

    def _txn(self) -> Operation:
        if self._tied and self._random.random() < 0.5:
            return self._txn_over_keys()
        key = self._random.choice(self._texts if self._only_counted else self.keys)
        tests = (self._test(key),) if self._random.random() < 0.9 else ()
        then = self._actions(key)
        otherwise = (Get(key),) if self._random.random() < 0.8 else self._actions(key)
        return Operation(Kind.TXN, then, tests, otherwise)

    def _txn_over_keys(self) -> Operation:
        """Compare one key, or two, and change others: what no single key can show."""
        tests = tuple(self._test(key) for key in self._some_keys() if self._random.random() < 0.7)
        then = [each for key in self._some_keys() for each in self._actions(key)]
        otherwise = [Get(key) for key in self.keys]
        return Operation(Kind.TXN, tuple(then), tests, tuple(otherwise))

    def _write(self) -> Operation:
        return Operation(Kind.WRITE, tuple(self._change(key) for key in self._some_keys()))

    def _read_all(self, kind: Kind) -> Operation:
        return Operation(kind, tuple(Get(key) for key in self.keys))

    def _delete_all(self) -> Operation:
        return Operation(Kind.DELETE_RANGE, tuple(Delete(key) for key in self.keys))

    def _some_keys(self) -> list[bytes]:
        return self._random.sample(self.keys, self._random.choice((2, 2, 3)))

    def _change(self, key: bytes) -> Action:
        if key == self._counter and (self._only_counted or self._random.random() < 0.85):
            return self._add_to(key)
        if self._random.random() < 0.15:
            return Delete(key)
        return Put(key, self._value(key))

    def _actions(self, key: bytes) -> tuple[Action, ...]:
        change = self._change(key)
        return self._random.choice(((change,), (Get(key), change), (Get(key),)))

    def _condition(self, key: bytes) -> Test:
        seqs = self._seqs[key]
        if seqs and self._random.random() < 0.6:
            return SeqIs(key, self._newest_mostly(seqs))
        return Exists(key, wanted=self._random.random() < 0.5)

    def _test(self, key: bytes) -> Test:
        values = self._values[key][-3:]
        if values and self._random.random() < 0.4:
            return ValueIs(key, self._newest_mostly(values))
        return self._condition(key)

    def _newest_mostly(self, choices: list[Value]) -> Value:
        return choices[-1] if self._random.random() < 0.7 else self._random.choice(choices)
