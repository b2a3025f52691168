"""Operations on their way into a session: in which order, in which messages, and how many at once.

Callers wait when too much is unanswered: what they ask for stays here until there is room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeAlias

from shalekv_client.errors import ShaleKVError
from shalekv_client.operations import Operation

UNANSWERED_BYTES_MAX = 8 * 1024 * 1024  # as the server's default for one session
# A message is cut here, so that the server can begin with it while the next one is on its way.
MESSAGE_BYTES_MAX = 1024 * 1024
MESSAGE_COUNT_MAX = 1_000  # more save nothing, and servers may be set to accept fewer than 10,000
SHRINK_COUNT, SHRINK_BYTES = 8, 4
SHRUNK_BYTES_MIN = 32 * 1024  # below the least that a server can be set to accept
OVERHEAD_BYTES = 16  # of an operation in a message: its id, two tags and two lengths


@dataclass(slots=True, eq=False)
class Pending:
    """An operation that somebody waits for."""

    number: int  # its id in the session; operations are sent in this order
    operation: Operation[Any]
    future: asyncio.Future[Any]
    size_bytes: int
    timeout_ms: float = 0.0  # within which it is to be answered; 0: while the session lasts
    due_s: float = 0.0  # when that is, by the clock of the loop
    is_sent: bool = False  # from then on nobody knows whether it was applied, until it is answered

    def fail(self, error: ShaleKVError) -> None:
        """Tell whoever waits, with an error object of its own."""
        if not self.future.done():
            self.future.set_exception(error.again())


Message: TypeAlias = list[Pending]


class Outbox:
    """A queue with a bound on what is sent and unanswered, counted in bytes."""

    def __init__(
        self,
        *,
        bytes_max: int = UNANSWERED_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        message_count_max: int = MESSAGE_COUNT_MAX,
    ) -> None:
        """`bytes_max` bounds what is unanswered; an operation that is larger goes when it is alone.

        An operation that is larger than `message_bytes_max` has a message to itself.
        """
        self._bytes_max = bytes_max
        self.message_bytes_max = message_bytes_max
        self._message_count_max = message_count_max
        self._queue: OrderedDict[int, Pending] = OrderedDict()
        self._queued_bytes = 0
        self._unanswered_bytes = 0
        self._news = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []  # for less to be held

    def __len__(self) -> int:
        """How many operations wait to be sent."""
        return len(self._queue)

    @property
    def unanswered_bytes(self) -> int:
        """Bytes of what is sent and unanswered."""
        return self._unanswered_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is not answered yet, sent or not."""
        return self._queued_bytes + self._unanswered_bytes

    def add(self, pending: Pending) -> None:
        """Queue an operation."""
        self._queue[pending.number] = pending
        self._queued_bytes += pending.size_bytes
        self._news.set()

    def withdraw(self, pending: Pending) -> None:
        """Nobody waits for this operation any more: it is not sent, if it was not sent yet."""
        if self._queue.pop(pending.number, None) is not None:
            self._queued_bytes -= pending.size_bytes
            self._tell_waiters()

    def take(self) -> Message:
        """The next message, counted as sent; empty when nothing is queued or there is no room."""
        message: Message = []
        size_bytes = 0
        while self._queue and len(message) < self._message_count_max:
            _, pending = self._queue.popitem(last=False)
            if pending.future.done():  # given up
                self._queued_bytes -= pending.size_bytes
                self._tell_waiters()
                continue
            if not self._fits(size_bytes, pending):
                self._queue[pending.number] = pending
                self._queue.move_to_end(pending.number, last=False)
                break
            size_bytes += pending.size_bytes
            pending.is_sent = True
            message.append(pending)
        self._queued_bytes -= size_bytes
        self._unanswered_bytes += size_bytes
        return message

    def answered(self, pending: Pending) -> None:
        """There is an answer to an operation that was sent, or there will be none."""
        self._unanswered_bytes -= pending.size_bytes
        if self._queue:
            self._news.set()
        self._tell_waiters()

    def clear(self) -> list[Pending]:
        """Empty the queue; returns what was in it."""
        left = list(self._queue.values())
        self._queue.clear()
        self._queued_bytes = 0
        self._tell_waiters()
        return left

    def shrink(self) -> None:
        """Make smaller messages from now on, since the server does not accept those."""
        self._message_count_max = max(1, self._message_count_max // SHRINK_COUNT)
        smaller_bytes = max(SHRUNK_BYTES_MIN, self.message_bytes_max // SHRINK_BYTES)
        self.message_bytes_max = min(self.message_bytes_max, smaller_bytes)

    def wake(self) -> None:
        """Let whoever waits for news look again."""
        self._news.set()

    async def news(self) -> None:
        """Wait until `take` may return something again, or somebody calls `wake`."""
        self._news.clear()
        await self._news.wait()

    async def held_at_most(self, bytes_max: int) -> None:
        """Wait until no more than this is held."""
        while self.held_bytes > bytes_max:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _tell_waiters(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fits(self, size_bytes: int, pending: Pending) -> bool:
        if size_bytes + self._unanswered_bytes == 0:
            return True
        fits_message = not size_bytes or size_bytes + pending.size_bytes <= self.message_bytes_max
        unanswered_bytes = self._unanswered_bytes + size_bytes + pending.size_bytes
        return fits_message and unanswered_bytes <= self._bytes_max
