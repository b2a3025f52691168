"""Tuning of Python's garbage collector: no long pauses of the event loop, and no unbounded leaks.

A writer keeps millions of long-lived objects, which are freed by their reference counts. A full
collection traverses all of them and finds nothing: with two million entries in a memtable it took
315 ms, during which no call is served. Therefore the objects that exist when serving begins
(imports, the replayed memtable) are frozen, and automatic full collections are disabled. Young
objects are still collected, in steps of a few thousand: one takes 0.2 us for each, and up to 1 us
when other processes have the caches of the processor.

A cycle of objects that survives two young collections would then never be freed. The code creates
none on the path of calls; for cycles of libraries, and mistakes, a full collection runs here when
the process uses half as much again as after the last one. What is accounted for, such as the
memtable and the caches, does not count: it is no garbage, and grows under load, when a pause is
worst. Memory that grows, is freed, and grows again does not cause a second collection.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from shalekv.clock import Clock
from shalekv.telemetry.process_use import resident_bytes

# The first of three generations is collected after this many new objects.
YOUNG_OBJECTS = 2_000
# ... the second after two collections of the first: each object is looked at twice, however many
# there are, so that more of them at once only make a pause longer
YOUNG_COLLECTIONS = 1
# ... and the third never: this many collections of the second are not reached.
MIDDLE_COLLECTIONS = 1_000_000_000

CHECK_MS = 1_000  # between two measurements of memory; one takes a millisecond at most
GROWTH_PERCENT = 50  # growth since the last full collection that makes the next one due
# ... but at least this much. A small object takes one block of Python's allocator, about 80 bytes;
# larger objects show only in the resident bytes.
BLOCK_BYTES = 80
GROWTH_BLOCKS_MIN = 500_000
GROWTH_BYTES_MIN = 64 << 20

_log = structlog.get_logger(__name__)


class AccountsForMemory(Protocol):
    """Knows how much of the memory of this process is in use for something."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are accounted for."""
        ...


class _Accounts:
    """The account of the process, as long as it exists."""

    def __init__(self) -> None:
        self.find: Callable[[], AccountsForMemory | None] = lambda: None
        self._most_bytes = 0

    def used_bytes(self) -> int:
        account = self.find()
        return 0 if account is None else account.used_bytes

    def most_bytes(self) -> int:
        """The most that was in use at once: what is freed may stay resident for good."""
        self._most_bytes = max(self._most_bytes, self.used_bytes())
        return self._most_bytes


_accounts = _Accounts()


def tune_garbage_collector(memory: AccountsForMemory | None = None) -> None:
    """Freeze the objects that exist now, and disable automatic full collections.

    Call it when the long-lived objects exist: after the replay, before the first call. What
    `memory` accounts for is not taken for garbage; it is not kept alive. REQUIRES:
    `collect_when_grown` runs.
    """
    _accounts.find = (lambda: None) if memory is None else weakref.ref(memory)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)


def freeze_on_standby() -> None:
    """Freeze the objects that exist now, among them all of the imports.

    Those that were frozen before are collected first: of a writer that has ended they are garbage.
    On a busy machine this takes a second, which a process has before it is elected: after that its
    lease has to be renewed. `tune_garbage_collector` then looks at what is new.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Growth:
    """Growth of one measure of memory since the last full collection."""

    def __init__(self, used: Callable[[], int], *, growth_min: int) -> None:
        """`used` measures the memory; growth below `growth_min` does not count."""
        self._used = used
        self._growth_min = growth_min
        self._before = used()

    @property
    def is_due(self) -> bool:
        """Return whether there is more new memory than is allowed between two full collections."""
        growth = self._used() - self._before
        return growth > max(self._growth_min, self._before * GROWTH_PERCENT // 100)

    def reset(self) -> None:
        """Count growth from the present use on, after a full collection."""
        self._before = self._used()


async def collect_when_grown(clock: Clock) -> NoReturn:
    """Run a full collection whenever memory has grown by `GROWTH_PERCENT`, until cancelled."""
    growths = (
        Growth(_unaccounted_blocks, growth_min=GROWTH_BLOCKS_MIN),
        Growth(_unaccounted_bytes, growth_min=GROWTH_BYTES_MIN),
    )
    while True:
        await clock.sleep_ms(CHECK_MS)
        if any(growth.is_due for growth in growths):
            began_s = time.perf_counter()
            found = gc.collect()
            took_ms = round((time.perf_counter() - began_s) * 1_000.0, 1)
            _log.info("memory had grown: collected garbage", objects=found, took_ms=took_ms)
            for growth in growths:
                growth.reset()


def _unaccounted_blocks() -> int:
    return max(0, sys.getallocatedblocks() - _accounts.used_bytes() // BLOCK_BYTES)


def _unaccounted_bytes() -> int:
    return max(0, resident_bytes() - _accounts.most_bytes())
