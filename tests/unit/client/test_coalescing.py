"""Operations of one client are sent together, and each result goes to its own caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
from google.protobuf.message import Message

from shalekv.errors import Fenced as ServerFenced
from shalekv.errors import QueueFull
from shalekv.errors import QuotaExceeded as ServerQuotaExceeded
from shalekv.errors import Stopping as ServerStopping
from shalekv.v1 import kv_pb2
from shalekv_client import (
    Abandoned,
    Client,
    ClientClosed,
    Commit,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    Fenced,
    InvalidRequest,
    NotApplied,
    Overloaded,
    QuotaExceeded,
    RetryPolicy,
    ServerFailed,
    Stopping,
    operations,
)
from shalekv_client.coalescer import Coalescer
from shalekv_client.operations import SESSION
from shalekv_client.policies import MESSAGE_BYTES_MAX, UNANSWERED_BYTES_MAX
from shalekv_client.routing.servers import ConnectionOptions, open_channel
from shalekv_client.stream import Outbox
from tests.kit.serving.dict_server import DictServer, ServerState, bare, received, refusing, silent

CODE = grpc.StatusCode
ONCE = RetryPolicy(attempts_max=1)
QUICK = RetryPolicy(attempts_max=20, backoff_initial_ms=1, backoff_max_ms=20)
FENCED = refusing(ServerFenced("another took over", own_epoch=1, newer_epoch=2))


@asynccontextmanager
async def coalescing(
    server: DictServer, *, bytes_max: int = UNANSWERED_BYTES_MAX, stream_age_s: float = 10.0
) -> AsyncIterator[Coalescer]:
    channel = open_channel(server.address, ConnectionOptions(MESSAGE_BYTES_MAX))
    coalescer = Coalescer(
        partial(channel.stream, SESSION),
        address=server.address,
        outbox=Outbox(bytes_max=bytes_max),
        stream_age_s=stream_age_s,
    )
    try:
        yield coalescer
    finally:
        await coalescer.aclose()
        await channel.close()


async def test_concurrent_operations_share_a_message(client: Client, server: DictServer) -> None:
    """Operations of one turn of the loop go into one message, and each gets its own result."""
    puts = [client.put(b"%d" % n, b"v%d" % n) for n in range(100)]
    commits = await asyncio.gather(*puts)
    assert sorted(commit.seq for commit in commits) == list(range(1, 101))
    found = await asyncio.gather(*(client.get(b"%d" % n) for n in range(100)))
    assert [value and value.value for value in found] == [b"v%d" % n for n in range(100)]
    assert [len(message) for message in server.state.messages] == [100, 100]
    assert server.state.sessions_begun == 1


async def test_one_cancelled_caller_harms_no_other(client: Client, server: DictServer) -> None:
    """When the caller of an operation under way is cancelled, the others get their results."""
    server.state.answering.clear()
    async with asyncio.TaskGroup() as tasks:
        puts = [tasks.create_task(client.put(b"%d" % n, b"")) for n in range(3)]
        await received(server, 3)
        puts[1].cancel()
        server.state.answering.set()
    assert puts[1].cancelled()
    assert {puts[0].result().seq, puts[2].result().seq} == {1, 3}
    assert (await client.put(b"next", b"")).seq == 4


async def test_broken_session_leaves_all_outcomes_unknown(server: DictServer) -> None:
    """When a session breaks, its unanswered operations fail as unknown, each with its own error."""
    server.state.failures.append(bare(CODE.UNAVAILABLE))
    async with Client(server.address, retry=ONCE) as client:
        puts = (client.put(b"%d" % n, b"") for n in range(10))
        failed = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(error) for error in failed] == [ConnectionLost] * 10
        assert len(set(map(id, failed))) == 10
        assert (await client.put(b"next", b"")).seq == 1
    assert server.state.sessions_begun == 2


async def test_deadline_of_what_is_sent_is_unknown(client: Client, server: DictServer) -> None:
    """A sent operation without an answer in time may have been applied; the session continues."""
    server.state.failures.append(silent())
    late = client.put(b"late", b"", timeout_ms=1_000)
    failed, found = await asyncio.gather(late, client.get(b"k"), return_exceptions=True)
    assert (type(failed), found) == (DeadlineExceeded, None)
    await client.get(b"k")
    assert server.state.sessions_begun == 1


async def test_a_deadline_may_be_far_away(client: Client) -> None:
    """A very long timeout fits into a message, and does not disturb other operations."""
    endless = client.put(b"a", b"", timeout_ms=2**40)
    first, second = await asyncio.gather(endless, client.put(b"b", b""))
    assert {first.seq, second.seq} == {1, 2}


async def test_deadline_of_what_is_not_sent_is_certain(server: DictServer) -> None:
    """An operation that could not be sent in time was not applied, and is not sent later."""
    server.state.failures.append(silent())
    async with coalescing(server, bytes_max=150) as coalescer:
        first = asyncio.ensure_future(coalescer.call(operations.put(b"a", bytes(100)), 60_000))
        await received(server, 1)
        with pytest.raises(DeadlinePassed) as caught:
            await coalescer.call(operations.put(b"b", bytes(100)), 30)
        assert isinstance(caught.value, NotApplied)
        await coalescer.call(operations.get(b"k"), 60_000)  # it fits
        assert not first.done()
        first.cancel()
    assert [request.key for request in server.state.requests] == [b"a", b"k"]


async def test_too_large_operations_are_refused_here(server: DictServer) -> None:
    """An operation that does not fit into a message is refused before it is sent, with its size."""
    async with Client(server.address, message_bytes_max=1_000) as client:
        with pytest.raises(InvalidRequest, match="at most 1000"):
            await client.put(b"k", bytes(1_000))
        await client.put(b"k", bytes(900))
    assert server.state.calls == {"Put": 1}


@pytest.mark.parametrize("limits", [{"message_count_max": 3}, {"message_bytes_max": 64 << 10}])
async def test_smaller_limits_of_a_server_are_found(limits: dict[str, int]) -> None:
    """A server that accepts smaller messages than usual gets them, and no operation is lost."""
    async with DictServer(**limits) as server, Client(server.address, retry=QUICK) as client:
        for _ in range(2):
            await asyncio.gather(*(client.put(b"%d" % n, bytes(10_000)) for n in range(100)))
        assert await client.add(b"n") == 1
    assert server.state.seq == 201


async def test_unimplemented_sessions_are_not_tried_again(
    client: Client, server: DictServer
) -> None:
    """A server without sessions is not asked for one with every call."""
    server.state.session_failures.append(bare(CODE.UNIMPLEMENTED, "KV.Session"))
    for n in range(5):
        await client.put(b"%d" % n, b"")
    assert server.state.sessions_begun == 1
    assert (server.state.messages, server.state.seq) == ([], 5)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerFenced("another took over", own_epoch=1, newer_epoch=2), Fenced),
        (ServerStopping("stopping"), Stopping),
        (QueueFull("full", retry_after_ms=1), Overloaded),
        (ServerQuotaExceeded("used", retry_after_ms=1, quota="sessions"), QuotaExceeded),
    ],
)
async def test_session_that_is_turned_away_was_not_applied(
    server: DictServer, error: ServerStopping, kind: type[NotApplied]
) -> None:
    """When a server refuses a session, its operations fail as not applied."""
    server.state.session_failures.append(refusing(error))
    async with Client(server.address, retry=ONCE) as client:
        with pytest.raises(kind):
            await client.put(b"k", b"v")
        assert (await client.put(b"k", b"v")).seq == 1


async def test_session_is_not_opened_before_the_server_advises(server: DictServer) -> None:
    """After a refusal with a delay, operations wait for it: none makes a session earlier."""
    refusal = ServerQuotaExceeded("used", retry_after_ms=300, quota="sessions")
    server.state.session_failures.append(refusing(refusal))
    async with coalescing(server) as coalescer:
        began_s = asyncio.get_running_loop().time()  # before the refusal, whenever it arrives
        with pytest.raises(QuotaExceeded) as refused:
            await coalescer.call(operations.put(b"first", b""), 10_000)
        assert (refused.value.quota, refused.value.retry_after_ms) == ("sessions", 300)
        await coalescer.call(operations.put(b"second", b""), 10_000)
        assert asyncio.get_running_loop().time() - began_s >= 0.3
    assert server.state.sessions_begun == 2


async def test_status_is_not_lost_to_a_write(server: DictServer) -> None:
    """The status with which a server refuses a session is found even while messages are written."""
    value = bytes(200_000)
    async with Client(server.address, retry=ONCE) as client:
        for _ in range(30):
            server.state.session_failures.append(FENCED)
            puts = (client.put(b"%d" % n, value) for n in range(30))
            for failed in await asyncio.gather(*puts, return_exceptions=True):
                assert isinstance(failed, Fenced | Commit), failed
            server.state.session_failures.clear()


async def test_old_streams_are_left(server: DictServer) -> None:
    """A stream is replaced after its time, and ends when no caller waits for an answer on it."""
    server.state.failures.append(silent())
    async with coalescing(server, stream_age_s=0.02) as coalescer:
        waiting = asyncio.ensure_future(coalescer.call(operations.put(b"a", b""), 60_000))
        await received(server, 1)
        while server.state.sessions_begun < 3:
            await coalescer.call(operations.get(b"k"), 60_000)
        assert not waiting.done()
        waiting.cancel()
        for _ in range(2):
            await server.state.session_ends.acquire()


async def test_idle_clients_hold_no_stream(server: DictServer) -> None:
    """A stream without operations ends by itself."""
    async with coalescing(server, stream_age_s=0.02) as coalescer:
        await coalescer.call(operations.get(b"k"), 60_000)
        await server.state.session_ends.acquire()
        assert server.state.sessions_begun == 1
        await coalescer.call(operations.get(b"k"), 60_000)
        assert server.state.sessions_begun == 2


@pytest.mark.parametrize("coalesce", [True, False])
async def test_closed_clients_say_so(server: DictServer, *, coalesce: bool) -> None:
    """After closing, each method raises `ClientClosed`; closing again does nothing."""
    client = Client(server.address, coalesce=coalesce)
    await client.put(b"k", b"v")
    await client.close()
    await client.close()
    for call in (client.get(b"k"), client.put(b"k", b"v"), client.status(), anext(client.scan())):
        with pytest.raises(ClientClosed, match="the client is closed"):
            await call
    with pytest.raises(ClientClosed):
        client.session()


@pytest.mark.parametrize("coalesce", [True, False])
async def test_closing_ends_what_is_under_way(server: DictServer, *, coalesce: bool) -> None:
    """A call that is under way when its client is closed fails, with an unknown outcome."""
    server.state.failures.append(silent())
    client = Client(server.address, coalesce=coalesce)
    put = asyncio.ensure_future(client.put(b"k", b"v"))
    await server.state.begun.wait()
    await client.close()
    with pytest.raises(Abandoned):
        await put


class Forgetful(ServerState):
    """A server that omits the counters in its replies."""

    def answer(self, request: Message) -> Message:
        reply = super().answer(request)
        if isinstance(reply, kv_pb2.WriteReply):
            reply.ClearField("counters")
        return reply


@pytest.mark.parametrize("coalesce", [True, False])
async def test_replies_that_are_no_answers_are_failures(
    server: DictServer, *, coalesce: bool
) -> None:
    """An add without a counter in its reply fails; other operations get their results."""
    server.state = Forgetful()
    async with Client(server.address, coalesce=coalesce) as client:
        added, put = await asyncio.gather(
            client.add(b"n"), client.put(b"k", b"v"), return_exceptions=True
        )
    assert isinstance(put, Commit)
    assert isinstance(added, ServerFailed)
    assert "does not fit Write" in str(added)
