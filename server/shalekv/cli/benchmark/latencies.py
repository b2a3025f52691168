"""Latencies in bounded memory, as three digits of microseconds: percentiles are right to 1 %."""

from __future__ import annotations

import math
from collections import Counter

EXACT_BELOW_US = 1_000


class Latencies:
    """Counts latencies, however many there are."""

    def __init__(self) -> None:
        """There are none yet."""
        self.count = 0
        self.max_us = 0
        self._counts: Counter[int] = Counter()

    def record(self, latency_s: float) -> None:
        """One more."""
        latency_us = int(latency_s * 1e6)
        self.count += 1
        self.max_us = max(self.max_us, latency_us)
        if latency_us >= EXACT_BELOW_US:
            unit = 10 ** (len(str(latency_us)) - 3)
            latency_us = latency_us // unit * unit
        self._counts[latency_us] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The latency that `percent` of all don't exceed; None when there are none."""
        if not self.count:
            return None
        wanted = math.ceil(self.count * percent / 100.0)
        seen = 0
        for latency_us, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return latency_us / 1000.0
        return self.max_us / 1000.0
