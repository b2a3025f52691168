"""Deleting in batches, no faster than is allowed."""

from __future__ import annotations

import pytest

from shalekv.engine.collection.deleting import BATCH_MAX, Deleter
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.memory import MemoryStore
from tests.kit.inline_runtime import InlineClock


@pytest.mark.parametrize(
    ("per_s_count", "count", "requests", "waited_ms"),
    [
        (5, 23, 5, 4_000),
        (5, 5, 1, 0),
        (5, 6, 2, 1_000),
        (1_000, 2_500, 3, 2_000),
        (4_000, 2_500, 3, 500),
        (7, 0, 0, 0),
    ],
)
async def test_batches_keep_to_the_rate(
    per_s_count: int, count: int, requests: int, waited_ms: float
) -> None:
    """No batch is larger than a second, or a request, allows; each waits for those before it."""
    clock = InlineClock()
    store = CountingStore(MemoryStore(lambda: 0))
    await Deleter(store, clock, per_s_count=per_s_count).delete(f"wal/{n}" for n in range(count))
    assert store.counts[Operation.DELETE].requests == requests
    assert store.counts[Operation.DELETE].objects == count
    assert clock.monotonic_ms() == waited_ms
    assert BATCH_MAX == 1_000


async def test_what_was_deleted_before_counts() -> None:
    """A second call waits for what the first has used up, and not for what it has not."""
    clock = InlineClock()
    deleter = Deleter(MemoryStore(lambda: 0), clock, per_s_count=10)
    await deleter.delete(["wal/1", "wal/2"])
    await deleter.delete(["wal/3"])
    assert clock.waits_ms == [200]
    await clock.sleep_ms(1_000)
    await deleter.delete(["wal/4"])
    assert clock.waits_ms == [200, 1_000]
