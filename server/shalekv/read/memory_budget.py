"""Memory for what is on its way to clients: the less is left, the less each may take at once.

Nobody waits for room for something small: a client that does not take its results must not stop
the others. So the bound is passed by at most `SMALL_BYTES` for each stream that is open. While one
waits for what is not small, streams that are stalled are ended, the oldest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.engine.stalls import Stalls
from shalekv.errors import Overloaded

SMALL_BYTES = 4 * 1024


class ResultRoom:
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

    def __init__(self, room: ResultRoom) -> None:
        """Nothing is taken yet."""
        self._room = room
        self.taken_bytes = 0

    async def take(
        self, needed_bytes: int, wished_bytes: int, *, wait_ms: int, stalls: Stalls | None = None
    ) -> None:
        """Give back what was taken, and take anew; raises as `ResultRoom.take_when_free`."""
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
