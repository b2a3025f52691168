"""A `CasStore` counts the requests to its store, each attempt of each."""

from __future__ import annotations

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
