"""The counting store counts the calls to the store below it."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.store.counting import Count, CountingStore, Operation
from tests.kit.inline_runtime import gathered
from tests.kit.scripted_store import Fate, ScriptedStore
from tests.kit.store import HeldStore


async def test_every_operation_is_counted() -> None:
    """Requests, objects and bytes are counted by operation."""
    store = CountingStore(ScriptedStore())
    await store.create("wal/1", b"12345")
    await store.create("wal/1", b"123")
    await store.get("wal/1")
    await store.get_range("wal/1", 1, 2)
    await store.head("wal/1")
    await gathered(store.list("wal/"))
    await gathered(store.list("none/"))
    await store.delete(name for name in ("wal/1", "wal/2"))
    await store.now_ms()
    await store.repair()
    assert store.counts == {
        Operation.CREATE: Count(requests=2, objects=2, transferred_bytes=8),
        Operation.GET: Count(requests=1, objects=1, transferred_bytes=5),
        Operation.GET_RANGE: Count(requests=1, objects=1, transferred_bytes=2),
        Operation.HEAD: Count(requests=1, objects=1),
        Operation.LIST: Count(requests=2, objects=1),
        Operation.DELETE: Count(requests=1, objects=2),
        Operation.NOW_MS: Count(requests=1),
        Operation.RECOVER: Count(requests=1),
    }


async def test_close_is_passed_on() -> None:
    """Closing is passed on and is no request."""
    closed: list[bool] = []

    class Inner(ScriptedStore):
        async def close(self) -> None:
            closed.append(True)

    store = CountingStore(Inner())
    await store.close()
    assert closed
    assert not any(count.requests for count in store.counts.values())


async def test_failures_are_requests_without_an_answer() -> None:
    """Refused and unknown requests are failures, and have ended; a missing object is an answer."""
    inner = ScriptedStore()
    store = CountingStore(inner)
    inner.creates = [Fate.REPLY_LOST, Fate.REFUSED]
    await store.create("wal/1", b"x")
    with pytest.raises(StoreUnavailable):
        await store.create("wal/2", b"x")
    with pytest.raises(ObjectNotFound):
        await store.get("wal/2")
    inner.read_fates = [Fate.REFUSED]
    with pytest.raises(StoreUnavailable):
        await gathered(store.list("wal/"))
    assert store.counts[Operation.CREATE] == Count(requests=2, failures=2, transferred_bytes=2)
    assert store.counts[Operation.GET] == Count(requests=1)
    assert store.counts[Operation.LIST] == Count(requests=1, failures=1)
    assert store.most_creates_in_flight == {"wal": 1}


async def test_creates_in_flight_are_counted_by_folder() -> None:
    """The greatest number of creates in flight at once is kept for each folder."""
    held = HeldStore(folder="")
    store = CountingStore(held)
    arrived = 0
    for names in (["wal/1", "wal/2", "wal/3", "levels/1"], ["wal/4", "levels/2", "levels/3"]):
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(store.create(name, b""))
            arrived += len(names)
            await held.arrived(arrived)
            for create in held.waiting:
                create.release()
    assert store.most_creates_in_flight == {"wal": 3, "levels": 2}
