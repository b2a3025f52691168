"""The choice of the next server, and of a second one for hedging, without servers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from shalekv_client.errors import ConnectionLost, ErrorDetails, ShaleKVError, Stopping
from shalekv_client.policies import Destination, Role
from shalekv_client.routing.endpoints import AVOID_MAX_S, Endpoint, Endpoints
from shalekv_client.routing.fleet import first_answer

READ, WRITE = Destination.BY_POLICY, Destination.WRITER


def known(readers: int, *, nearest_first: bool = False) -> tuple[Endpoints, list[Endpoint]]:
    """Endpoints with known roles: the writer is w:1, the readers are r0:1, r1:1, ..."""
    addresses = ["w:1", *(f"r{number}:1" for number in range(readers))]
    endpoints = Endpoints(addresses, nearest_first=nearest_first)
    writer, *others = endpoints
    endpoints.note_role(writer, Role.WRITER, 7)
    for each in others:
        endpoints.note_role(each, Role.READER, 7)
    return endpoints, others


def at(endpoints: Endpoints, address: str) -> Endpoint:
    found = endpoints.get(address)
    assert found is not None
    return found


def test_lone_server_is_asked_for_everything() -> None:
    """With one address there is no choice until the server reports that it is a reader."""
    endpoints = Endpoints(["a:1"])
    (only,) = endpoints
    assert endpoints.sole is only
    assert endpoints.choose(WRITE, 0.5) is only
    endpoints.note_role(only, Role.READER, 7)
    assert endpoints.sole is None
    assert endpoints.choose(WRITE, 0.5) is None
    assert endpoints.choose(READ, 0.5) is only


def test_reads_take_turns_at_the_readers() -> None:
    """Each reader gets its share of reads, and the writer none as long as a reader serves."""
    endpoints, readers = known(3)
    counts = Counter(endpoints.choose(READ, 0.5) for _ in range(30))
    assert counts == dict.fromkeys(readers, 10)


def test_reads_fall_back_to_the_writer() -> None:
    """When every reader was tried, or is avoided, the writer is asked; after it none."""
    endpoints, readers = known(2)
    writer = endpoints.writer
    assert endpoints.choose(READ, 0.5, set(readers)) is writer
    for each in readers:
        endpoints.failed(each, 0.0)
    assert endpoints.choose(READ, 0.5) is writer
    assert endpoints.choose(READ, 0.5, {*readers, at(endpoints, "w:1")}) is None


def test_failures_in_a_row_are_avoided_longer() -> None:
    """The time to avoid a server doubles up to a limit, and an answer ends it."""
    endpoints, (reader,) = known(1)
    times = []
    for _ in range(8):
        endpoints.failed(reader, 10.0)
        times.append(reader.avoid_until_s - 10.0)
    assert times == [0.25, 0.5, 1.0, 2.0, 4.0, AVOID_MAX_S, AVOID_MAX_S, AVOID_MAX_S]
    assert endpoints.failing == {reader}
    endpoints.answered(reader, 1.0)
    assert (reader.avoid_until_s, reader.failures, endpoints.failing) == (0.0, 0, set())


def test_nearest_is_the_server_that_answers_soonest() -> None:
    """Servers without a measurement come first; then the least latency, and others now and then."""
    endpoints, (near, far) = known(2, nearest_first=True)
    writer = at(endpoints, "w:1")
    assert endpoints.choose(READ, 0.0) in (near, far, writer)
    for each, latency_ms in ((near, 1.0), (far, 9.0), (writer, 5.0)):
        endpoints.answered(each, latency_ms)
    assert {endpoints.choose(READ, chance) for chance in (0.05, 0.5, 0.99)} == {near}
    assert {endpoints.choose(READ, chance) for chance in (0.0, 0.04)} == {far, writer}
    for _ in range(40):
        endpoints.answered(near, 20.0)
    assert endpoints.choose(READ, 0.5) is writer


def test_latency_follows_what_is_measured() -> None:
    """A measurement moves the latency by a fifth; a read that was given up can only increase it."""
    endpoints, (reader,) = known(1)
    endpoints.answered(reader, 10.0)
    endpoints.answered(reader, 20.0)
    assert reader.latency_ms == 12.0
    endpoints.note_slower(reader, 5.0)
    assert reader.latency_ms == 12.0
    endpoints.note_slower(reader, 22.0)
    assert reader.latency_ms == 14.0


def test_greatest_epoch_is_the_writer() -> None:
    """A server that reports itself as the writer under an old epoch is not believed."""
    endpoints = Endpoints(["old:1", "new:1", "r:1"])
    old, new, reader = endpoints
    endpoints.note_role(old, Role.WRITER, 7)
    assert endpoints.writer is old
    endpoints.note_role(reader, Role.READER, 8)
    assert endpoints.writer is None
    endpoints.note_role(old, Role.WRITER, 7)
    assert endpoints.writer is None
    endpoints.note_role(new, Role.WRITER, 8)
    assert endpoints.writer is new


def test_a_refusal_can_report_a_newer_epoch() -> None:
    """A fenced writer is not the writer any more once it reports the newer epoch."""
    endpoints, _ = known(1)
    endpoints.note_newer_epoch(7)
    assert endpoints.writer is not None
    endpoints.note_newer_epoch(8)
    assert endpoints.writer is None


def test_reported_addresses_get_no_calls_until_they_answer() -> None:
    """A reported address is not read from, and is dropped if the writer is not there; those
    of the user stay.
    """
    endpoints, readers = known(2)
    reported = endpoints.add_reported("new:1")
    assert {endpoints.choose(READ, 0.5) for _ in range(9)} == set(readers)
    assert endpoints.drop_reported() == [reported]
    assert len(endpoints) == 3
    reported = endpoints.add_reported("new:1")
    endpoints.note_role(reported, Role.WRITER, 8)
    assert endpoints.writer is reported
    assert endpoints.drop_reported() == []
    assert endpoints.choose(READ, 0.5, set(readers)) in (reported, at(endpoints, "w:1"))


def test_address_of_the_user_is_preferred_for_the_same_writer() -> None:
    """A writer that is known by two addresses keeps the one that the user gave."""
    endpoints, _ = known(1)
    endpoints.note_role(endpoints.add_reported("127.0.0.1:1"), Role.WRITER, 7)
    assert endpoints.writer is at(endpoints, "w:1")


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
    """The first answer counts, and the other attempt is cancelled."""
    for first_wins in (True, False):
        first, second = Asked(), Asked()
        asking = asyncio.create_task(first_answer(first.ask(), second.ask, AT_ONCE_S))
        await second.is_asked.wait()
        winner, loser = (first, second) if first_wins else (second, first)
        winner.answer.set_result("won")
        assert await asking == "won"
        assert (winner.is_cancelled, loser.is_cancelled) == (False, True)


async def test_failure_in_time_is_not_hedged() -> None:
    """A failure before the hedging delay is raised at once, without a second attempt."""
    first, second = Asked(), Asked()
    first.answer.set_exception(failure(Stopping))
    with pytest.raises(Stopping):
        await first_answer(first.ask(), second.ask, NEVER_S)
    assert not second.is_asked.is_set()


async def test_one_failure_leaves_the_other() -> None:
    """When one of two attempts fails, the other's answer counts; when both fail, the last error."""
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
    """When the caller is cancelled, both attempts are cancelled."""
    first, second = Asked(), Asked()
    asking = asyncio.create_task(first_answer(first.ask(), second.ask, AT_ONCE_S))
    await second.is_asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (first.is_cancelled, second.is_cancelled) == (True, True)
