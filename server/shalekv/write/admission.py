"""Back-pressure: how many bytes of writes are inside, and who waits at the door.

Bytes that are queued or uploaded are bounded, and so are those that are not compacted; past a bound
writes wait, themselves bounded in bytes and in time, and then they are refused with advice when to
come back. Nothing that was refused was applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.errors import MemtableFull, Overloaded, QueueFull, ShaleError
from shalekv.settings import WriterSettings


@dataclass(slots=True, eq=False)
class _Writer:
    """A write at the door."""

    size_bytes: int
    kept_bytes: int  # ... in the memtable, once it is durable
    admitted: Waiter = field(repr=False)


class Admission:
    """Counts bytes in and out. `size_bytes` of a write is its accounted memory."""

    def __init__(
        self,
        settings: WriterSettings,
        *,
        memtable_bytes: Callable[[], int],
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        """Bounds come from `queued_bytes_max`, `waiting_bytes_max` and `memtable_bytes_max`.

        `memtable_bytes` tells what the memtable holds now: it shrinks when runs are merged, and
        no write may be needed to notice that. `explain` tells why the queue does not move.
        """
        self._explain = explain
        self._settings = settings
        self._memtable_bytes = memtable_bytes
        self._line: dict[_Writer, None] = {}  # in the order of their arrival
        self._closed: ShaleError | None = None
        self.queued_bytes = 0
        self.waiting_bytes = 0

    def try_admit(self, size_bytes: int, *, is_kept: bool = True) -> bool:
        """Let a write in if there is room and nobody waits; False: `wait` for it.

        Raises `MemtableFull` if there never will be, and what `close` was given.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)  # or it would grow with each call
        kept_bytes = size_bytes if is_kept else 0
        if kept_bytes > self._settings.memtable_bytes_max:
            raise self._memtable_full(kept_bytes)
        if self._line or not self._has_room(size_bytes, kept_bytes):
            return False
        self.queued_bytes += size_bytes
        return True

    async def wait(
        self, size_bytes: int, *, is_kept: bool = True, within_ms: float | None = None
    ) -> None:
        """Wait in line until there is room, then take it; not `is_kept`: not in the memtable.

        After `queue_wait_ms`, or `within_ms` if that is less, or at once if too many bytes wait
        already, raises `QueueFull`, or `MemtableFull` if that is why; and what `close` was given.
        """
        # There may be room by now, and nobody to say so later.
        if self.try_admit(size_bytes, is_kept=is_kept):
            return
        settings = self._settings
        kept_bytes = size_bytes if is_kept else 0
        if self.waiting_bytes + size_bytes > settings.waiting_bytes_max:
            raise self._full(kept_bytes, f"{self.waiting_bytes} bytes wait already")
        wait_ms = settings.queue_wait_ms if within_ms is None else within_ms
        wait_ms = min(wait_ms, settings.queue_wait_ms)
        writer = _Writer(size_bytes, kept_bytes, new_waiter())
        self._line[writer] = None
        self.waiting_bytes += size_bytes
        try:
            with suppress(TimeoutError):  # it holds this task, and so must not stand behind ours
                async with asyncio.timeout(wait_ms / 1000):
                    await writer.admitted
                return
            self._leave(writer)
        except asyncio.CancelledError:
            self._leave(writer)
            raise
        finally:
            del writer  # its error would hold this frame
        raise self._full(kept_bytes, f"no room within {wait_ms:.0f} ms")

    def take_more(self, size_bytes: int) -> None:
        """A write that was let in has turned out to be larger: those behind it wait longer."""
        self.queued_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """A write has left: landed, or failed."""
        self.queued_bytes -= size_bytes
        self._admit_line()

    def look_again(self) -> None:
        """The memtable has become smaller: there may be room for those who wait."""
        self._admit_line()

    def close(self, error: ShaleError) -> None:
        """Refuse everything from now on; those who wait are told at once."""
        self._closed = error
        for writer in list(self._line):
            self._remove(writer)
            tell(writer.admitted, error)

    def _has_room(self, size_bytes: int, kept_bytes: int) -> bool:
        # A write larger than the whole queue is let in alone, or it never would be.
        fits = self.queued_bytes + size_bytes <= self._settings.queued_bytes_max
        return (fits or self.queued_bytes == 0) and not self._fills_memtable(kept_bytes)

    def _fills_memtable(self, kept_bytes: int) -> bool:
        held_bytes = self._memtable_bytes() + self.queued_bytes
        return kept_bytes > 0 and held_bytes + kept_bytes > self._settings.memtable_bytes_max

    def _admit_line(self) -> None:
        while self._line:
            writer = next(iter(self._line))
            if not self._has_room(writer.size_bytes, writer.kept_bytes):
                return
            self._remove(writer)
            if writer.admitted.done():
                continue  # it has just been cancelled, and will leave by itself
            self.queued_bytes += writer.size_bytes
            tell(writer.admitted)

    def _remove(self, writer: _Writer) -> None:
        del self._line[writer]
        self.waiting_bytes -= writer.size_bytes

    def _leave(self, writer: _Writer) -> None:
        """A writer gives up. Its place, or the room that it was just given, goes to the next."""
        admitted = writer.admitted
        if writer in self._line:
            self._remove(writer)
            self._admit_line()
        elif not admitted.cancelled() and admitted.exception() is None:
            self.release(writer.size_bytes)

    def _full(self, kept_bytes: int, detail: str) -> Overloaded:
        settings = self._settings
        if self._fills_memtable(kept_bytes):
            return self._memtable_full(kept_bytes)
        message = (
            f"{self.queued_bytes} bytes of writes are queued or being uploaded, and "
            f"queued_bytes_max is {settings.queued_bytes_max}: {detail}{self._why()}. Try again "
            "later"
        )
        return QueueFull(message, retry_after_ms=settings.retry_after_ms)

    def _why(self) -> str:
        why = self._explain()
        return f" ({why})" if why else ""

    def _memtable_full(self, size_bytes: int) -> MemtableFull:
        settings = self._settings
        message = (
            f"the memtable holds {self._memtable_bytes()} bytes that are not compacted, "
            f"{self.queued_bytes} more are on their way, this write takes {size_bytes}, and "
            f"memtable_bytes_max is {settings.memtable_bytes_max}: the compactor is behind, or "
            "does not run. Try again later"
        )
        return MemtableFull(message, retry_after_ms=settings.retry_after_ms)


# --- flush
# When the log is flushed: a pure decision (protocol, "Writes and reads").


SHORTEST_WAIT_MS = 0.001  # less is rounding: a timer of this length may not move the clock


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """What bounds the rate and the size of WAL objects."""

    max_parallel_writes: int  # groups of writes in flight
    interval_ms: float  # minimum spacing of WAL objects
    flush_bytes: int  # queued bytes that override the spacing

    @classmethod
    def of(cls, settings: WriterSettings, *, parallel_max: int | None = None) -> FlushPolicy:
        """That of a writer with these settings; `parallel_max` instead of its own, if given."""
        return cls(
            parallel_max or settings.max_parallel_writes,
            settings.flush_interval_ms or 0,
            settings.flush_bytes,
        )

    def delay_ms(
        self,
        *,
        now_ms: float,
        last_flush_ms: float | None,
        window: int,
        queued_bytes: int,
        is_hurried: bool,
    ) -> float | None:
        """How long to wait until the queue is flushed; None: until an upload has ended.

        REQUIRES: something is queued. A write that finds the log idle is flushed at once; the
        spacing bounds what a stream of writes costs. `is_hurried`: nothing more is to come.
        """
        if window >= self.max_parallel_writes:
            return None
        if last_flush_ms is None or is_hurried or queued_bytes >= self.flush_bytes:
            return 0.0
        wait_ms = last_flush_ms + self.interval_ms - now_ms
        return wait_ms if wait_ms >= SHORTEST_WAIT_MS else 0.0
