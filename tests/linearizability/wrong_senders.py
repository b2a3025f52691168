"""Clients that break a promise of the database, as a broken database would: to be found out."""

from __future__ import annotations

from random import Random

from tests.linearizability.operations import Kind, Operation, Reply, Seen
from tests.linearizability.raw_sender import RawSender

SHARE = 0.2  # of the operations that can go wrong


class StaleReader(RawSender):
    """Answers a get by what it saw first, although it has written since."""

    def __init__(self, address: str, random: Random) -> None:
        """It has seen nothing."""
        super().__init__(address, random)
        self._first: dict[bytes, Seen] = {}
        self._written_seq: dict[bytes, int] = {}

    async def send(self, operation: Operation, *, key: bytes) -> Reply:
        reply = await super().send(operation, key=key)
        at = operation.then[0].key
        if operation.kind is Kind.PUT and reply.seq is not None:
            self._written_seq[at] = reply.seq
        if operation.kind is Kind.GET and isinstance(reply.results[0], Seen):
            first = self._first.setdefault(at, reply.results[0])
            if (first.seq or 0) < self._written_seq.get(at, 0):
                return Reply((first,))
        return reply


class LosingWriter(RawSender):
    """Acknowledges a put that it never sent."""

    def __init__(self, address: str, random: Random) -> None:
        """It has lost nothing."""
        super().__init__(address, random)
        self._random = random

    async def send(self, operation: Operation, *, key: bytes) -> Reply:
        is_plain = operation.kind is Kind.PUT and not operation.tests
        if is_plain and self._random.random() < SHARE:
            return Reply((None,))
        return await super().send(operation, key=key)


class DoublingAdder(RawSender):
    """Sends an addition twice, as one does who repeats without an idempotency key."""

    def __init__(self, address: str, random: Random) -> None:
        """It has doubled nothing."""
        super().__init__(address, random)
        self._random = random

    async def send(self, operation: Operation, *, key: bytes) -> Reply:
        reply = await super().send(operation, key=key)
        if operation.kind is Kind.ADD and self._random.random() < SHARE:
            await super().send(operation, key=key)
        return reply
