"""Keeps a load at a rate."""

from __future__ import annotations

STEPS_PER_S = 10  # batches are made small enough that a second has at least so many


class Pace:
    """Says when the next batch may go, so that no more than `rows_per_s` go on average."""

    def __init__(self, rows_per_s: float) -> None:
        """Nothing went yet."""
        self._rows_per_s = rows_per_s
        self._next_s: float | None = None

    def batch_count_max(self, wished: int) -> int:
        """Rows of a batch, at most `wished`."""
        return max(1, min(wished, int(self._rows_per_s / STEPS_PER_S)))

    def wait_s(self, now_s: float, rows: int) -> float:
        """How long a batch of `rows` has to wait at `now_s`. It counts as gone then.

        Time that was lost, as by a slow server, is not made up for by a burst.
        """
        begin_s = now_s if self._next_s is None else max(now_s, self._next_s)
        self._next_s = begin_s + rows / self._rows_per_s
        return begin_s - now_s
