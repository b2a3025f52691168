"""Reads that fail for a moment are repeated, a bounded number of times."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidSetting, ObjectNotFound, StoreUnavailable
from shalekv.store.api import Created, ObjectStore, Unknown
from shalekv.store.retry import Backoff, RetryingStore
from tests.kit.inline_runtime import InlineClock, gathered, inline_runtime
from tests.kit.lossy_store import Fate, LossyStore

NAMES = [f"wal/{number}" for number in range(6)]
READS = ("get", "get_range", "head", "list", "now_ms")


@pytest.fixture
async def lossy() -> LossyStore:
    """A store with some objects; its script is empty."""
    store = LossyStore()
    for name in NAMES:
        await store.create(name, name.encode())
    return store


async def read(store: ObjectStore, kind: str) -> object:
    """One read of a kind."""
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
async def test_a_read_is_repeated(lossy: LossyStore, kind: str) -> None:
    """A read that is refused fewer times than there are attempts gives its result."""
    clock = InlineClock()
    store = RetryingStore(lossy, inline_runtime(clock=clock), attempts=4)
    expected = await read(store, kind)
    assert clock.waits_ms == []
    lossy.reads = [Fate.REFUSED] * 3
    assert await read(store, kind) == expected
    assert len(clock.waits_ms) == 3
    assert clock.waits_ms == sorted(clock.waits_ms)


@pytest.mark.parametrize("kind", READS)
async def test_attempts_are_bounded(lossy: LossyStore, kind: str) -> None:
    """A read that is refused at every attempt raises what the store raised."""
    store = RetryingStore(lossy, inline_runtime(), attempts=4)
    lossy.reads = [Fate.REFUSED] * 4
    with pytest.raises(StoreUnavailable, match="the script says so"):
        await read(store, kind)
    assert lossy.reads == []


async def test_a_list_goes_on_where_it_failed(lossy: LossyStore) -> None:
    """A list that fails again and again in between shows each object once and starts anew.

    Failures count in a row: an object that is shown proves that the store is back.
    """
    store = RetryingStore(lossy, inline_runtime(), attempts=2)
    lossy.reads = [Fate.REFUSED, Fate.ANSWERED] * len(NAMES)
    assert await read(store, "list") == NAMES


async def test_what_is_missing_is_not_repeated(lossy: LossyStore) -> None:
    """An answer is an answer: a missing object is told at once."""
    clock = InlineClock()
    store = RetryingStore(lossy, inline_runtime(clock=clock))
    with pytest.raises(ObjectNotFound):
        await store.get("wal/none")
    assert clock.waits_ms == []


async def test_creates_are_passed_on(lossy: LossyStore) -> None:
    """A create is never repeated here, whatever becomes of it."""
    store = RetryingStore(lossy, inline_runtime())
    lossy.creates = [Fate.REQUEST_LOST, Fate.REFUSED]
    assert isinstance(await store.create("wal/new", b""), Unknown)
    with pytest.raises(StoreUnavailable):
        await store.create("wal/new", b"")
    assert await store.create("wal/new", b"") == Created()


async def test_deletes_take_any_names(lossy: LossyStore) -> None:
    """Names that can be gone through only once are all deleted."""
    store = RetryingStore(lossy, inline_runtime())
    await store.delete(name for name in NAMES[:4])
    assert await read(store, "list") == NAMES[4:]
    await store.close()


async def test_the_listener_hears_of_refused_reads(lossy: LossyStore) -> None:
    """Each wait is told, for single reads and for lists."""
    heard: list[int] = []
    store = RetryingStore(
        lossy, inline_runtime(), listener=lambda attempts, _error: heard.append(attempts)
    )
    for kind in ("get", "list"):
        lossy.reads = [Fate.REFUSED] * 2
        await read(store, kind)
    assert heard == [1, 2, 1, 2]


@pytest.mark.parametrize(("first_ms", "longest_ms"), [(0, 1), (-1, 1), (2, 1)])
def test_waits_must_grow(first_ms: float, longest_ms: float) -> None:
    """A backoff that could spin, or shrink, is refused."""
    with pytest.raises(InvalidSetting):
        Backoff(first_ms=first_ms, longest_ms=longest_ms)


def test_there_is_an_attempt() -> None:
    """No attempts at all are refused."""
    with pytest.raises(InvalidSetting):
        RetryingStore(LossyStore(), inline_runtime(), attempts=0)


def test_waits_stay_finite() -> None:
    """After an outage of any length the wait is the longest one, and no overflow."""
    runtime = inline_runtime()
    assert 2_500 <= Backoff().wait_ms(1_000_000, runtime.random) <= 5_000
