"""Memory for what is on its way to clients: the less is left, the less each may take at once.

Nobody waits for room for something small: a client that does not take its results must not stop
the others. So the bound is passed by at most `SMALL_BYTES` for each stream that is open. While one
waits for what is not small, streams that are stalled are ended, the oldest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from shalekv.clock import Clock
from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.errors import Overloaded, StreamTooSlow

SMALL_BYTES = 4 * 1024


class MemoryBudget:
    """Counts bytes in and out. What is taken must be given back."""

    def __init__(self, bytes_max: int, stalls: Stalls | None = None) -> None:
        """All of `bytes_max` is free. `stalls` knows the streams that hold it."""
        self._bytes_max = bytes_max
        self.stalls = stalls
        self._line: dict[Waiter, int] = {}  # bytes that are needed, in the order of arrival
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is left; 0 when the bound is passed."""
        return max(0, self._bytes_max - self.used_bytes)

    def take(self, needed_bytes: int, wished_bytes: int) -> int:
        """Take what is left up to `wished_bytes`, at least `needed_bytes`; how much that is."""
        taken_bytes = max(needed_bytes, min(wished_bytes, self.free_bytes))
        self.used_bytes += taken_bytes
        return taken_bytes

    def count(self, more_bytes: int) -> None:
        """Take or, below 0, give back so many bytes whatever is left."""
        if more_bytes > 0:
            self.used_bytes += more_bytes
        else:
            self.give_back(-more_bytes)

    async def take_when_free(
        self, needed_bytes: int, wished_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> int:
        """The same, but wait in line for what is not small. Raises `Overloaded` after `wait_ms`.

        What is larger than all room there is waits until it is alone. Of `stalls`, or of those of
        the room, streams are ended for the first in the line.
        """
        if needed_bytes <= SMALL_BYTES or (not self._line and self._has_room(needed_bytes)):
            return self.take(needed_bytes, wished_bytes)
        waiter = new_waiter()
        self._line[waiter] = needed_bytes
        try:
            with suppress(TimeoutError):  # it holds this task, and so must not stand behind ours
                async with asyncio.timeout(wait_ms / 1000):
                    await self._turn(waiter, stalls or self.stalls)
                return self.take(needed_bytes, wished_bytes)
        finally:
            self._line.pop(waiter, None)
            self._admit()  # the next one, for which there may be room as well
        raise Overloaded(
            f"{self.used_bytes} bytes of results were not taken by their clients, and no room "
            f"was left for {needed_bytes} more within {wait_ms} ms. Try again later",
            retry_after_ms=wait_ms,
        )

    @asynccontextmanager
    async def held(
        self, size_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> AsyncIterator[Share]:
        """Room for so many bytes, until it is left or given back; raises as `take_when_free`."""
        share = Share(self)
        await share.take(size_bytes, 0, wait_ms=wait_ms, stalls=stalls)
        try:
            yield share
        finally:
            share.give_back()

    def give_back(self, taken_bytes: int) -> None:
        """Let others have it."""
        self.used_bytes -= taken_bytes
        self._admit()

    async def _turn(self, waiter: Waiter, stalls: Stalls | None) -> None:
        """Wait until told that there is room; end stalled streams when first in the line."""
        while stalls is not None and not waiter.done():
            is_first = next(iter(self._line)) is waiter
            if not is_first or not await stalls.end_oldest():
                await asyncio.wait([waiter], timeout=stalls.look_ms / 1_000)
        await waiter

    def _has_room(self, needed_bytes: int) -> bool:
        return self.used_bytes == 0 or needed_bytes <= self.free_bytes

    def _admit(self) -> None:
        """Tell the first in the line; it takes its room, and then comes the next one's turn."""
        waiter = next(iter(self._line), None)
        if waiter is not None and self._has_room(self._line[waiter]):
            tell(waiter)


class Share:
    """Share of a room that one stream holds. It is given back once, by the first who does."""

    def __init__(self, room: MemoryBudget) -> None:
        """Nothing is taken yet."""
        self._room = room
        self.taken_bytes = 0

    async def take(
        self, needed_bytes: int, wished_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> None:
        """Give back what was taken, and take anew; raises as `MemoryBudget.take_when_free`."""
        self.give_back()
        self.taken_bytes = await self._room.take_when_free(
            needed_bytes, wished_bytes, wait_ms=wait_ms, stalls=stalls
        )

    def keep(self, kept_bytes: int) -> None:
        """Give back what is not needed after all."""
        self._room.give_back(max(0, self.taken_bytes - kept_bytes))
        self.taken_bytes = min(self.taken_bytes, kept_bytes)

    def give_back(self) -> None:
        """Let others have it."""
        self.keep(0)


# --- stalls
# Streams whose clients leave a message untaken: the oldest is ended when others wait for memory.
#
# Progress is a message that was taken: what a client has taken of a message is not to be seen
# here. So a stream is stalled when its message has waited for `stalled_ms`, and for as long as a
# client of `SLOWEST_BYTES_PER_S` needs for it. A stalled stream that nobody waits for may go on
# later.


SLOWEST_BYTES_PER_S = 1024 * 1024
LOOKS = 20  # of one who waits for memory, while a stream becomes stalled
LOOK_MS_MIN = 5


class Stream(Protocol):
    """Holder of memory for a client."""

    async def end(self, error: StreamTooSlow) -> None:
        """Give back all memory, the first of it at once, and end the call with `error`.

        The transport may be blocked in the message that the client does not take.
        """
        ...


class Stalls:
    """The streams of one kind whose clients have a message to take."""

    def __init__(self, clock: Clock, stalled_ms: int) -> None:
        """There are none yet."""
        self._clock = clock
        self._stalled_ms = stalled_ms
        self._untaken: dict[Stream, tuple[float, int]] = {}  # since when, and bytes; oldest first
        self.ended_count = 0

    @property
    def look_ms(self) -> float:
        """How often one who waits for memory should try to end a stream."""
        return max(self._stalled_ms / LOOKS, LOOK_MS_MIN)

    def offer(self, stream: Stream, size_bytes: int) -> None:
        """The client of `stream` has a message of that size to take from now on."""
        self._untaken[stream] = (self._clock.monotonic_ms(), size_bytes)

    def taken(self, stream: Stream) -> None:
        """The message was taken, or will never be."""
        self._untaken.pop(stream, None)

    def is_untaken(self, stream: Stream) -> bool:
        """Return True if the client of `stream` has a message to take."""
        return stream in self._untaken

    async def end_oldest(self) -> bool:
        """End the stream that has been stalled for the longest time; whether there was one."""
        now_ms = self._clock.monotonic_ms()
        for stream, (offered_ms, size_bytes) in self._untaken.items():
            idle_ms = now_ms - offered_ms
            if idle_ms >= self._stalled_ms + size_bytes * 1_000 / SLOWEST_BYTES_PER_S:
                del self._untaken[stream]
                self.ended_count += 1
                await stream.end(
                    StreamTooSlow(
                        f"the client has taken nothing of this stream for {round(idle_ms)} ms, "
                        "and others waited for the memory that it held. Go on behind the last "
                        "entry or result that has come, and take what comes"
                    )
                )
                return True
        return False
