"""The bounds of reads: a cache that shares concurrent loads, and a budget of bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.read.cache import Cache, Sized
from shalekv.read.read_budget import ReadBudget
from shalekv.telemetry.activity import CURRENT, CallActivity
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of

Fetch = Callable[[], Awaitable[Sized[str]]]


class Loads:
    """Loads that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[Sized[str]]] = []

    async def fetch(self) -> Sized[str]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return await self.begun[-1]

    def end_one(self, random: Random) -> None:
        """End any of the loads that are under way, with an item or an error."""
        under_way = [load for load in self.begun if not load.done()]
        if not under_way:
            return
        if random.random() < 0.3:
            error = StoreUnavailable("memory://", "get_range", "a", "no answer")
            random.choice(under_way).set_exception(error)
        else:
            random.choice(under_way).set_result(Sized("item", 1))


def at_once(item: str, size_bytes: int = 1) -> Fetch:
    async def fetch() -> Sized[str]:
        return Sized(item, size_bytes)

    return fetch


async def test_the_least_recently_used_is_evicted_first() -> None:
    """Beyond the bound, the least recently used items are evicted, as many as needed."""
    cache: Cache[str, str] = Cache(10)
    for key in "abcde":
        cache.keep(key, key, 2)
    assert cache.find("a") == "a"
    cache.keep("f", "f", 3)
    assert ["a" in cache, "b" in cache, "c" in cache, "d" in cache] == [True, False, False, True]
    assert (cache.held_bytes, cache.evictions, len(cache)) == (9, 2, 4)
    assert (cache.hits, cache.misses) == (1, 0)
    assert cache.peek("d") == "d"  # this does not count as a use: it is evicted next
    cache.keep("g", "g", 2)
    assert "d" not in cache
    cache.keep("g", "new", 5)  # replaces the item
    assert (cache.find("g"), cache.held_bytes) == ("new", 10)
    cache.drop("g")
    cache.drop("g")
    assert cache.held_bytes == 5
    assert cache.hits == 2


async def test_what_is_too_large_is_returned_and_not_kept() -> None:
    """An item above the bound is returned, evicts nothing, and is loaded again."""
    cache: Cache[str, str] = Cache(10)
    cache.keep("a", "a", 10)
    assert await cache.load("b", at_once("large", 11)) == "large"
    assert "b" not in cache
    assert cache.find("a") == "a"
    assert await cache.load("b", at_once("again", 11)) == "again"
    assert (cache.held_bytes, cache.misses, cache.evictions) == (10, 2, 0)


async def test_a_loader_that_is_cancelled_before_it_begins_hands_on() -> None:
    """A caller that becomes the loader and is cancelled at once hands over to the next one."""
    cache: Cache[str, str] = Cache(100)
    loads = Loads()
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(cache.load("a", loads.fetch)) for _ in range(3)]
        await quiesce()
        loads.begun[0].cancel()  # ends the first load as a cancelled task does
        await asyncio.sleep(0)
        assert (calls[0].done(), len(loads.begun)) == (True, 1)  # it was woken, and has not run
        calls[1].cancel()
        await quiesce()
        assert len(loads.begun) == 2
        loads.begun[1].set_result(Sized("A", 1))
    assert calls[2].result() == "A"


@pytest.mark.parametrize("number", range(10))
async def test_any_cancellations_and_failures(number: int) -> None:
    """Each caller that is not cancelled gets an item, or the error of a load that it waited for."""
    random = random_of(f"cache {number}")
    cache: Cache[str, str] = Cache(3)
    loads = Loads()

    async def call() -> str:
        try:
            return await cache.load(random.choice("abcde"), loads.fetch)
        except StoreUnavailable:
            return "failed"

    async with asyncio.TaskGroup() as tasks:
        calls: list[asyncio.Task[str]] = []
        for _ in range(200):
            choice = random.random()
            if choice < 0.4:
                calls.append(tasks.create_task(call()))
            elif choice < 0.6 and calls:
                random.choice(calls).cancel()
            elif choice < 0.9:
                loads.end_one(random)
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
        while not all(call.done() for call in calls):
            loads.end_one(random)
            await asyncio.sleep(0)
    assert {c.result() for c in calls if not c.cancelled()} <= {"item", "failed"}
    assert not any(cache.is_loading(key) for key in "abcde")
    assert cache.held_bytes == len(cache) <= 3


class Requests:
    """Requests that end when the test says so."""

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.running: dict[str, asyncio.Event] = {}
        self.order: list[str] = []

    async def request(self, name: str, size_bytes: int) -> None:
        async with self.budget.reserve(size_bytes):
            end = self.running[name] = asyncio.Event()
            self.order.append(name)
            try:
                await end.wait()
            finally:
                del self.running[name]

    async def end(self, name: str) -> None:
        self.running[name].set()
        await quiesce()


async def test_first_come_first_served() -> None:
    """Beyond the bound requests wait, and small ones do not overtake a large one."""
    requests = Requests(ReadBudget(10))
    async with asyncio.TaskGroup() as tasks:
        for name, size_bytes in [("a", 6), ("b", 4), ("c", 7), ("d", 1), ("e", 3)]:
            tasks.create_task(requests.request(name, size_bytes))
        await quiesce()
        assert requests.order == ["a", "b"]
        assert (requests.budget.in_flight_bytes, requests.budget.waiting_count) == (10, 3)
        await requests.end("b")
        assert requests.order == ["a", "b"]
        await requests.end("a")
        assert requests.order == ["a", "b", "c", "d"]
        await requests.end("d")
        assert requests.order[-1] == "e"
        await requests.end("c")
        await requests.end("e")
    assert (requests.budget.in_flight_bytes, requests.budget.in_flight_bytes_peak) == (0, 10)


@pytest.mark.parametrize("number", range(10))
async def test_any_cancellations(number: int) -> None:
    """Under any cancellations the bound holds, all requests proceed, and every byte is returned."""
    random = random_of(f"read budget {number}")
    budget = ReadBudget(10)
    in_flight: list[int] = []
    waiting_ends: list[asyncio.Event] = []

    async def request(size_bytes: int) -> None:
        end = asyncio.Event()
        async with budget.reserve(size_bytes):
            in_flight.append(size_bytes)
            assert budget.in_flight_bytes >= sum(in_flight)
            assert sum(in_flight) <= 10 or len(in_flight) == 1
            waiting_ends.append(end)
            try:
                await end.wait()
            finally:
                in_flight.remove(size_bytes)

    async with asyncio.TaskGroup() as tasks:
        calls: list[asyncio.Task[None]] = []
        for _ in range(200):
            choice = random.random()
            if choice < 0.5:
                calls.append(tasks.create_task(request(random.choice([1, 3, 7, 12]))))
            elif choice < 0.7 and calls:
                random.choice(calls).cancel()
            elif waiting_ends:
                waiting_ends.pop(random.randrange(len(waiting_ends))).set()
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
        while not all(call.done() for call in calls):
            while waiting_ends:
                waiting_ends.pop().set()
            await asyncio.sleep(0)
    assert (budget.in_flight_bytes, budget.waiting_count) == (0, 0)


async def test_what_a_load_requests_is_recorded_for_all_that_wait() -> None:
    """All callers of a load record its requests, also those that come later; the loader pays."""
    cache: Cache[str, str] = Cache(100)
    loads = Loads()
    activities = [CallActivity(0) for _ in range(4)]

    async def call(activity: CallActivity | None) -> str:
        CURRENT.set(activity)
        return await cache.load("a", fetch)

    async def fetch() -> Sized[str]:
        current = CURRENT.get()
        assert current is not None
        request = current.begin_request("get_range", "levels/1", 0)
        current.sent.add({"read": 1})
        try:
            return await loads.fetch()
        finally:
            request.ended_ns = 1

    async with asyncio.TaskGroup() as tasks:
        first, *later = [tasks.create_task(call(each)) for each in (*activities, activities[1])]
        background = tasks.create_task(call(None))
        await quiesce()
        first.cancel()  # the second one loads
        await quiesce()
        loads.begun[1].set_result(Sized("A", 1))
    assert {task.result() for task in (*later, background)} == {"A"}
    given_up, *others = activities
    assert [len(each.requests) for each in activities] == [1, 2, 2, 2]
    assert all(each.requests == others[0].requests for each in others)
    assert given_up.requests[0] is others[0].requests[0]
    assert [request.waiting_calls for request in others[0].requests] == [4, 3]
    assert [dict(each.sent) for each in activities] == [{"read": 1}, {"read": 1}, {}, {}]
    assert CURRENT.get() is None
