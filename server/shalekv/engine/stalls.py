"""Streams whose clients leave a message untaken: the oldest is ended when others wait for memory.

Progress is a message that was taken: what a client has taken of a message is not to be seen here.
So a stream is stalled when its message has waited for `stalled_ms`, and for as long as a client of
`SLOWEST_BYTES_PER_S` needs for it. A stalled stream that nobody waits for may go on later.
"""

from __future__ import annotations

from typing import Protocol

from shalekv.clock import Clock
from shalekv.errors import StreamTooSlow

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
