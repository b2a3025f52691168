"""Streams that stall while others wait for memory: which one is ended, when, and what it frees."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import Overloaded, StreamTooSlow
from shalekv.read.memory_budget import SLOWEST_BYTES_PER_S, SMALL_BYTES, MemoryBudget, Share, Stalls
from tests.kit.virtual_time import virtual_time

STALLED_MS = 1_000
LARGE = SMALL_BYTES + 1
WAIT_MS = 10_000
LATE_MS = 1.2 * STALLED_MS  # by then a stream that stalls now is ended


class Client:
    """A stream with one message at a time, which its client takes when the test says so."""

    def __init__(self, budget: MemoryBudget) -> None:
        assert budget.stalls is not None
        self._stalls = budget.stalls
        self._share = Share(budget)
        self.ended_by: StreamTooSlow | None = None

    async def offer(self, size_bytes: int) -> None:
        await self._share.take(size_bytes, 0, wait_ms=WAIT_MS)
        self._stalls.offer(self, size_bytes)

    def take(self) -> None:
        self._stalls.taken(self)
        self._share.give_back()

    async def end(self, error: StreamTooSlow) -> None:
        assert self.ended_by is None
        self.ended_by = error
        self._share.give_back()
        await asyncio.sleep(0)
        self._share.give_back()  # as the call does, which ends by this


def budget_of(size_bytes: int) -> MemoryBudget:
    return MemoryBudget(size_bytes, Stalls(LoopClock(), STALLED_MS))


async def stalled_clients(
    budget: MemoryBudget, count: int, *, apart_ms: float = 10
) -> list[Client]:
    clients = [Client(budget) for _ in range(count)]
    for client in clients:
        await client.offer(LARGE)
        await LoopClock().sleep_ms(apart_ms)
    return clients


def are_ended(clients: list[Client]) -> list[bool]:
    return [client.ended_by is not None for client in clients]


async def timed_ms(budget: MemoryBudget, needed_bytes: int, *, wait_ms: int = WAIT_MS) -> float:
    """Return the time that it takes to get bytes of the budget, which are given back."""
    began_ms = LoopClock().monotonic_ms()
    async with budget.held(needed_bytes, wait_ms=wait_ms):
        return LoopClock().monotonic_ms() - began_ms


@virtual_time(orders=5)
async def test_the_oldest_makes_way() -> None:
    """The server ends as many streams as a waiting call needs, those stalled for longest first."""
    budget = budget_of(4 * LARGE)
    clients = await stalled_clients(budget, 4)
    assert await timed_ms(budget, 2 * LARGE) <= LATE_MS
    assert are_ended(clients) == [True, True, False, False]
    assert budget.used_bytes == 2 * LARGE
    assert "read nothing from this stream for 1" in str(clients[0].ended_by)


@virtual_time(orders=5)
async def test_no_stream_is_ended_without_need() -> None:
    """Streams may stall as long as they like while the budget is sufficient for all."""
    budget = budget_of(4 * LARGE)
    clients = await stalled_clients(budget, 3)
    await LoopClock().sleep_ms(100 * STALLED_MS)
    assert await timed_ms(budget, LARGE) == 0
    assert await timed_ms(budget, SMALL_BYTES) == 0
    assert are_ended(clients) == [False] * 3


@virtual_time(orders=5)
async def test_a_client_that_goes_on_is_never_ended() -> None:
    """A message taken just in time is progress, however long others wait."""
    budget = budget_of(LARGE)
    slow = Client(budget)
    await slow.offer(LARGE)

    async def go_on() -> None:
        while True:
            await LoopClock().sleep_ms(STALLED_MS - 1)
            slow.take()
            await slow.offer(LARGE)

    async with asyncio.TaskGroup() as tasks:
        going_on = tasks.create_task(go_on())
        # The slow one is behind this one in the queue each time, and gets its turn.
        times = [await timed_ms(budget, LARGE) for _ in range(5)]
        going_on.cancel()
    assert max(times) < STALLED_MS
    assert slow.ended_by is None


@virtual_time(orders=5)
async def test_a_large_message_is_given_more_time() -> None:
    """A client is ended when it is slower than the slowest one allowed."""
    size_bytes = 3 * SLOWEST_BYTES_PER_S
    budget = budget_of(size_bytes)
    client = Client(budget)
    await client.offer(size_bytes)
    due_ms = STALLED_MS + 3_000
    waited_ms = await timed_ms(budget, LARGE)
    assert due_ms <= waited_ms <= due_ms + LATE_MS - STALLED_MS
    assert client.ended_by is not None


@virtual_time(orders=5)
async def test_waiting_calls_are_served_in_turn() -> None:
    """Streams are ended for the first call in the queue; a cancelled call holds up no other."""
    budget = budget_of(4 * LARGE)
    clients = await stalled_clients(budget, 4, apart_ms=100)
    order: list[int] = []

    async def use(number: int, needed_bytes: int) -> None:
        async with budget.held(needed_bytes, wait_ms=WAIT_MS):
            order.append(number)
            await LoopClock().sleep_ms(50)

    async with asyncio.TaskGroup() as tasks:
        users = []
        for number, needed_bytes in enumerate((3 * LARGE, 4 * LARGE, LARGE, LARGE)):
            users.append(tasks.create_task(use(number, needed_bytes)))
            await LoopClock().sleep_ms(1)
        await LoopClock().sleep_ms(STALLED_MS / 2)
        users[1].cancel()
    assert order == [0, 2, 3]
    assert are_ended(clients) == [True] * 3 + [False]


@virtual_time(orders=5)
async def test_a_call_that_gives_up_ends_no_young_stream() -> None:
    """A call that cannot wait long enough is refused, and the streams continue."""
    budget = budget_of(2 * LARGE)
    clients = await stalled_clients(budget, 2)
    with pytest.raises(Overloaded):
        await timed_ms(budget, LARGE, wait_ms=STALLED_MS // 2)
    await LoopClock().sleep_ms(10 * STALLED_MS)
    assert are_ended(clients) == [False, False]
    assert budget.used_bytes == 2 * LARGE


@pytest.mark.parametrize("seed", range(10))
@virtual_time()
async def test_bytes_are_given_back_once(seed: int) -> None:
    """The count stays right while clients take, stall, leave or are ended; all calls are served."""
    random = Random(seed)
    budget = budget_of(6 * LARGE)

    async def live() -> None:
        client = Client(budget)
        try:
            for _ in range(random.randrange(1, 6)):
                await client.offer(random.randrange(LARGE, 3 * LARGE))
                assert budget.used_bytes <= 6 * LARGE
                await LoopClock().sleep_ms(random.choice([0, 10, STALLED_MS, 20 * STALLED_MS]))
                if client.ended_by is not None:
                    return
                client.take()
        finally:
            client.take()

    async with asyncio.TaskGroup() as tasks:
        users = []
        for _ in range(40):
            users.append(tasks.create_task(live()))
            await LoopClock().sleep_ms(random.choice([0, 0, 100]))
            if random.random() < 0.2:
                random.choice(users).cancel()
    assert budget.used_bytes == 0
