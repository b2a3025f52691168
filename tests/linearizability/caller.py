"""One client of the test: it follows the database from server to server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from shalekv_client import (
    ConnectionLost,
    IdempotencyKeys,
    NotApplied,
    OutcomeUnknown,
    ShaleKVError,
    Stopping,
    Unreachable,
)
from tests.linearizability.operations import Get, Operation, Reply
from tests.linearizability.sender import Sender

ANSWERED_S = 60.0  # until a server serves again, or a call is settled
ECHO_SHARE = 0.05
ECHOES_KEPT = 30

Connect: TypeAlias = Callable[[str, Random], Sender]
# After these there is no use in asking the same process again.
SERVER_GONE = (Stopping, Unreachable, ConnectionLost)


class Board:
    """Where clients find the address of the server."""

    def __init__(self) -> None:
        self.address = ""
        self.version = 0
        self._changed = asyncio.Condition()

    async def post(self, address: str) -> None:
        async with self._changed:
            self.address, self.version = address, self.version + 1
            self._changed.notify_all()

    async def newer_than(self, version: int) -> None:
        async with asyncio.timeout(ANSWERED_S), self._changed:
            await self._changed.wait_for(lambda: self.version > version)


class Caller:
    """Sends each operation once; or, if it `repeats`, until its outcome is known.

    Then also answers are asked for again, at times of another server, and must be the same (I15).

    A loyal one leaves a server only when it is gone: it still asks one that has stood still while
    others have moved on to the next, and which must not answer by what it knows.
    """

    def __init__(
        self,
        board: Board,
        connect: Connect,
        random: Random,
        *,
        repeats: bool = False,
        is_loyal: bool = False,
    ) -> None:
        self.is_loyal = is_loyal
        self.repeated_count = 0
        self.echo_count = 0
        self._board = board
        self._connect = connect
        self._random = random
        self._repeats = repeats
        self._keys = IdempotencyKeys(random_bytes=random.randbytes)
        self._sender: Sender | None = None
        self._version = 0
        self._answered: list[tuple[Operation, bytes, Reply]] = []

    async def call(self, operation: Operation) -> Reply:
        """What was told of an operation.

        Raises `NotApplied` or `OutcomeUnknown`; the latter for no change, if it `repeats`.
        """
        key = self._keys.next()
        if not self._repeats:
            return await self._send(operation, key)
        if self._answered and self._random.random() < ECHO_SHARE:
            await self._echo()
        async with asyncio.timeout(ANSWERED_S):
            reply = await self._send_until_known(operation, key)
        if _changes(operation, reply):
            self._answered = [*self._answered, (operation, key, reply)][-ECHOES_KEPT:]
        return reply

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
            self._sender = None

    async def _send_until_known(self, operation: Operation, key: bytes) -> Reply:
        unknown = False  # what became of the attempts before
        while True:
            try:
                return await self._send(operation, key)
            except OutcomeUnknown:
                if operation.is_read:
                    raise
                unknown = True
            except NotApplied:  # of this attempt; it says nothing about those before
                if not unknown:
                    raise
            self.repeated_count += 1

    async def _send(self, operation: Operation, key: bytes) -> Reply:
        """Send it once; when the server is gone, the next one is waited for."""
        sender = await self._connected()
        try:
            return await sender.send(operation, key=key)
        except ShaleKVError as error:
            if isinstance(error, SERVER_GONE):
                await self._board.newer_than(self._version)
                await self.close()
            raise

    async def _connected(self) -> Sender:
        if self._version < self._board.version and not self.is_loyal:
            await self.close()
        if self._sender is None:
            await self._board.newer_than(0)
            self._version = self._board.version
            self._sender = self._connect(self._board.address, self._random)
        return self._sender

    async def _echo(self) -> None:
        operation, key, reply = self._random.choice(self._answered)
        try:
            again = await self._send(operation, key)
        except ShaleKVError:
            return  # there was no answer
        assert again == reply, f"{operation} was answered by {reply}, and then by {again}"
        self.echo_count += 1


def _changes(operation: Operation, reply: Reply) -> bool:
    """Whether something was changed, and the key used."""
    branch = operation.then if reply.succeeded else operation.otherwise or ()
    return not reply.not_a_counter and any(not isinstance(action, Get) for action in branch)
