"""The processes that share the tests of one run: which one this is, and of how many.

`make test` runs three; without pytest-xdist there is one.
"""

from __future__ import annotations

import os


def number() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def count() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def cores() -> int:
    """The number of cores that a test may fill: its share of those of the machine, at least 1."""
    return max(1, (os.cpu_count() or 1) // count())
