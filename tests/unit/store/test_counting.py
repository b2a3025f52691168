"""A `CasStore` counts the requests to its store, each attempt of each."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.counting import Count, Operation
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore


def counted(inner: ScriptedStore) -> CasStore:
    return CasStore(inner, inline_runtime(), StoreSettings(read_attempts=1))


async def test_every_operation_is_counted_by_folder() -> None:
    """Requests, objects and bytes are counted by operation and folder."""
    store = counted(ScriptedStore())
    await store.claim("wal/1", b"12345")
    await store.claim("wal/1", b"123")
    await store.claim("backups/1", b"1")
    await store.get_range("wal/1", 1, 2)
    await store.head("wal/1")
    await gathered(store.list("wal/"))
    await gathered(store.list("none/"))
    await store.delete(name for name in ("wal/1", "wal/2"))
    await store.delete(["wal/1", "levels/1"])
    await store.now_ms()
    await store.repair()
    assert store.counts.by_folder == {
        (Operation.CREATE, "wal"): Count(requests=2, objects=2, transferred_bytes=8),
        (Operation.CREATE, ""): Count(requests=1, objects=1, transferred_bytes=1),
        (Operation.GET, "wal"): Count(requests=1, objects=1, transferred_bytes=5),
        (Operation.GET_RANGE, "wal"): Count(requests=1, objects=1, transferred_bytes=2),
        (Operation.HEAD, "wal"): Count(requests=1, objects=1),
        (Operation.LIST, "wal"): Count(requests=1, objects=1),
        (Operation.LIST, ""): Count(requests=1),
        (Operation.DELETE, "wal"): Count(requests=1, objects=2),
        (Operation.DELETE, ""): Count(requests=1, objects=2),
        (Operation.NOW_MS, ""): Count(requests=1),
        (Operation.REPAIR, ""): Count(requests=1),
    }


async def test_failures_are_requests_without_an_answer() -> None:
    """Each attempt is a request; those without an answer are failures. A missing object is an
    answer.
    """
    inner = ScriptedStore()
    store = counted(inner)
    inner.creates = [Fate.REQUEST_LOST, Fate.REFUSED]
    await store.claim("wal/1", b"x")
    with pytest.raises(ObjectNotFound):
        await store.get("wal/2")
    inner.read_fates = [Fate.REFUSED]
    with pytest.raises(StoreUnavailable):
        await gathered(store.list("wal/"))
    assert store.counts.by_folder == {
        (Operation.CREATE, "wal"): Count(3, failures=2, objects=1, transferred_bytes=3),
        (Operation.GET, "wal"): Count(requests=2),
        (Operation.LIST, "wal"): Count(1, failures=1),
    }


async def test_outcomes_only_grow() -> None:
    """An attempt has an outcome when it has ended: what is refused or given up was never well."""
    inner = ScriptedStore()
    store = counted(inner)
    hanging = asyncio.Event()

    async def hang() -> int:
        await hanging.wait()
        raise StoreUnavailable(inner.url, "now_ms", "", "the test says so")

    def outcomes() -> dict[str, int]:
        return dict(store.counts.of(Operation.NOW_MS).outcomes())

    await store.now_ms()
    inner.now_ms = hang  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        given_up, failing = (tasks.create_task(_failure_of(store)) for _ in range(2))
        await asyncio.sleep(0)
        assert outcomes() == {"ok": 1, "failed": 0, "refused": 0, "given_up": 0}
        given_up.cancel()
        hanging.set()
    assert isinstance(failing.result(), StoreUnavailable)
    assert outcomes() == {"ok": 1, "failed": 1, "refused": 0, "given_up": 1}
    inner.read_fates = [Fate.FORBIDDEN]
    with pytest.raises(ObjectNotFound):  # the answer to another attempt
        await store.head("wal/1")
    assert dict(store.counts.of(Operation.HEAD, "wal/1").outcomes())["refused"] == 1


async def _failure_of(store: CasStore) -> StoreUnavailable | None:
    try:
        await store.now_ms()
    except StoreUnavailable as error:
        return error
    return None
