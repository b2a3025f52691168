"""Tests of pending replies, of the memory budget, and of logical time, which never goes back."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.concurrency import fail
from shalekv.errors import OutcomeUnknown, Overloaded, WriteTimedOut
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget
from shalekv.telemetry.activity import CURRENT, CallActivity
from shalekv.write.logical_time import LogicalTime
from shalekv.write.pending_replies import PendingReplies, PendingReply
from tests.kit.inline_runtime import InlineClock, finish


def waits() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def test_all_waiting_calls_end_once() -> None:
    """When no answer can come, waiting calls end with an unknown outcome, and only once."""
    replies = PendingReplies(lambda: "")
    early, late, last = waits(), waits(), waits()
    for future in (early, late, last):
        replies.begin(future)
    assert replies.end(early)
    early.set_result(1)
    replies.fail_all()
    assert not replies.end(late)
    for future in (late, last):
        with pytest.raises(OutcomeUnknown):
            await future
    assert (await early, len(replies)) == (1, 0)


async def test_callers_that_have_gone_are_ignored() -> None:
    """A call that was cancelled, or ended before it began to wait, is not counted."""
    replies = PendingReplies(lambda: "")
    gone, done = waits(), waits()
    replies.begin(gone)
    gone.cancel()
    done.set_result(1)
    replies.begin(done)
    assert len(replies) == 1
    replies.fail_all()
    assert gone.cancelled()
    assert not replies.end(gone)
    assert await done == 1


async def test_a_call_with_a_deadline_ends_in_time_with_the_cause() -> None:
    """A call fails at its deadline with the cause, once; earlier answers and other calls do not."""
    replies = PendingReplies(lambda: "the disk is full")
    late, early, endless = waits(), waits(), waits()
    replies.begin(late, within_ms=5)
    replies.begin(early, within_ms=5)
    replies.begin(endless)
    assert replies.end(early)
    early.set_result(1)
    with pytest.raises(WriteTimedOut, match="the disk is full"):
        await late
    assert not replies.end(late)
    assert (await early, len(replies), endless.done()) == (1, 1, False)


async def test_the_deadline_of_many_calls_has_the_context_of_none() -> None:
    """What is logged and charged at a deadline is not that of the call that came first."""
    replies = PendingReplies(lambda: "")
    CURRENT.set(CallActivity(0))
    late = PendingReply(bytes.decode)
    replies.begin(late, within_ms=5)
    CURRENT.set(None)
    found: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    late.add_done_callback(lambda _: found.set_result(CURRENT.get()))
    assert await found is None


async def test_a_reply_completes_its_call_within_the_log() -> None:
    """A callback gets the bytes before anything else runs; a caller that awaits, the message."""
    reply, gone, failed = (PendingReply(bytes.decode) for _ in range(3))
    done: list[object] = []
    for pending in (reply, gone, failed):
        pending.add_done_callback(done.append)
    assert not reply.done()
    reply.set_result(b"bytes")
    assert gone.cancel()
    gone.set_result(b"late")
    fail(failed, OutcomeUnknown("lost"))
    assert done == [reply, gone, failed]
    assert (reply.result(), reply.exception(), await reply) == (b"bytes", None, "bytes")
    assert not reply.cancel()
    assert gone.cancelled()
    assert isinstance(failed.exception(), OutcomeUnknown)
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(OutcomeUnknown):
        await failed
    reply.add_done_callback(done.append)
    assert done[-1] is reply


async def test_a_caller_that_is_cancelled_gives_up_its_reply_alone() -> None:
    """Cancelling the task that awaits a reply cancels that reply, and no other."""
    first, second = PendingReply(bytes.decode), PendingReply(bytes.decode)
    waiting = [asyncio.create_task(_awaited(each)) for each in (first, second)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert (first.cancelled(), second.done()) == (True, False)
    second.set_result(b"there")
    assert await waiting[1] == "there"


async def test_a_bug_in_a_callback_ends_no_other_call() -> None:
    """The error of a callback is reported, and the callbacks after it are called."""
    reply, reported = PendingReply(bytes.decode), list[object]()
    done: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    reply.add_done_callback(lambda _: 1 // 0)
    reply.add_done_callback(done.append)
    reply.set_result(b"")
    loop.set_exception_handler(None)
    assert isinstance(reported.pop(), ZeroDivisionError)
    assert done == [reply]


async def _awaited(reply: PendingReply[str]) -> str:
    return await reply


LARGE = SMALL_BYTES + 1
FOR_EVER = 600_000


async def test_small_requests_never_wait() -> None:
    """A small request gets memory at once even if clients hold all of it."""
    budget = MemoryBudget(LARGE)
    budget.take(LARGE, 0)
    assert await budget.take_when_free(SMALL_BYTES, LARGE, wait_ms=FOR_EVER) == SMALL_BYTES


async def test_large_requests_wait_in_order() -> None:
    """Returned memory goes to the first request, and one for more than all waits for all of it."""
    budget = MemoryBudget(2 * LARGE)
    budget.take(2 * LARGE, 0)
    order: list[int] = []

    async def take(number: int, needed_bytes: int) -> None:
        async with budget.held(needed_bytes, wait_ms=FOR_EVER):
            order.append(number)
            assert budget.used_bytes <= max(2 * LARGE, needed_bytes)

    async with asyncio.TaskGroup() as tasks:
        for number, needed_bytes in enumerate((LARGE, 3 * LARGE, LARGE)):
            tasks.create_task(take(number, needed_bytes))
            await asyncio.sleep(0)
        budget.give_back(LARGE)
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == [0]
        budget.give_back(LARGE)
    assert order == [0, 1, 2]
    assert budget.used_bytes == 0


async def test_a_request_that_waits_too_long_is_refused() -> None:
    """The refusal has advice when to retry, and the queue goes on without the request."""
    budget = MemoryBudget(LARGE)
    budget.take(LARGE, 0)
    with pytest.raises(Overloaded, match="no room was left") as refused:
        await budget.take_when_free(LARGE, 0, wait_ms=1)
    assert refused.value.retry_after_ms == 1
    budget.give_back(LARGE)
    assert await budget.take_when_free(LARGE, 0, wait_ms=FOR_EVER) == LARGE


@pytest.mark.parametrize("seed", range(20))
async def test_memory_is_never_lost_or_given_twice(seed: int) -> None:
    """The bound holds, and all requests are admitted, whichever calls are cancelled and when."""
    random = Random(seed)
    budget = MemoryBudget(4 * LARGE)
    held_bytes = 0

    async def use(needed_bytes: int) -> None:
        nonlocal held_bytes
        async with budget.held(needed_bytes, wait_ms=FOR_EVER):
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
    assert (held_bytes, budget.used_bytes) == (0, 0)


@given(
    store_now_ms=st.integers(0, 2_000),
    steps=st.lists(st.one_of(st.integers(0, 500), st.integers(-2_000, -1)), max_size=20),
)
def test_time_never_goes_back(store_now_ms: int, steps: list[int]) -> None:
    """No later time is less, whatever floors are set and whatever the store's clock shows (I5).

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
