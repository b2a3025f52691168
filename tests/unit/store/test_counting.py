"""The counting store counts what is asked of the store below it, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count

import pytest

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.store.api import NO_METADATA, CreateOutcome, ObjectStore
from shalekv.store.counting import Count, CountingStore, Operation
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract
from tests.kit.inline_runtime import gathered
from tests.kit.lossy_store import Fate, LossyStore


class TestCountingStoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Counting stores above views of the same objects."""
        objects = MemoryObjects()
        moments = count(1_700_000_000_000)
        return lambda: CountingStore(MemoryStore(lambda: next(moments), objects=objects))


async def test_every_operation_is_counted() -> None:
    """Requests, objects and bytes are counted by operation."""
    store = CountingStore(LossyStore())
    await store.create("wal/1", b"12345")
    await store.create("wal/1", b"123")
    await store.get("wal/1")
    await store.get_range("wal/1", 1, 2)
    await store.head("wal/1")
    await gathered(store.list("wal/"))
    await gathered(store.list("none/"))
    await store.delete(name for name in ("wal/1", "wal/2"))
    await store.now_ms()
    await store.recover()
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


async def test_failures_are_requests_without_an_answer() -> None:
    """Refused and unknown requests are failures; "there is none" is an answer."""
    lossy = LossyStore()
    store = CountingStore(lossy)
    lossy.creates = [Fate.REPLY_LOST, Fate.REFUSED]
    await store.create("wal/1", b"x")
    with pytest.raises(StoreUnavailable):
        await store.create("wal/2", b"x")
    with pytest.raises(ObjectNotFound):
        await store.get("wal/2")
    lossy.reads = [Fate.REFUSED]
    with pytest.raises(StoreUnavailable):
        await gathered(store.list("wal/"))
    assert store.counts[Operation.CREATE] == Count(requests=2, failures=2, transferred_bytes=2)
    assert store.counts[Operation.GET] == Count(requests=1)
    assert store.counts[Operation.LIST] == Count(requests=1, failures=1)


class GatedStore(MemoryStore):
    """A memory store whose creates wait until the gate is opened."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.gate = asyncio.Event()

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        await self.gate.wait()
        return await super().create(name, data, metadata)


async def create_at_once(store: ObjectStore, names: list[str], gate: asyncio.Event) -> None:
    """Have all these creates under way before any of them ends."""
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(store.create(name, b""))
        await asyncio.sleep(0)
        gate.set()
    gate.clear()


async def test_creates_in_flight_are_counted_by_folder() -> None:
    """The greatest number of creates under way at once is kept for each folder."""
    gated = GatedStore()
    store = CountingStore(gated)
    await create_at_once(store, ["wal/1", "wal/2", "wal/3", "levels/1"], gated.gate)
    await create_at_once(store, ["wal/4", "wal/5", "levels/2", "levels/3"], gated.gate)
    assert store.most_creates_in_flight == {"wal": 3, "levels": 2}


async def test_a_create_that_fails_is_no_longer_in_flight() -> None:
    """Refused creates one after another never count as two at once."""
    lossy = LossyStore()
    store = CountingStore(lossy)
    lossy.creates = [Fate.REFUSED] * 2
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.create("wal/1", b"")
    assert store.most_creates_in_flight == {"wal": 1}
