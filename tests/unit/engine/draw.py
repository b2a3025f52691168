"""Transactions and changes at random, on few keys so that they meet."""

from __future__ import annotations

from random import Random

from shalekv.core.entry import Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import (
    Add,
    Change,
    Compare,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    Operation,
    Operator,
    Put,
    SeqCompare,
    Transaction,
    ValueCompare,
)
from tests.kit.engine.commits import NOW_MS
from tests.kit.states import counter

KEYS = [b"a", b"b", b"c", b"d", b"e"]
BOUNDS = [b"", *KEYS]


class Draw:
    """What one client does."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.seen_seq = 0  # of a value that this client has heard of

    def transaction(self) -> Transaction:
        """Any transaction."""
        random = self.random
        match random.randrange(6):
            case 0:
                return Transaction([Put(self.key(), self.value())], [self.compare()])
            case 1:
                return Transaction([Add(self.key(), random.choice([1, 1, -3, 2**62]))])
            case 2:
                return Transaction([DeleteRange(self.range())])
            case 3:
                return Transaction([Get(self.key()), Get(self.key())])
            case 4:
                return Transaction(self.operations(), [EmptyCompare(self.range())], [])
            case _:
                compares = [self.compare() for _ in range(random.randrange(3))]
                return Transaction(self.operations(), compares, self.operations())

    def operations(self) -> list[Operation]:
        """Some operations, or none."""
        random = self.random
        drawn: list[Operation] = []
        for _ in range(random.randrange(4)):
            operations: list[Operation] = [
                Put(self.key(), self.value(), random.choice([0, 0, 10])),
                Delete(self.key()),
                DeleteRange(self.range()),
                Add(self.key(), 1),
                Get(self.key()),
            ]
            drawn.append(random.choice(operations))
        return drawn

    def compare(self) -> Compare:
        """Any comparison of one key."""
        random = self.random
        by = random.choice(list(Operator))
        compares: list[Compare] = [
            ExistsCompare(self.key(), exists=False),
            ExistsCompare(self.key(), exists=True),
            SeqCompare(self.key(), self.seen_seq, random.choice([Operator.EQUAL, by])),
            ValueCompare(self.key(), self.value(), by),
        ]
        return random.choice(compares)

    def key(self) -> bytes:
        return self.random.choice(KEYS)

    def value(self) -> bytes:
        return self.random.choice([b"x", b"y", counter(1), counter(2)])

    def range(self) -> KeyRange:
        """Any range, some of them empty."""
        return KeyRange(self.random.choice(BOUNDS), self.random.choice(BOUNDS))

    def changes(self) -> list[Change]:
        """What stands in a commit that is no transaction."""
        if self.random.random() < 0.7:
            return [Change(self.key(), Kind.PUT, self.value(), self.random.choice([0, 0, NOW_MS]))]
        return [Change(self.key(), Kind.TOMBSTONE)]
