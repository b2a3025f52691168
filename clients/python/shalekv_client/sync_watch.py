"""A watch for programs without an event loop: an ordinary iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from shalekv_client.closing import Closing
from shalekv_client.loop_thread import LoopThread
from shalekv_client.watch import Watch
from shalekv_client.watch_events import WatchEvent


class SyncWatch(Closing, Iterator[WatchEvent]):
    """As `shalekv_client.Watch`: iterate over it once; `with` opens and closes it."""

    def __init__(self, watch: Watch, thread: LoopThread) -> None:
        """As `SyncClient.watch` makes it."""
        self._watch = watch
        self._thread = thread
        self._events: Iterator[WatchEvent] = iter(())
        self._taken_seq = 0  # the last event that was given

    @property
    def next_seq(self) -> int:
        """Where another watch goes on behind the last event that was taken; 0: with what comes."""
        return self._taken_seq + 1 if self._taken_seq else self._watch.opened_at_seq or 0

    def opened(self) -> int:
        """Wait until it is open: the first sequence number that it tells of."""
        return self._thread.run(self._watch.opened())

    def __enter__(self) -> Self:
        try:
            self.opened()
        except BaseException:
            self.close()
            raise
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WatchEvent:
        """The next event. Raises as that of `Watch`."""
        event = next(self._events, None)
        if event is None:  # those that wait come together: a turn in the thread is costly
            self._events = iter(self._thread.run(self._watch.read()))
            event = next(self._events)
        self._taken_seq = event.seq
        return event

    def ack(self, seq: int) -> None:
        """As `Watch.ack`."""

        async def ack() -> None:
            self._watch.ack(seq)

        self._thread.run(ack())

    def close(self) -> None:
        """Close the watch; what was not taken is dropped. Again, it does nothing."""
        self._events = iter(())
        self._thread.run(self._watch.aclose())
