"""Sessions that move to another token, and are not taken up at once, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from shalekv.errors import ConditionFailed as NotHeld
from shalekv.errors import (
    Fenced,
    QueueFull,
    ShaleError,
    Stopping,
    Unauthenticated,
    WriteTimedOut,
)
from shalekv_client import (
    Client,
    Commit,
    ConditionFailed,
    ConnectionLost,
    DeadlineExceeded,
    NotApplied,
    NotSent,
    Overloaded,
    RetryPolicy,
    ShaleKVError,
    request_id_of_calls,
)
from shalekv_client import Unauthenticated as NotKnown
from shalekv_client.session import Session
from tests.kit.constants import constants
from tests.kit.processes.deaf_proxy import DeafProxy
from tests.kit.serving.dict_server import DictServer, Failure, bare, losing, refusing
from tests.kit.timeouts import until
from tests.unit.client.cluster import cluster
from tests.unit.client.token_server import NEW, OLD, Asked

BUSY = QueueFull("too much waits", retry_after_ms=1)
STOPS = Stopping("the server stops")
FEW = RetryPolicy(attempts_max=3, backoff_initial_ms=1)


@pytest.fixture(autouse=True)
def asking_often() -> Iterator[None]:
    with constants({"shalekv_client.routing.access_token:FILE_INTERVAL_S": 0.01}):
        yield


@dataclass(frozen=True, slots=True)
class Moving:
    """A session that has answered with its first token, and has another one since."""

    client: Client
    session: Session


@asynccontextmanager
async def moving(
    folder: Path, *addresses: str, retry: RetryPolicy | None = None, timeout_ms: int = 10_000
) -> AsyncIterator[Moving]:
    file = folder / "token"
    file.write_text(OLD)
    async with (
        Client(addresses, access_token_file=file, retry=retry, timeout_ms=timeout_ms) as client,
        client.session() as session,
    ):
        assert await session.add(b"count") == 1
        file.write_text(NEW)
        await until(lambda: client.fleet.token_number > 1, "the other token")
        yield Moving(client, session)


@pytest.mark.parametrize("error", [BUSY, STOPS], ids=["busy", "stops"])
async def test_a_stream_that_is_refused_is_opened_again(
    server: DictServer, tmp_path: Path, error: ShaleError
) -> None:
    """Each operation is applied once, in its order; no future fails."""
    async with moving(tmp_path, server.address) as it:
        server.state.session_failures = [refusing(error), refusing(error)]
        adding = [it.session.add(b"count") for _ in range(100)]
        await it.session.drain()
        assert [future.result() for future in adding] == [*range(2, 102)]
    assert server.state.sessions_begun == 4


async def test_a_server_that_is_away_is_awaited(server: DictServer, tmp_path: Path) -> None:
    """There is no connection, so nothing was sent: the stream is opened when there is one."""
    proxy = DeafProxy(server.address)
    path = str(tmp_path / "socket")  # nobody else takes it meanwhile, as one may a port
    listening = await asyncio.start_unix_server(proxy.accept, path)
    async with moving(tmp_path, f"unix:{path}") as it:
        listening.close()
        await proxy.close()
        adding = [it.session.add(b"count") for _ in range(10)]
        with pytest.raises(ShaleKVError):
            await it.client.get(b"count", timeout_ms=50)
        assert not any(future.done() for future in adding)
        listening = await asyncio.start_unix_server(proxy.accept, path)
        await it.session.drain()
        assert [future.result() for future in adding] == [*range(2, 12)]
    listening.close()
    await proxy.close()


async def test_a_server_that_stays_away_ends_the_session(
    server: DictServer, tmp_path: Path
) -> None:
    """Operations that were not sent are reported as not applied."""
    proxy = DeafProxy(server.address)
    path = str(tmp_path / "socket")  # nobody else takes it meanwhile, as one may a port
    listening = await asyncio.start_unix_server(proxy.accept, path)
    async with moving(tmp_path, f"unix:{path}", retry=FEW) as it:
        listening.close()
        await proxy.close()
        adding = [it.session.add(b"count") for _ in range(10)]
        await it.session.drain()
        assert {type(future.exception()) for future in adding} == {NotSent}
    assert len(server.state.requests) == 1


async def test_the_stream_goes_to_the_new_writer(tmp_path: Path) -> None:
    """The old writer has been fenced meanwhile, and tells the session so."""
    async with cluster(readers=1) as servers:
        old = servers.writer
        async with moving(tmp_path, *servers.addresses) as it:
            new = await servers.take_over()
            servers.tell(new)
            fenced = refusing(Fenced("there is a newer writer", own_epoch=7, newer_epoch=8))
            old.state.session_failures = [fenced] * 10
            adding = [it.session.add(b"count") for _ in range(10)]
            await it.session.drain()
            assert [future.result() for future in adding] == [*range(2, 12)]
        assert (old.state.sessions_begun, new.state.sessions_begun) == (2, 1)


async def test_a_stream_is_not_opened_for_ever(server: DictServer, tmp_path: Path) -> None:
    """The last refusal is the error when the policy of the client allows no attempt more."""
    async with moving(tmp_path, server.address, retry=FEW) as it:
        server.state.session_failures = [refusing(BUSY)] * 10
        adding = [it.session.add(b"count") for _ in range(10)]
        await it.session.drain()
        assert {type(future.exception()) for future in adding} == {Overloaded}
        with pytest.raises(Overloaded):
            await it.session.add(b"count")
    assert server.state.sessions_begun == 1 + FEW.attempts_max


async def test_the_timeout_bounds_the_attempts(server: DictServer, tmp_path: Path) -> None:
    """A server that asks for more time than the client has is not asked again."""
    async with moving(tmp_path, server.address, timeout_ms=2_000) as it:
        server.state.session_failures = [refusing(QueueFull("full", retry_after_ms=60_000))]
        with pytest.raises(Overloaded):
            await it.session.add(b"count")
    assert server.state.sessions_begun == 2


@pytest.mark.parametrize(
    "failure", [losing(), bare(grpc.StatusCode.UNAVAILABLE)], ids=["applied", "lost"]
)
async def test_what_was_sent_and_lost_is_unknown(
    server: DictServer, tmp_path: Path, failure: Failure
) -> None:
    """Then the session ends: nothing is sent twice."""
    async with moving(tmp_path, server.address) as it:
        server.state.failures.append(failure)
        adding = [it.session.add(b"count") for _ in range(3)]
        await it.session.drain()
        assert {type(future.exception()) for future in adding} == {ConnectionLost}
    assert server.state.sessions_begun == 2


async def test_the_first_stream_is_not_opened_again(server: DictServer) -> None:
    """A session that has not begun is over when it is refused, as every other one."""
    server.state.session_failures = [refusing(BUSY)]
    async with Client(server.address) as client, client.session() as session:
        with pytest.raises(Overloaded):
            await session.add(b"count")
    assert server.state.sessions_begun == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotHeld("it does not hold", condition="absent", found_seq=1), ConditionFailed),
        (WriteTimedOut("it may be applied later"), DeadlineExceeded),
    ],
    ids=["does not hold", "unknown"],
)
async def test_what_was_refused_is_not_sent_after_a_later_failure(
    server: DictServer, error: ShaleError, expected: type[ShaleKVError]
) -> None:
    """A later operation was begun, though it failed: the one before is refused, and that is all."""
    ask = Asked(OLD, NEW)
    async with Client(server.address, access_token=ask) as client, client.session() as session:
        server.state.failures += [refusing(Unauthenticated("it has ended")), refusing(error)]
        first, second = session.put(b"a", b"1"), session.put(b"b", b"2")
        with pytest.raises(expected):
            await second
        with pytest.raises(NotKnown):
            await first
        assert isinstance(first.exception(), NotApplied)
        await session.put(b"c", b"3")
        assert [each.key for each in server.state.requests] == [b"a", b"b", b"c"]


async def test_what_was_refused_has_its_own_name(server: DictServer) -> None:
    """Operations that are refused together share the refusal, each with the name of its own."""
    refused: dict[str, asyncio.Future[Commit]] = {}
    async with (
        Client(server.address, access_token=Asked(OLD)) as client,
        client.session() as session,
    ):
        server.state.failures += [refusing(Unauthenticated("it has ended"))] * 3
        for name in ("a1", "a2"):
            with request_id_of_calls(name):
                refused[name] = session.put(b"k", b"v")
        refused[""] = session.put(b"k", b"v")
    for name, each in refused.items():
        error = each.exception()
        assert isinstance(error, NotKnown)
        assert error.details.request_id == name
