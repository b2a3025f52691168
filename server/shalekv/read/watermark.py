"""How far a process has applied the log, and who waits for it to come further."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.errors import ShaleError


def _do_nothing() -> None:
    """Whoever applies the log needs not be told."""


class Watermark:
    """The last commit and WAL object of the contiguous prefix that is shown."""

    def __init__(self, *, seq: int, wal_id: int | None) -> None:
        """`seq` and `wal_id` are the last commit and object that are there at the start."""
        self._waiters: dict[Waiter, int] = {}  # which commit each waits for
        self._failed: ShaleError | None = None
        self.on_wait: Callable[[], None] = _do_nothing  # to be set by who can look for more
        self.seq = seq
        self.wal_id = wal_id
        self.landed_seq = seq  # the greatest that is durable, gaps or not

    @property
    def is_whole(self) -> bool:
        """Whether nothing has landed behind a gap."""
        return self.landed_seq == self.seq

    def has_whole(self, wal_id: int) -> bool:
        """Whether all of this object, and of those before it, is in the prefix."""
        return self.wal_id is not None and self.wal_id >= wal_id

    @property
    def waiting_count(self) -> int:
        """Calls that wait for the prefix to grow."""
        return len(self._waiters)

    def advance(self, seq: int, wal_id: int | None) -> None:
        """All up to this commit and object is shown from now on. Never goes back (I6)."""
        self.seq = max(self.seq, seq)
        self.landed_seq = max(self.landed_seq, self.seq)
        self.wal_id = wal_id
        self._wake()

    async def cover(self, seq: int) -> None:
        """Wait until the prefix contains commit `seq`. Raises what `fail` was given."""
        if self.seq >= seq:
            return
        if self._failed is not None:
            raise self._failed.with_traceback(None)  # or it would grow with each call
        waiter = new_waiter()
        self._waiters[waiter] = seq
        self.on_wait()
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            del waiter  # its error would hold this frame

    def fail(self, error: ShaleError) -> None:
        """The prefix will not grow any more: tell those who wait for it."""
        self._failed = error
        for waiter in self._waiters:
            tell(waiter, error)

    def _wake(self) -> None:
        for waiter, seq in self._waiters.items():
            if seq <= self.seq:
                tell(waiter)
