"""Keeps Python's garbage collector from stalling the event loop, and memory from leaking for ever.

A writer keeps millions of objects for long, and frees them by counting references. A full
collection looks at every one of them and finds nothing: with two million entries in a memtable
one took 315 ms, in which no call is served. So what is there when serving begins (imports, the
replayed memtable) is taken out of the collector's sight, and the collector begins no full
collection of the rest. Young objects are still collected, in bites: of those two million entries
none was longer than 4 ms.

A cycle of objects that survives two young collections would then never be freed. The code makes
none where calls end; for those of libraries, and mistakes, a full collection is begun here when the
process uses half as much again as after the last one. What grows, is freed, and grows again (a
memtable between two compactions) brings about no second one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import structlog

from shalekv.clock import Clock

# The first of three generations is collected after this many new objects.
YOUNG_OBJECTS = 5_000
# ... the second, with what ten of those have left, at most 50,000 objects
YOUNG_COLLECTIONS = 10
# ... and all of them never: so many collections of the second don't come together.
MIDDLE_COLLECTIONS = 1_000_000_000

CHECK_MS = 1_000  # between two looks at what is used; one takes a millisecond at most
GROWTH_PERCENT = 50  # more than after the last full collection: the next is due
# ... but no less than this. Small objects take a block of Python's allocator each, some 80 bytes;
# what is larger shows in the resident bytes alone.
GROWTH_BLOCKS_MIN = 500_000
GROWTH_BYTES_MIN = 64 << 20
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_log = structlog.get_logger(__name__)


def tame_garbage_collector() -> None:
    """Call when what lives long is there: after the replay, before the first call.

    What an earlier call took out of sight is looked at once more: it may have died since.
    `collect_when_grown` must run meanwhile.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)


class Growth:
    """How much more is used than after the last full collection."""

    def __init__(self, used: Callable[[], int], *, growth_min: int) -> None:
        """`used` measures; growth below `growth_min` does not count."""
        self._used = used
        self._growth_min = growth_min
        self._before = used()

    @property
    def is_due(self) -> bool:
        """True if memory has grown by more than is allowed between two full collections."""
        growth = self._used() - self._before
        return growth > max(self._growth_min, self._before * GROWTH_PERCENT // 100)

    def begin(self) -> None:
        """Count growth from the present use on: a full collection has just ended."""
        self._before = self._used()


async def collect_when_grown(clock: Clock) -> NoReturn:
    """Collect everything whenever memory has grown by `GROWTH_PERCENT`, until cancelled."""
    growths = (
        Growth(sys.getallocatedblocks, growth_min=GROWTH_BLOCKS_MIN),
        Growth(_resident_bytes, growth_min=GROWTH_BYTES_MIN),
    )
    while True:
        await clock.sleep_ms(CHECK_MS)
        if any(growth.is_due for growth in growths):
            began_s = time.perf_counter()
            found = gc.collect()
            took_ms = round((time.perf_counter() - began_s) * 1_000.0, 1)
            _log.info("memory had grown: collected garbage", objects=found, took_ms=took_ms)
            for growth in growths:
                growth.begin()


def _resident_bytes() -> int:
    """The resident bytes of this process; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
