"""How much the benchmarks measure.

With SHALEKV_BENCH_SMOKE=1 in the environment so little that all of them run within a minute: that
shows that they work, and their figures mean nothing.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_SMOKE = os.environ.get("SHALEKV_BENCH_SMOKE") == "1"


def sized(full: T, smoke: T) -> T:
    """The first for a measurement, the second to see whether it runs at all."""
    return smoke if IS_SMOKE else full
