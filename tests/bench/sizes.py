"""Sizes of the benchmarks.

With BENCH=full in the environment, as `make bench` has it, enough for figures. Otherwise so little
that all of them run within a minute: that shows that they work.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_SMOKE = os.environ.get("BENCH") != "full"


def sized(full: T, smoke: T) -> T:
    """The first for a measurement, the second to see whether it runs at all."""
    return smoke if IS_SMOKE else full
