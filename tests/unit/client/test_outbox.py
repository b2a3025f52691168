"""The outbox (order, messages, and the bound on unanswered bytes) and deadlines."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.v1 import kv_pb2
from shalekv_client import operations
from shalekv_client.coalescer import Deadlines
from shalekv_client.stream import OVERHEAD_BYTES, Outbox, Pending

GET = operations.get(b"k")


def pending(number: int, size_bytes: int = 100) -> Pending:
    return Pending(number, GET, asyncio.get_running_loop().create_future(), size_bytes)


def filled(outbox: Outbox, count: int, size_bytes: int = 100) -> list[Pending]:
    made = [pending(number, size_bytes) for number in range(count)]
    for each in made:
        outbox.add(each)
    return made


def taken(outbox: Outbox) -> list[int]:
    return [each.number for each in outbox.take()]


async def test_message_is_cut_by_bytes() -> None:
    """A message has at most the allowed bytes, but at least one operation."""
    outbox = Outbox(message_bytes_max=250)
    filled(outbox, 3)
    outbox.add(pending(3, 1_000))
    outbox.add(pending(4))
    assert [taken(outbox) for _ in range(4)] == [[0, 1], [2], [3], [4]]


async def test_messages_shrink() -> None:
    """After refusals of a server messages get smaller, down to a least size."""
    outbox = Outbox(bytes_max=1 << 40, message_bytes_max=1 << 20)
    filled(outbox, 2_000, 1_000)
    counts = []
    for _ in range(5):
        counts.append(len(outbox.take()))
        outbox.shrink()
    assert counts == [1_000, 125, 15, 1, 1]
    filled(outbox, 2, 20_000)
    outbox.shrink()
    assert outbox.message_bytes_max == 32 * 1024


async def test_no_more_is_unanswered_than_allowed() -> None:
    """An operation that exceeds the bound stays queued, and no later one overtakes it."""
    outbox = Outbox(bytes_max=250)
    made = filled(outbox, 4)
    outbox.add(pending(4, 10))
    assert taken(outbox) == [0, 1]
    assert (taken(outbox), outbox.unanswered_bytes) == ([], 200)
    outbox.answered(made[1].size_bytes)
    assert taken(outbox) == [2]
    outbox.answered(made[0].size_bytes)
    outbox.answered(made[2].size_bytes)
    assert taken(outbox) == [3, 4]
    assert outbox.unanswered_bytes == 110


async def test_what_passes_the_bound_goes_alone() -> None:
    """An operation larger than the bound is sent when nothing else is unanswered."""
    outbox = Outbox(bytes_max=250)
    made = filled(outbox, 1)
    outbox.add(pending(1, 1_000))
    outbox.add(pending(2))
    assert taken(outbox) == [0]
    assert taken(outbox) == []
    outbox.answered(made[0].size_bytes)
    assert taken(outbox) == [1]
    assert taken(outbox) == []


async def test_what_is_given_up_is_not_sent() -> None:
    """Operations that were withdrawn, or whose caller has given up, are not sent."""
    outbox = Outbox()
    made = filled(outbox, 4)
    outbox.withdraw(made[1])
    made[2].future.cancel()
    assert taken(outbox) == [0, 3]
    assert outbox.held_bytes == 200
    outbox.withdraw(made[0])  # too late: it is sent
    assert outbox.held_bytes == 200


async def test_free_space_is_news() -> None:
    """`wait_for_work` returns when an operation is queued, and when an answer frees bytes."""
    outbox = Outbox(bytes_max=100)
    waiting = asyncio.ensure_future(outbox.wait_for_work())
    await asyncio.sleep(0)
    (first, _) = filled(outbox, 2)
    await waiting
    assert taken(outbox) == [0]
    waiting = asyncio.ensure_future(outbox.wait_for_work())
    await asyncio.sleep(0)
    outbox.answered(first.size_bytes)
    await waiting
    assert taken(outbox) == [1]


@pytest.mark.parametrize("value_bytes", [0, 100, 100_000])
def test_overhead_is_not_too_little(value_bytes: int) -> None:
    """An operation has at most the bytes in a message for which it is counted."""
    put = operations.put(b"k", bytes(value_bytes))
    message = kv_pb2.SessionRequest()
    message.operations.add(id=2**40, put=kv_pb2.PutRequest.FromString(put.data))
    assert message.ByteSize() <= len(put.data) + OVERHEAD_BYTES


class Bell:
    """Records which deadlines have passed, and when."""

    def __init__(self) -> None:
        self.rung: list[tuple[int, float]] = []
        self.rang = asyncio.Event()

    def __call__(self, pending: Pending) -> None:
        self.rung.append((pending.number, asyncio.get_running_loop().time()))
        self.rang.set()


async def test_deadlines_pass_in_order_and_never_early() -> None:
    """Each deadline passes after its time, in whatever order deadlines were added."""
    bell = Bell()
    deadlines = Deadlines(bell)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for number, timeout_ms in enumerate([60, 20, 40, 1]):
        deadlines.add(pending(number), timeout_ms - 1_000 * (loop.time() - began_s))
    while len(bell.rung) < 4:
        bell.rang.clear()
        await bell.rang.wait()
    assert [number for number, _ in bell.rung] == [3, 1, 2, 0]
    for number, at_s in bell.rung:
        assert at_s - began_s >= [0.06, 0.02, 0.04, 0.001][number]


async def test_what_is_taken_out_does_not_pass() -> None:
    """A discarded deadline does not pass, and the next one still does."""
    bell = Bell()
    deadlines = Deadlines(bell)
    answered = pending(0)
    deadlines.discard(deadlines.add(answered, 5), answered)
    deadlines.add(pending(1), 30)
    await bell.rang.wait()
    assert [number for number, _ in bell.rung] == [1]
