"""Back-pressure: which writes are admitted, and what follows when compaction is behind.

Two amounts of bytes are bounded: those of writes that are queued or being uploaded, and those that
are not compacted. Beyond a bound, writes wait. Waiting writes are themselves bounded in bytes and
time; beyond that they are refused, with a delay after which to retry. A refused write was not
applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shalekv.clock import Clock
from shalekv.concurrency import Waiter, complete, new_waiter
from shalekv.errors import MemtableFull, Overloaded, QueueFull, ShaleError, raise_if
from shalekv.read.engine import ShedViews
from shalekv.read.memtable import Memtable
from shalekv.settings import KIB, WriterSettings
from shalekv.write.idempotency import Idempotency

RETRY_AFTER_MS = 200  # retry advice with a refusal: about the time of a few uploads
# Interval at which the manifest is polled while much is not compacted: what is compacted by then
# can be dropped.
PRESSED_POLL_MS = 500
PRESSED_PARTS = 8  # "much" is an eighth of the memory for uncompacted writes
# Each load that is not compacted is one more sorted run that reads must search.
UNCOMPACTED_LOADS_MAX = 64
CERTAIN_BYTES_MAX = 256 * KIB  # admitted between two looks at the memtable: some 150 small puts
LOADS_POLL_MS = 20  # interval of polling whether loads were compacted
HELD_PARTS = 4  # scans may keep a quarter of that memory after compaction, then they are ended


@dataclass(slots=True, eq=False)
class _WaitingWrite:
    """A write that waits for admission."""

    size_bytes: int
    kept_bytes: int  # its bytes in the memtable, once it is durable
    admitted: Waiter = field(repr=False)


class Admission:
    """Accounts for the bytes of admitted writes, and makes others wait or refuses them.

    The `size_bytes` of a write is its accounted memory.
    """

    def __init__(
        self,
        settings: WriterSettings,
        *,
        memtable_bytes: Callable[[], int],
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        """Apply the settings `queued_bytes_max`, `admission_waiting_bytes_max`,
        `memtable_bytes_max` and `admission_timeout_ms`.

        `memtable_bytes` returns the current size of the memtable. That size also falls when runs
        are merged, which must be noticed without a write. `explain` says why the queue does not
        move.
        """
        self._explain = explain
        self._settings = settings
        self._memtable_bytes = memtable_bytes
        self._waiting: dict[_WaitingWrite, None] = {}  # waiting writes, in order of arrival
        self._refusal: ShaleError | None = None
        # Bytes that may be admitted at once, without a look at the memtable: see `_free_bytes`. Not
        # positive while writes wait, or once all are refused.
        self._certain_bytes = 0
        self.closed = asyncio.Event()  # set when no more writes are admitted
        self.queued_bytes = 0
        self.waiting_bytes = 0

    def try_admit(self, size_bytes: int, *, is_kept: bool = True) -> bool:
        """Admit a write if it fits and none waits. Returns False when it has to `wait`.

        `is_kept` says that the write takes memtable space, as all do but batches that are
        written to SSTs. Raises `MemtableFull` if it can never fit, and the error that `close` was
        given.
        """
        if size_bytes <= self._certain_bytes:
            self._certain_bytes -= size_bytes
            self.queued_bytes += size_bytes
            return True
        raise_if(self._refusal)
        kept_bytes = size_bytes if is_kept else 0
        if kept_bytes > self._settings.memtable_bytes_max:
            raise self._memtable_full(kept_bytes)
        if self._waiting or not self._fits(size_bytes, kept_bytes):
            return False
        self.queued_bytes += size_bytes
        self._certain_bytes = self._free_bytes()
        return True

    async def wait(
        self, size_bytes: int, *, is_kept: bool = True, within_ms: float | None = None
    ) -> None:
        """Wait for admission, in FIFO order. `is_kept` says that the write takes memtable space.

        Raises `QueueFull`, or `MemtableFull` if that is the cause, after `admission_timeout_ms` (or
        `within_ms` if that is less), or at once if too many bytes wait already; and the error that
        `close` was given.
        """
        # It may fit by now, and no later event may wake this call.
        if self.try_admit(size_bytes, is_kept=is_kept):
            return
        settings = self._settings
        kept_bytes = size_bytes if is_kept else 0
        if self.waiting_bytes + size_bytes > settings.admission_waiting_bytes_max:
            raise self._full(kept_bytes, f"{self.waiting_bytes} bytes wait already")
        wait_ms = settings.admission_timeout_ms if within_ms is None else within_ms
        wait_ms = min(wait_ms, settings.admission_timeout_ms)
        write = _WaitingWrite(size_bytes, kept_bytes, new_waiter())
        self._waiting[write] = None
        self._certain_bytes = 0
        self.waiting_bytes += size_bytes
        try:
            # The TimeoutError refers to this task, so it must not become the context of our error.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await write.admitted
                return
            self._give_up(write)
        except asyncio.CancelledError:
            self._give_up(write)
            raise
        finally:
            del write  # its error would keep this frame alive
        raise self._full(kept_bytes, f"no room within {wait_ms:.0f} ms")

    def take_more(self, size_bytes: int) -> None:
        """Account for an admitted write that has turned out to be larger."""
        self.queued_bytes += size_bytes
        self._certain_bytes -= size_bytes

    def release(self, size_bytes: int) -> None:
        """Release the bytes of a write that has landed or failed, and admit waiting writes."""
        self.queued_bytes -= size_bytes
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Admit waiting writes that fit now, in order: the memtable may have become smaller."""
        while self._waiting:
            write = next(iter(self._waiting))
            if not self._fits(write.size_bytes, write.kept_bytes):
                return
            self._remove(write)
            if write.admitted.done():
                continue  # it has just been cancelled, and its own task removes it
            self.queued_bytes += write.size_bytes
            complete(write.admitted)

    def close(self, error: ShaleError) -> None:
        """Refuse all writes from now on with `error`, those that wait included."""
        self._refusal = error
        self._certain_bytes = 0
        self.closed.set()
        for write in list(self._waiting):
            self._remove(write)
            complete(write.admitted, error)

    def _fits(self, size_bytes: int, kept_bytes: int) -> bool:
        # A write larger than the whole queue is admitted alone, else it never would be.
        fits = self.queued_bytes + size_bytes <= self._settings.queued_bytes_max
        return (fits or self.queued_bytes == 0) and not self._fills_memtable(kept_bytes)

    def _free_bytes(self) -> int:
        """Return how much certainly fits from now on. REQUIRES: no write waits.

        Bytes that are released do not count, since a write that lands takes no more of the memtable
        than it had of the queue. Apart from writes, the memtable grows only by what views keep when
        runs are merged, at most as much as is there. So half of its bound counts here. No more than
        `CERTAIN_BYTES_MAX`, since a look at the memtable also forgets runs that nobody keeps.
        """
        settings = self._settings
        kept_max = settings.memtable_bytes_max // 2 - self._memtable_bytes()
        free_bytes = min(settings.queued_bytes_max, kept_max) - self.queued_bytes
        return min(max(free_bytes, 0), CERTAIN_BYTES_MAX)

    def _fills_memtable(self, kept_bytes: int) -> bool:
        held_bytes = self._memtable_bytes() + self.queued_bytes
        return kept_bytes > 0 and held_bytes + kept_bytes > self._settings.memtable_bytes_max

    def _remove(self, write: _WaitingWrite) -> None:
        del self._waiting[write]
        self.waiting_bytes -= write.size_bytes

    def _give_up(self, write: _WaitingWrite) -> None:
        """Remove a write that gives up; the next gets its place, or the space just granted."""
        admitted = write.admitted
        if write in self._waiting:
            self._remove(write)
            self.admit_waiting()
        elif not admitted.cancelled() and admitted.exception() is None:
            self.release(write.size_bytes)

    def _full(self, kept_bytes: int, detail: str) -> Overloaded:
        settings = self._settings
        if self._fills_memtable(kept_bytes):
            return self._memtable_full(kept_bytes)
        message = (
            f"{self.queued_bytes} bytes of writes are queued or being uploaded, and "
            f"queued_bytes_max is {settings.queued_bytes_max}: {detail}{self._why()}. Try again "
            "later"
        )
        return QueueFull(message, retry_after_ms=RETRY_AFTER_MS)

    def _why(self) -> str:
        why = self._explain()
        return f" ({why})" if why else ""

    def _memtable_full(self, size_bytes: int) -> MemtableFull:
        settings = self._settings
        message = (
            f"the memtable holds {self._memtable_bytes()} bytes that are not compacted, "
            f"{self.queued_bytes} more are queued, this write takes {size_bytes}, and "
            f"memtable_bytes_max is {settings.memtable_bytes_max}: the compactor is behind, or "
            "does not run. Try again later"
        )
        return MemtableFull(message, retry_after_ms=RETRY_AFTER_MS)


class CompactionBacklog:
    """The data that is not compacted yet, and what follows when there is much of it."""

    def __init__(
        self,
        settings: WriterSettings,
        clock: Clock,
        memtable: Memtable,
        idempotency: Idempotency,
        *,
        load_count: Callable[[], int],
        shed_views: ShedViews,
    ) -> None:
        """`load_count` returns how many loads are not compacted.

        `shed_views` is called when the views of reads keep too much in memory.
        """
        self.settings = settings
        self.memtable = memtable
        self.idempotency = idempotency
        self._clock = clock
        self._load_count = load_count
        self._shed_views = shed_views

    @property
    def memory_bytes(self) -> int:
        """Accounted memory: durable entries and idempotency records that are not compacted.

        Includes entries that are compacted, but kept for scans that began before.
        """
        kept_bytes = self.memtable.size_bytes + self.memtable.held_bytes
        return kept_bytes + self.idempotency.size_bytes

    @property
    def held_bytes_max(self) -> int:
        """Limit of the memory of entries that are compacted, but kept for scans begun before."""
        return self.settings.memtable_bytes_max // HELD_PARTS

    @property
    def is_pressed(self) -> bool:
        """Return whether uncompacted writes or loads use more than half of what they may."""
        settings = self.settings
        return (
            2 * self.memory_bytes > settings.memtable_bytes_max
            or 2 * self._load_count() > UNCOMPACTED_LOADS_MAX
        )

    def poll_ms(self) -> int:
        """Interval at which the manifest is polled for what was compacted."""
        poll_ms = self.settings.fence_poll_ms
        if self.memory_bytes * PRESSED_PARTS > self.settings.memtable_bytes_max:
            return min(poll_ms, PRESSED_POLL_MS)
        return poll_ms

    async def wait_for_loads(self) -> None:
        """Wait until one more load may be committed.

        Raises `MemtableFull` after `admission_timeout_ms`.
        """
        settings = self.settings
        waited_ms = 0
        while (load_count := self._load_count()) >= UNCOMPACTED_LOADS_MAX:
            if waited_ms >= settings.admission_timeout_ms:
                message = (
                    f"{load_count} loads are not compacted, as many as there may be: the "
                    "compactor is behind, or does not run. Try again later"
                )
                raise MemtableFull(message, retry_after_ms=RETRY_AFTER_MS)
            await self._clock.sleep_ms(LOADS_POLL_MS)
            waited_ms += LOADS_POLL_MS

    async def shed_views(self) -> bool:
        """Drop views of reads that keep too much in memory; returns whether there was too much."""
        if not self._keep_too_much():
            return False
        await self._shed_views(self._keep_too_much)
        return True

    def _keep_too_much(self) -> bool:
        return self.memtable.held_bytes > self.held_bytes_max
