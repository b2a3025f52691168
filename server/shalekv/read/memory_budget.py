"""A budget of memory for data on its way to clients: the less is left, the less each call may take.

Small amounts are granted at once: a client that does not read its results must not stop the others.
So the bound is exceeded by at most `SMALL_BYTES` for each open stream. While a call waits for more
than that, stalled streams are ended, the oldest first (`Stalls`).

Progress is a message that was taken by the transport: what the client has read of a message is not
visible here. So a stream is stalled when its message has waited for `stalled_ms`, and in addition
for as long as a client that reads `SLOWEST_BYTES_PER_S` needs for it. A stalled stream that nobody
waits for may continue later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from shalekv.clock import Clock
from shalekv.concurrency import Waiter, complete, new_waiter
from shalekv.errors import Overloaded, StreamTooSlow

SMALL_BYTES = 4 * 1024
SLOWEST_BYTES_PER_S = 1024 * 1024
POLLS = 20  # polls of a waiting call while a stream becomes stalled
POLL_MS_MIN = 5


class MemoryBudget:
    """Counts bytes that are taken and given back. Everything taken must be given back."""

    def __init__(self, bytes_max: int, stalls: Stalls | None = None) -> None:
        """Begin with all of `bytes_max` free. `stalls` knows the streams that take from it."""
        self._bytes_max = bytes_max
        self.stalls = stalls
        self._queue: dict[Waiter, int] = {}  # bytes that each caller needs, in order of arrival
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are left; 0 when the bound is exceeded."""
        return max(0, self._bytes_max - self.used_bytes)

    def take(self, needed_bytes: int, wished_bytes: int) -> int:
        """Take what is left, at least `needed_bytes`, at most `wished_bytes`; return how many."""
        taken_bytes = max(needed_bytes, min(wished_bytes, self.free_bytes))
        self.used_bytes += taken_bytes
        return taken_bytes

    def count(self, more_bytes: int) -> None:
        """Take or, if negative, give back so many bytes, whatever is left."""
        if more_bytes > 0:
            self.used_bytes += more_bytes
        else:
            self.give_back(-more_bytes)

    async def take_when_free(
        self, needed_bytes: int, wished_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> int:
        """Take as `take`, but wait in FIFO order unless `needed_bytes` is small.

        A call that needs more than the whole budget waits until it is alone. For the first in the
        queue, streams of `stalls`, or else of the budget's own, are ended. Raises `Overloaded`
        after `wait_ms`.
        """
        if needed_bytes <= SMALL_BYTES or (not self._queue and self._fits(needed_bytes)):
            return self.take(needed_bytes, wished_bytes)
        waiter = new_waiter()
        self._queue[waiter] = needed_bytes
        try:
            # The TimeoutError refers to this task: `Overloaded` must not have it as its context.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wait_turn(waiter, stalls or self.stalls)
                return self.take(needed_bytes, wished_bytes)
        finally:
            self._queue.pop(waiter, None)
            self._admit()  # there may be enough for the next one as well
        raise Overloaded(
            f"{self.used_bytes} bytes of results were not taken by their clients, and no room "
            f"was left for {needed_bytes} more within {wait_ms} ms. Try again later",
            retry_after_ms=wait_ms,
        )

    @asynccontextmanager
    async def held(
        self, size_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> AsyncIterator[Share]:
        """Hold `size_bytes` until the context ends or they are given back.

        Raises as `take_when_free`.
        """
        share = Share(self)
        await share.take(size_bytes, 0, wait_ms=wait_ms, stalls=stalls)
        try:
            yield share
        finally:
            share.give_back()

    def give_back(self, taken_bytes: int) -> None:
        """Give back so many bytes, and admit calls that wait."""
        self.used_bytes -= taken_bytes
        self._admit()

    async def _wait_turn(self, waiter: Waiter, stalls: Stalls | None) -> None:
        """Wait until admitted; when first in the queue, end stalled streams."""
        while stalls is not None and not waiter.done():
            is_first = next(iter(self._queue)) is waiter
            if not is_first or not await stalls.end_oldest():
                await asyncio.wait([waiter], timeout=stalls.end_interval_ms / 1_000)
        await waiter

    def _fits(self, needed_bytes: int) -> bool:
        return self.used_bytes == 0 or needed_bytes <= self.free_bytes

    def _admit(self) -> None:
        """Wake the first in the queue, which takes its bytes and then admits the next."""
        waiter = next(iter(self._queue), None)
        if waiter is not None and self._fits(self._queue[waiter]):
            complete(waiter)


class Share:
    """The bytes of a budget that one stream holds. They can be given back only once."""

    def __init__(self, budget: MemoryBudget) -> None:
        """Begin with nothing taken."""
        self._budget = budget
        self.taken_bytes = 0

    async def take(
        self, needed_bytes: int, wished_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> None:
        """Give back what was taken, and take anew; raises as `MemoryBudget.take_when_free`."""
        self.give_back()
        self.taken_bytes = await self._budget.take_when_free(
            needed_bytes, wished_bytes, wait_ms=wait_ms, stalls=stalls
        )

    def keep(self, kept_bytes: int) -> None:
        """Give back all but `kept_bytes`."""
        self._budget.give_back(max(0, self.taken_bytes - kept_bytes))
        self.taken_bytes = min(self.taken_bytes, kept_bytes)

    def give_back(self) -> None:
        """Give back everything."""
        self.keep(0)


class Stream(Protocol):
    """A holder of memory for a client."""

    async def end(self, error: StreamTooSlow) -> None:
        """Give back all memory, some of it before the first `await`, and end the call.

        The call ends with `error`, although the transport may be blocked in the message that the
        client does not take.
        """
        ...


class Stalls:
    """The streams of one kind whose clients have a message to take."""

    def __init__(self, clock: Clock, stalled_ms: int) -> None:
        """Begin without streams."""
        self._clock = clock
        self._stalled_ms = stalled_ms
        self._untaken: dict[Stream, tuple[float, int]] = {}  # since when, and bytes; oldest first
        self.ended_count = 0

    @property
    def end_interval_ms(self) -> float:
        """Interval at which a call that waits for memory should try to end a stream."""
        return max(self._stalled_ms / POLLS, POLL_MS_MIN)

    def offer(self, stream: Stream, size_bytes: int) -> None:
        """Note that the client of `stream` has a message of that size to take from now on."""
        self._untaken[stream] = (self._clock.monotonic_ms(), size_bytes)

    def taken(self, stream: Stream) -> None:
        """Note that the message was taken, or will never be."""
        self._untaken.pop(stream, None)

    def is_untaken(self, stream: Stream) -> bool:
        """Return whether the client of `stream` has a message to take."""
        return stream in self._untaken

    async def end_oldest(self) -> bool:
        """End the stream that has been stalled for longest; return whether there was one."""
        now_ms = self._clock.monotonic_ms()
        for stream, (offered_ms, size_bytes) in self._untaken.items():
            idle_ms = now_ms - offered_ms
            if idle_ms >= self._stalled_ms + size_bytes * 1_000 / SLOWEST_BYTES_PER_S:
                del self._untaken[stream]
                self.ended_count += 1
                await stream.end(
                    StreamTooSlow(
                        f"the client has read nothing from this stream for {round(idle_ms)} ms, "
                        "while other calls waited for the memory that it held. Resume after the "
                        "last entry or result that was received, and read what comes"
                    )
                )
                return True
        return False
