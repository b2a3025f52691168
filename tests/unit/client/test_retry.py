"""Retries: calls that were not applied, and calls of which a repeat is harmless."""

from __future__ import annotations

import grpc
import pytest

from shalekv.errors import Fenced, InvalidRequest, QueueFull, Stopping
from shalekv.errors import OutcomeUnknown as ServerOutcomeUnknown
from shalekv_client import (
    Add,
    Batch,
    Client,
    ErrorDetails,
    Missing,
    NotApplied,
    Overloaded,
    Put,
    RetryPolicy,
    ServerFailed,
    ShaleKVError,
)
from shalekv_client import Stopping as ClientStopping
from tests.kit.serving.dict_server import DictServer, Failure, bare, losing, refusing, silent

CODE = grpc.StatusCode
STOPPING = refusing(Stopping("stopping"))
FULL = refusing(QueueFull("the queue is full", retry_after_ms=1))
QUICK = RetryPolicy(attempts_max=4, backoff_initial_ms=1, backoff_max_ms=2)
WITHOUT_KEYS = RetryPolicy(attempts_max=4, backoff_initial_ms=1, backoff_max_ms=2, idempotent=False)

HOWS: dict[str, Failure] = {
    "unavailable": bare(CODE.UNAVAILABLE),
    "cancelled": bare(CODE.CANCELLED),
    "deadline": bare(CODE.DEADLINE_EXCEEDED),
    "exhausted": bare(CODE.RESOURCE_EXHAUSTED),
    "internal": bare(CODE.INTERNAL),
    "unknown": refusing(ServerOutcomeUnknown("perhaps")),
    "lost": losing(),
    "invalid": refusing(InvalidRequest("key", "is wrong")),
    "fenced": refusing(Fenced("fenced", own_epoch=1, newer_epoch=2)),
}

together = pytest.mark.parametrize("coalesce", [True, False], ids=["together", "alone"])


def overloaded(retry_after_ms: int | None) -> Overloaded:
    details = ErrorDetails(
        "here:1", "RESOURCE_EXHAUSTED", "full", "QUEUE_FULL", retry_after_ms=retry_after_ms
    )
    return Overloaded(details)


def stopping() -> NotApplied:
    return ClientStopping(ErrorDetails("here:1", "UNAVAILABLE", "stopping", "STOPPING"))


@together
@pytest.mark.parametrize("policy", [QUICK, WITHOUT_KEYS], ids=["keys", "no keys"])
@pytest.mark.parametrize("failures", [[STOPPING], [FULL, STOPPING, FULL]], ids=["one", "three"])
async def test_what_was_not_applied_is_sent_again(
    server: DictServer, failures: list[Failure], policy: RetryPolicy, *, coalesce: bool
) -> None:
    """Put, delete and write are repeated after "not applied", and are then applied once."""
    async with Client(server.address, retry=policy, coalesce=coalesce) as client:
        server.state.failures.extend(failures)
        await client.put(b"a", b"1")
        server.state.failures.extend(failures)
        await client.delete(b"a")
        server.state.failures.extend(failures)
        await client.write(Batch().put(b"b", b"2"))
    assert server.state.seq == 3
    attempts = len(failures) + 1
    assert server.state.calls == {"Put": attempts, "Delete": attempts, "Write": attempts}


@together
@pytest.mark.parametrize("how", ["unavailable", "cancelled", "deadline", "unknown", "lost"])
async def test_unknown_outcomes_are_settled_by_a_repeat(
    server: DictServer, how: str, *, coalesce: bool
) -> None:
    """A write with an unknown outcome is repeated with the same key, and is applied once."""
    async with Client(server.address, retry=QUICK, coalesce=coalesce) as client:
        server.state.failures.append(HOWS[how])
        assert await client.add(b"n", 5) == 5
        server.state.failures.append(HOWS[how])
        commit = await client.put(b"k", b"v", condition=Missing())
        server.state.failures.append(HOWS[how])
        assert (await client.txn([], [Add(b"n", 2), Put(b"x", b"y")])).results == (7, None)
    assert (commit.seq, server.state.seq) == (2, 3)
    keys = [request.header.idempotency_key for request in server.state.requests]
    assert keys[0::2] == keys[1::2]
    assert len(set(keys)) == 3


@together
@pytest.mark.parametrize(
    "how",
    [
        "unavailable",
        "cancelled",
        "deadline",
        "exhausted",
        "internal",
        "unknown",
        "invalid",
        "fenced",
    ],
)
async def test_without_a_key_nothing_else_is_sent_again(
    server: DictServer, how: str, *, coalesce: bool
) -> None:
    """A write with an unknown outcome and without a key, or one that cannot succeed, is
    sent once.
    """
    server.state.failures.append(HOWS[how])
    async with Client(server.address, retry=WITHOUT_KEYS, coalesce=coalesce) as client:
        with pytest.raises(ShaleKVError):
            await client.put(b"k", b"v")
    assert server.state.calls["Put"] == 1
    assert server.state.requests[0].header.idempotency_key == b""


@pytest.mark.parametrize("how", ["exhausted", "internal"])
async def test_failure_of_one_call_is_not_that_of_a_stream(server: DictServer, how: str) -> None:
    """A bare INTERNAL or RESOURCE_EXHAUSTED of a unary call is not repeated. As the end of
    a stream it only means that the stream is over, and its operations are.
    """
    server.state.failures.append(HOWS[how])
    async with Client(server.address, retry=QUICK, coalesce=False) as alone:
        with pytest.raises(ServerFailed):
            await alone.put(b"k", b"v")
    server.state.failures.append(HOWS[how])
    async with Client(server.address, retry=QUICK) as together:
        await together.put(b"k", b"v")


async def test_key_of_the_caller_is_sent_as_it_is(server: DictServer) -> None:
    """A write with a key of the caller is repeated with it, even if the client makes no keys."""
    async with Client(server.address, retry=WITHOUT_KEYS) as client:
        server.state.failures.append(losing())
        first = await client.put(b"k", b"v", idempotency_key=b"mine")
        again = await client.put(b"k", b"v", idempotency_key=b"mine")
    assert first == again
    keys = [request.header.idempotency_key for request in server.state.requests]
    assert keys == [b"mine"] * 3


@together
async def test_all_attempts_share_one_deadline(server: DictServer, *, coalesce: bool) -> None:
    """A second attempt has the time that the first one has left."""
    server.state.failures.extend([FULL, silent()])
    async with Client(server.address, retry=QUICK, coalesce=coalesce) as client:
        with pytest.raises(TimeoutError):
            await client.put(b"k", b"v", timeout_ms=2_000)
    assert server.state.calls["Put"] == 2


@together
async def test_silent_attempt_is_given_up(server: DictServer, *, coalesce: bool) -> None:
    """With a timeout for attempts, an unanswered write is repeated within its deadline."""
    policy = RetryPolicy(backoff_initial_ms=1, attempt_timeout_ms=300)
    server.state.failures.extend([silent(), silent()])
    async with Client(server.address, retry=policy, coalesce=coalesce) as client:
        assert await client.add(b"n") == 1
    assert server.state.calls["Write"] >= 3  # more, if the machine is slow


@together
async def test_reads_are_repeated_whatever_happened(server: DictServer, *, coalesce: bool) -> None:
    """Get, batch get, scan, status and stats are repeated after any transient error."""
    async with Client(server.address, retry=WITHOUT_KEYS, coalesce=coalesce) as client:
        await client.put(b"k", b"v")
        for read in ("Get", "BatchGet", "Scan", "Status", "Stats"):
            server.state.failures.append(bare(CODE.UNAVAILABLE))
            match read:
                case "Get":
                    assert await client.get(b"k") is not None
                case "BatchGet":
                    assert await client.batch_get([b"x"]) == [None]
                case "Scan":
                    assert [entry.value async for entry in client.scan()] == [b"v"]
                case "Status":
                    assert (await client.status()).version == "0.0.7"
                case _:
                    assert (await client.stats()).processes == ()
            assert server.state.calls[read] == 2


def test_advice_is_a_minimum() -> None:
    """A client waits at least as long as the server advises, for any random number."""
    policy = RetryPolicy()
    delays = [policy.delay_ms(1, overloaded(400), chance) for chance in (0.0, 0.5, 1.0)]
    assert delays == [400.0, 500.0, 600.0]


def test_backoff_grows_to_its_limit() -> None:
    """Without advice, delays double up to the limit, and are spread over half of their
    length; there is none after the last attempt.
    """
    policy = RetryPolicy(attempts_max=7, backoff_initial_ms=100, backoff_max_ms=800)
    longest = [policy.delay_ms(n, stopping(), 1.0) for n in range(1, 7)]
    shortest = [policy.delay_ms(n, stopping(), 0.0) for n in range(1, 7)]
    assert longest == [100.0, 200.0, 400.0, 800.0, 800.0, 800.0]
    assert shortest == [50.0, 100.0, 200.0, 400.0, 400.0, 400.0]
    assert policy.delay_ms(7, stopping(), 0.5) is None
