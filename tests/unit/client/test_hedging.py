"""The first answer of two counts: decided over futures, without servers."""

from __future__ import annotations

import asyncio

import pytest

from shalekv_client.errors import ConnectionLost, ErrorDetails, ShaleKVError, Stopping
from shalekv_client.hedging import first_answer

AT_ONCE_S, NEVER_S = 0.001, 3_600.0


class Asked:
    """A server that answers when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_asked = asyncio.Event()
        self.is_cancelled = False

    async def ask(self) -> str:
        self.is_asked.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


def failure(kind: type[ShaleKVError]) -> ShaleKVError:
    return kind(ErrorDetails("here:1", "UNAVAILABLE", "what happened"))


async def test_first_answer_ends_the_other() -> None:
    """Whoever answers first is believed; the other one is cancelled."""
    for first_wins in (True, False):
        first, second = Asked(), Asked()
        asking = asyncio.create_task(first_answer(first.ask(), second.ask, AT_ONCE_S))
        await second.is_asked.wait()
        winner, loser = (first, second) if first_wins else (second, first)
        winner.answer.set_result("won")
        assert await asking == "won"
        assert (winner.is_cancelled, loser.is_cancelled) == (False, True)


async def test_failure_in_time_is_not_hedged() -> None:
    """What fails at once is told at once: failover is for others."""
    first, second = Asked(), Asked()
    first.answer.set_exception(failure(Stopping))
    with pytest.raises(Stopping):
        await first_answer(first.ask(), second.ask, NEVER_S)
    assert not second.is_asked.is_set()


async def test_one_failure_leaves_the_other() -> None:
    """When one of two fails, the other one's answer counts; when both do, the last error."""
    for number in (0, 1):
        both = Asked(), Asked()
        asking = asyncio.create_task(first_answer(both[0].ask(), both[1].ask, AT_ONCE_S))
        await both[1].is_asked.wait()
        both[number].answer.set_exception(failure(Stopping))
        await asyncio.wait([asking], timeout=0.01)
        assert not asking.done()
        both[1 - number].answer.set_result("other")
        assert await asking == "other"
    both = Asked(), Asked()
    asking = asyncio.create_task(first_answer(both[0].ask(), both[1].ask, AT_ONCE_S))
    await both[1].is_asked.wait()
    both[0].answer.set_exception(failure(Stopping))
    await asyncio.wait([asking], timeout=0.01)
    both[1].answer.set_exception(failure(ConnectionLost))
    with pytest.raises(ConnectionLost):
        await asking


async def test_cancelled_caller_leaves_nothing_behind() -> None:
    """When the caller is cancelled, both questions are."""
    first, second = Asked(), Asked()
    asking = asyncio.create_task(first_answer(first.ask(), second.ask, AT_ONCE_S))
    await second.is_asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (first.is_cancelled, second.is_cancelled) == (True, True)
