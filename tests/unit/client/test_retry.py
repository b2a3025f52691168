"""Repeating calls: reads by gRPC, mutations only when the server said "not applied"."""

from __future__ import annotations

import grpc
import pytest

from shalekv.errors import DeadlinePassed, Fenced, InvalidRequest, QueueFull, Stopping
from shalekv_client import (
    Batch,
    Client,
    ErrorDetails,
    NotApplied,
    Overloaded,
    RetryPolicy,
    ShaleKVError,
)
from shalekv_client import Fenced as ClientFenced
from shalekv_client import Stopping as ClientStopping
from shalekv_client.retry import may_repeat
from tests.unit.client.dict_server import DictServer, Failure, bare, refusing, silent

CODE = grpc.StatusCode
STOPPING = refusing(Stopping("stopping"))
FULL = refusing(QueueFull("the queue is full", retry_after_ms=1))
FENCED = refusing(Fenced("fenced", own_epoch=1, newer_epoch=2))
QUICK = RetryPolicy(attempts_max=4, backoff_initial_ms=1, backoff_max_ms=2)


def overloaded(retry_after_ms: int | None) -> Overloaded:
    """A refusal with, or without, advice."""
    details = ErrorDetails(
        "here:1", "RESOURCE_EXHAUSTED", "full", "QUEUE_FULL", retry_after_ms=retry_after_ms
    )
    return Overloaded(details)


def stopping() -> NotApplied:
    """A refusal by a server that stops."""
    return ClientStopping(ErrorDetails("here:1", "UNAVAILABLE", "stopping", "STOPPING"))


@pytest.mark.parametrize("failures", [[STOPPING], [FULL, STOPPING, FULL]])
async def test_what_was_not_applied_is_sent_again(
    server: DictServer, failures: list[Failure]
) -> None:
    """Put, delete and write are repeated after "not applied", and are then applied once."""
    async with Client(server.address, retry=QUICK) as client:
        server.state.failures.extend(failures)
        await client.put(b"a", b"1")
        server.state.failures.extend(failures)
        await client.delete(b"a")
        server.state.failures.extend(failures)
        await client.write(Batch().put(b"b", b"2"))
    assert server.state.seq == 3
    attempts = len(failures) + 1
    assert server.state.calls == {"Put": attempts, "Delete": attempts, "Write": attempts}


@pytest.mark.parametrize(
    "how",
    [
        bare(CODE.UNAVAILABLE),
        bare(CODE.CANCELLED),
        bare(CODE.DEADLINE_EXCEEDED),
        bare(CODE.RESOURCE_EXHAUSTED),
        bare(CODE.INTERNAL),
        refusing(InvalidRequest("key", "is wrong")),
        refusing(DeadlinePassed("too late")),
        FENCED,
    ],
    ids=lambda how: how.__qualname__.split(".")[0],
)
async def test_nothing_else_is_sent_again(server: DictServer, how: Failure) -> None:
    """A mutation whose outcome is unknown, or that cannot succeed here, is sent once."""
    server.state.failures.append(how)
    async with Client(server.address, retry=QUICK) as client:
        with pytest.raises(ShaleKVError):
            await client.put(b"k", b"v")
    assert server.state.calls["Put"] == 1


async def test_attempts_are_bounded(server: DictServer) -> None:
    """After the last attempt the caller gets the refusal."""
    server.state.failures.extend([FULL] * 10)
    async with Client(server.address, retry=QUICK) as client:
        with pytest.raises(Overloaded):
            await client.put(b"k", b"v")
    assert server.state.calls["Put"] == QUICK.attempts_max


async def test_deadline_leaves_the_certain_refusal(server: DictServer) -> None:
    """Advice that reaches past the deadline is not waited for: the refusal is raised at once."""
    server.state.failures.append(refusing(QueueFull("full", retry_after_ms=60_000)))
    async with Client(server.address) as client:
        with pytest.raises(Overloaded):
            await client.put(b"k", b"v", timeout_ms=30_000)
    assert server.state.calls["Put"] == 1


async def test_all_attempts_share_one_deadline(server: DictServer) -> None:
    """A second attempt has the time that the first one left, and no more."""
    server.state.failures.extend([FULL, silent()])
    async with Client(server.address, retry=QUICK) as client:
        with pytest.raises(TimeoutError):
            await client.put(b"k", b"v", timeout_ms=150)
    assert server.state.calls["Put"] == 2


async def test_reads_are_repeated_whatever_happened(server: DictServer) -> None:
    """Get, batch get, scan and status survive a server that is unavailable for a moment."""
    async with Client(server.address) as client:
        await client.put(b"k", b"v")
        for read in ("Get", "BatchGet", "Scan", "Status"):
            server.state.failures.append(bare(CODE.UNAVAILABLE))
            match read:
                case "Get":
                    assert await client.get(b"k") is not None
                case "BatchGet":
                    assert await client.batch_get([b"x"]) == [None]
                case "Scan":
                    assert [entry.value async for entry in client.scan()] == [b"v"]
                case _:
                    assert (await client.status()).version == "0.0.7"
            assert server.state.calls[read] == 2


def test_advice_is_a_minimum() -> None:
    """However the dice fall, a client waits at least as long as the server asked."""
    policy = RetryPolicy()
    delays = [policy.delay_ms(1, overloaded(400), chance) for chance in (0.0, 0.5, 1.0)]
    assert delays == [400.0, 500.0, 600.0]


def test_backoff_grows_to_its_limit() -> None:
    """Without advice delays double up to the limit, and are spread over half of their length."""
    policy = RetryPolicy(attempts_max=9, backoff_initial_ms=100, backoff_max_ms=800)
    longest = [policy.delay_ms(n, stopping(), 1.0) for n in range(1, 7)]
    shortest = [policy.delay_ms(n, stopping(), 0.0) for n in range(1, 7)]
    assert longest == [100.0, 200.0, 400.0, 800.0, 800.0, 800.0]
    assert shortest == [50.0, 100.0, 200.0, 400.0, 400.0, 400.0]


def test_last_attempt_has_no_delay_after_it() -> None:
    """The policy says stop once all attempts are made."""
    assert RetryPolicy(attempts_max=3).delay_ms(3, stopping(), 0.5) is None


def test_overload_without_advice_is_not_repeated() -> None:
    """RESOURCE_EXHAUSTED is repeated only with a RetryInfo."""
    assert not may_repeat(overloaded(None))
    assert may_repeat(overloaded(0))


def test_fenced_writers_are_not_asked_again() -> None:
    """A fenced writer never serves again, so there is nothing to wait for."""
    details = ErrorDetails("here:1", "UNAVAILABLE", "fenced", "FENCED")
    assert not may_repeat(ClientFenced(details))
