"""The watermark of a process: how far it has applied the log, and calls that wait for more."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.concurrency import Waiter, complete, new_waiter
from shalekv.errors import ShaleError, raise_if


def _do_nothing() -> None:
    """Ignore the call: a log that is applied as it comes needs no request for more."""


class Watermark:
    """The last commit and WAL object of the contiguous prefix of the log that reads see."""

    def __init__(
        self, *, seq: int, wal_id: int | None, on_wait: Callable[[], None] = _do_nothing
    ) -> None:
        """Begin at the last commit and the last object that are already there.

        `on_wait` is called when a call begins to wait, for a log that can poll for more.
        """
        self._waiters: dict[Waiter, int] = {}  # the commit that each waits for
        self._failed: ShaleError | None = None
        self._on_wait = on_wait
        self.seq = seq
        self.wal_id = wal_id
        self.open_wal_id: int | None = None  # the object that the first group in flight goes into
        self.landed_seq = seq  # greatest durable sequence number, gaps or not

    @property
    def is_whole(self) -> bool:
        """Return whether no commit has landed behind a gap: the prefix has all that is durable."""
        return self.landed_seq == self.seq

    def has_whole(self, wal_id: int) -> bool:
        """Return whether the prefix contains all groups of this object and of those before it.

        REQUIRES: no further group will go into the object.
        """
        if self.wal_id is None or self.wal_id < wal_id:
            return False
        return self.open_wal_id is None or self.open_wal_id > wal_id

    @property
    def waiting_count(self) -> int:
        """Calls that wait for the prefix to grow."""
        return len(self._waiters)

    def advance(self, seq: int, wal_id: int | None) -> None:
        """Extend the prefix to this commit and object. It never shrinks (I6)."""
        self.seq = max(self.seq, seq)
        self.landed_seq = max(self.landed_seq, self.seq)
        self.wal_id = wal_id
        self._wake()

    async def wait_for(self, seq: int) -> None:
        """Wait until the prefix contains commit `seq`. Raises the error given to `fail`."""
        if self.seq >= seq:
            return
        raise_if(self._failed)
        waiter = new_waiter()
        self._waiters[waiter] = seq
        self._on_wait()
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            del waiter  # its error would hold this frame

    def fail(self, error: ShaleError) -> None:
        """Raise `error` to all calls that wait, now and later: the prefix will not grow again."""
        self._failed = error
        for waiter in self._waiters:
            complete(waiter, error)

    def _wake(self) -> None:
        for waiter, seq in self._waiters.items():
            if seq <= self.seq:
                complete(waiter)
