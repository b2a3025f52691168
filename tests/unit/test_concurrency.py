"""Those who wait for a reply or for room, and logical time, which never goes back."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import OutcomeUnknown, Overloaded, WriteTimedOut
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget
from shalekv.write.logical_time import LogicalTime
from shalekv.write.pending_replies import PendingReplies
from tests.kit.inline_runtime import InlineClock, finish


def waits() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def test_all_who_wait_are_told_once() -> None:
    """When no answer is to be expected they hear that nobody knows, and nothing afterwards."""
    patience = PendingReplies(lambda: "")
    early, late, last = waits(), waits(), waits()
    for future in (early, late, last):
        patience.begin(future)
    assert patience.end(early)
    early.set_result(1)
    patience.fail_all()
    assert not patience.end(late)
    for future in (late, last):
        with pytest.raises(OutcomeUnknown):
            await future
    assert (await early, len(patience)) == (1, 0)


async def test_callers_who_have_gone_are_let_be() -> None:
    """A call that was cancelled, or ended before it began to wait, is not counted."""
    patience = PendingReplies(lambda: "")
    gone, done = waits(), waits()
    patience.begin(gone)
    gone.cancel()
    done.set_result(1)
    patience.begin(done)
    assert len(patience) == 1
    patience.fail_all()
    assert gone.cancelled()
    assert not patience.end(gone)
    assert await done == 1


async def test_who_has_a_deadline_is_told_in_time_and_why() -> None:
    """And once; what is answered before needs no timer, and others wait on."""
    patience = PendingReplies(lambda: "the disk is full")
    late, early, endless = waits(), waits(), waits()
    patience.begin(late, within_ms=5)
    patience.begin(early, within_ms=5)
    patience.begin(endless)
    assert patience.end(early)
    early.set_result(1)
    with pytest.raises(WriteTimedOut, match="the disk is full"):
        await late
    assert not patience.end(late)
    assert (await early, len(patience), endless.done()) == (1, 1, False)


LARGE = SMALL_BYTES + 1
FOR_EVER = 600_000


async def test_what_is_small_never_waits() -> None:
    """Clients that take nothing stop nobody."""
    room = MemoryBudget(LARGE)
    room.take(LARGE, 0)
    assert await room.take_when_free(SMALL_BYTES, LARGE, wait_ms=FOR_EVER) == SMALL_BYTES


async def test_what_is_large_waits_in_line() -> None:
    """The first who came gets the room that is given back; who needs more than all, waits for
    all.
    """
    room = MemoryBudget(2 * LARGE)
    room.take(2 * LARGE, 0)
    order: list[int] = []

    async def take(number: int, needed_bytes: int) -> None:
        async with room.held(needed_bytes, wait_ms=FOR_EVER):
            order.append(number)
            assert room.used_bytes <= max(2 * LARGE, needed_bytes)

    async with asyncio.TaskGroup() as tasks:
        for number, needed_bytes in enumerate((LARGE, 3 * LARGE, LARGE)):
            tasks.create_task(take(number, needed_bytes))
            await asyncio.sleep(0)
        room.give_back(LARGE)
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == [0]
        room.give_back(LARGE)
    assert order == [0, 1, 2]
    assert room.used_bytes == 0


async def test_who_waits_too_long_is_refused() -> None:
    """With advice when to come back, and the line goes on without it."""
    room = MemoryBudget(LARGE)
    room.take(LARGE, 0)
    with pytest.raises(Overloaded, match="no room was left") as refused:
        await room.take_when_free(LARGE, 0, wait_ms=1)
    assert refused.value.retry_after_ms == 1
    room.give_back(LARGE)
    assert await room.take_when_free(LARGE, 0, wait_ms=FOR_EVER) == LARGE


@pytest.mark.parametrize("seed", range(20))
async def test_room_is_never_lost_or_given_twice(seed: int) -> None:
    """Whoever is cancelled at whatever moment, everybody is let in and the bound holds."""
    random = Random(seed)
    room = MemoryBudget(4 * LARGE)
    held_bytes = 0

    async def use(needed_bytes: int) -> None:
        nonlocal held_bytes
        async with room.held(needed_bytes, wait_ms=FOR_EVER):
            held_bytes += needed_bytes
            assert held_bytes == needed_bytes or held_bytes <= 4 * LARGE
            try:
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                held_bytes -= needed_bytes

    async with asyncio.TaskGroup() as tasks:
        users = []
        for _ in range(60):
            users.append(tasks.create_task(use(random.randrange(LARGE, 6 * LARGE))))
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            if random.random() < 0.3:
                random.choice(users).cancel()
    assert (held_bytes, room.used_bytes) == (0, 0)


@given(
    store_now_ms=st.integers(0, 2_000),
    steps=st.lists(st.one_of(st.integers(0, 500), st.integers(-2_000, -1)), max_size=20),
)
def test_time_never_goes_back(store_now_ms: int, steps: list[int]) -> None:
    """Whatever floors are met, and whatever the store's clock shows, no later time is less (I5).

    A positive step is time that passes, a negative one a floor.
    """
    clock = InlineClock()
    time = LogicalTime(clock, store_now_ms=store_now_ms, jump_max_ms=1_000)
    time.raise_to(1_000)
    shown = time.now_ms()
    assert shown >= max(store_now_ms, 1_000)
    for step in steps:
        if step >= 0:
            finish(clock.sleep_ms(step))
        else:
            time.raise_to(-step)
            time.follow(store_now_ms, 0)  # as it was at first
        assert time.now_ms() >= max(shown, -step)
        shown = time.now_ms()
