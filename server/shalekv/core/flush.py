"""When the log is flushed: a pure decision (protocol, "Writes and reads")."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.settings import WriterSettings

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
