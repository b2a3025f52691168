"""Reads that fail temporarily are repeated, a bounded number of times."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidSetting, ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import REFUSAL_RETRY_MS
from shalekv.store.cas import CasStore
from shalekv.store.retry import Backoff
from tests.kit.inline_runtime import InlineClock, gathered, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore

NAMES = [f"wal/{number}" for number in range(6)]
READS = ("get", "get_range", "head", "list", "now_ms")


@pytest.fixture
async def inner() -> ScriptedStore:
    """A store with some objects; its script is empty."""
    store = ScriptedStore()
    for name in NAMES:
        await store.create(name, name.encode())
    return store


async def read(store: CasStore, kind: str) -> object:
    match kind:
        case "get":
            return (await store.get("wal/1")).data
        case "get_range":
            return await store.get_range("wal/1", 0, 3)
        case "head":
            return (await store.head("wal/1")).name
        case "list":
            return [info.name for info in await gathered(store.list("wal/"))]
        case _:
            return await store.now_ms() > 0


@pytest.mark.parametrize("kind", READS)
async def test_a_read_is_repeated(inner: ScriptedStore, kind: str) -> None:
    """A read that fails fewer times than there are attempts returns its result. One that always
    fails raises the store's error.
    """
    clock = InlineClock()
    store = CasStore(inner, inline_runtime(clock=clock), StoreSettings(read_attempts=4))
    expected = await read(store, kind)
    assert clock.waits_ms == []
    inner.read_fates = [Fate.REFUSED] * 3
    assert await read(store, kind) == expected
    assert len(clock.waits_ms) == 3
    assert clock.waits_ms == sorted(clock.waits_ms)
    inner.read_fates = [Fate.REFUSED] * 4
    with pytest.raises(StoreUnavailable, match="the script says so"):
        await read(store, kind)
    assert inner.read_fates == []


async def test_a_list_goes_on_where_it_failed(inner: ScriptedStore) -> None:
    """A list with several failures in between shows each object once.

    Only failures in a row count: an object that is shown proves that the store is back.
    """
    store = CasStore(inner, inline_runtime(), StoreSettings(read_attempts=2))
    inner.read_fates = [Fate.REFUSED, Fate.ANSWERED] * len(NAMES)
    assert await read(store, "list") == NAMES


async def test_a_missing_object_is_reported_at_once(inner: ScriptedStore) -> None:
    """`ObjectNotFound` is an answer: the read is not repeated."""
    clock = InlineClock()
    store = CasStore(inner, inline_runtime(clock=clock), StoreSettings())
    with pytest.raises(ObjectNotFound):
        await store.get("wal/none")
    assert clock.waits_ms == []


@pytest.mark.parametrize("kind", [*READS, "claim"])
async def test_a_refusal_that_may_pass_is_repeated_for_a_while(
    inner: ScriptedStore, kind: str
) -> None:
    """A refusal is retried once the store has accepted a request of this process, and only for a
    limited time.
    """
    clock = InlineClock()
    cas = CasStore(inner, inline_runtime(clock=clock), StoreSettings())
    names = iter("abcdef")

    async def ask() -> object:
        if kind == "claim":
            return await cas.claim(f"wal/{next(names)}", b"x")
        return await read(cas, kind)

    refused = [Fate.FORBIDDEN] * 3
    inner.read_fates, inner.creates = list(refused), list(refused)
    with pytest.raises(StoreRefused):
        await ask()
    assert clock.waits_ms == []  # the store has not accepted these credentials before
    inner.read_fates, inner.creates = [], []
    assert (await cas.head("wal/1")).name == "wal/1"
    inner.read_fates, inner.creates = list(refused), list(refused)
    assert await ask()
    assert len(clock.waits_ms) == 3
    inner.read_fates, inner.creates = [Fate.FORBIDDEN] * 99, [Fate.FORBIDDEN] * 99
    with pytest.raises(StoreRefused):
        await ask()
    assert REFUSAL_RETRY_MS / 2 < sum(clock.waits_ms[3:]) < 3 * REFUSAL_RETRY_MS
    clock.waits_ms.clear()
    with cas.refusals.opening(60_000), pytest.raises(StoreRefused):
        await ask()
    assert 60_000 <= sum(clock.waits_ms) < 65_000


async def test_deletes_take_any_names(inner: ScriptedStore) -> None:
    """Names from an iterator are all deleted, also when the delete is repeated."""
    store = CasStore(inner, inline_runtime(), StoreSettings())
    inner.fail("delete")
    await store.delete(name for name in NAMES[:4])
    assert await read(store, "list") == NAMES[4:]


@pytest.mark.parametrize(("first_ms", "longest_ms"), [(0, 1), (-1, 1), (2, 1)])
def test_waits_must_grow(first_ms: float, longest_ms: float) -> None:
    """A backoff that could spin or shrink is refused. After an outage of any length the wait is the
    longest one, without an overflow.
    """
    with pytest.raises(InvalidSetting):
        Backoff(first_ms=first_ms, longest_ms=longest_ms)
    assert 2_500 <= Backoff().wait_ms(1_000_000, inline_runtime().random) <= 5_000
