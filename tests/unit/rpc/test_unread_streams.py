"""Streams whose clients read nothing, and are ended to free memory for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_status.rpc_status import aio

from shalekv.clock import LoopClock
from shalekv.errors import StreamTooSlow
from shalekv.read.memory_budget import MemoryBudget, Stalls
from shalekv.rpc.grpcio_server import WATCHING
from shalekv.settings import KIB, MIB, LimitSettings
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import Failure, Serving, failure_of, serving
from tests.kit.timeouts import scaled_timeout_s, until
from tests.unit.rpc.sessions import DrivenSession, SocketSession, driven, operation, served_writer

SCAN = kv_pb2.ScanRequest(limit=1_000_000)  # again and again the same message
ERROR = StreamTooSlow("nothing was taken")
POLLS = 4  # without another message: the connection takes no more


class Unchanged:
    """A condition that holds when a count has been the same for some polls."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._seen: list[int] = []

    def __call__(self) -> bool:
        self._seen = [*self._seen, self._count()][-POLLS:]
        return len(self._seen) == POLLS and len(set(self._seen)) == 1


@asynccontextmanager
async def stalled_scan(
    stalled_ms: int, *, read_count: int = 1
) -> AsyncIterator[tuple[Serving[MemoryKv], Any]]:
    """A scan whose client has read this many messages, and whose next one waits."""
    async with serving(limits=LimitSettings(result_stalled_ms=stalled_ms)) as it:
        await it.kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v" * MIB))
        call = it.kv.Scan(SCAN)
        for _ in range(read_count):
            await call.read()
        await it.service.scan_opened.wait()
        await it.kv.Put(kv_pb2.PutRequest(key=b"l"))  # grpc.aio holds on to the last call it got
        await until(Unchanged(lambda: it.service.scanned_count), "a scan that has to wait")
        yield it, call
        call.cancel()


async def failure_of_stream(call: Any) -> Failure | None:
    """Read to the end, and return the error of the stream; None: it has none."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return failure_of(error, await aio.from_call(call))
    return None


def end(it: Serving[MemoryKv]) -> None:
    end_call = next(each.end for each in it.service.calls if each.end is not None)
    end_call(ERROR)
    end_call(ERROR)  # a second end changes nothing


def is_held() -> bool:
    """Return True if grpc.aio refers to a call of a server of this process."""
    running = [task.get_coro() for task in asyncio.all_tasks()]
    return any(getattr(each, "__name__", "") == WATCHING for each in running)


async def test_a_client_that_reads_on_gets_the_error() -> None:
    """A scan whose client reads nothing is closed at once; when the client reads on, it gets the
    messages that were sent, and then the error.
    """
    async with stalled_scan(60_000) as (it, call):
        end(it)
        await asyncio.wait_for(it.service.scan_closed.wait(), 30)
        failure = await failure_of_stream(call)
        assert failure is not None
        assert failure.code is grpc.StatusCode.ABORTED
        assert failure.info is not None
        assert failure.info.reason == "STREAM_TOO_SLOW"
        assert failure.message == str(ERROR)


@pytest.mark.parametrize("read_count", [0, 1])
async def test_a_stream_that_stays_unread_is_reset(read_count: int) -> None:
    """If its error is not read either, a stream is reset: its client gets CANCELLED in the end, and
    other calls of its connection go on.
    """
    async with stalled_scan(10, read_count=read_count) as (it, call):
        end(it)
        await asyncio.wait_for(it.service.scan_closed.wait(), 30)
        await until(lambda: not is_held(), "grpc.aio lets go of the call")
        failure = await failure_of_stream(call)
        assert failure is not None
        assert (failure.code, failure.info) == (grpc.StatusCode.CANCELLED, None)
        assert (await it.kv.Get(kv_pb2.GetRequest(key=b"k"))).found


VALUE = b"x" * 4 * KIB
LIMITS = LimitSettings(sessions_bytes_max=256 * KIB, result_stalled_ms=50)
SILENT = 8  # sessions, two of which use up the budget


async def fill(session: DrivenSession) -> None:
    """Ask for much, and read one message; the others wait."""
    for number in range(100):
        session.send(operation(number, kv_pb2.GetRequest(key=b"a")))
    await session.take()


async def test_silent_sessions_give_way() -> None:
    """Sessions whose clients read nothing are ended for one that waits, as many as needed, with an
    error and never with what looks like an end.
    """
    service = MemoryKv()
    service.values[b"a"] = VALUE
    budget = MemoryBudget(LIMITS.sessions_bytes_max, Stalls(LoopClock(), LIMITS.result_stalled_ms))
    async with AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(driven(service, limits=LIMITS, budget=budget))
            for _ in range(SILENT)
        ]
        for session in silent:
            await fill(session)
        await until(lambda: not budget.free_bytes, "the budget is used up")
        service.hold = True  # so that a session holds more than a little
        async with driven(service, limits=LIMITS, budget=budget) as late:
            for number in range(20):
                late.send(operation(number, kv_pb2.PutRequest(key=b"b", value=VALUE)))
            await until(lambda: len(service.held) > 10, "it goes on in large steps")
            for answer in service.held:
                answer.set_result(kv_pb2.PutReply())
            service.hold = False
            assert len(await late.rest()) == 20
        ended = 0
        for session in silent:
            try:
                await session.rest()
            except StreamTooSlow:
                ended += 1
        assert 0 < ended < SILENT
    assert budget.used_bytes == 0


async def test_a_session_that_was_ended_gets_the_error() -> None:
    """A session that was ended over a socket gets ABORTED with STREAM_TOO_SLOW when it reads on,
    soon after writes of another session had to wait; all others get their results.
    """
    stalled_ms = round(1_000 * scaled_timeout_s(1))  # the error has to be read within that time
    limits = LIMITS.model_copy(update={"result_stalled_ms": stalled_ms})
    async with served_writer(limits=limits) as (it, _), AsyncExitStack() as stack:
        budget = it.server.session_budget
        assert budget.stalls is not None
        await it.kv.Put(kv_pb2.PutRequest(key=b"a", value=VALUE * 16))
        silent = []
        for _ in range(6):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
            channel = grpc.aio.insecure_channel(it.server.listen, options=options)
            stub = kv_pb2_grpc.KVStub(await stack.enter_async_context(channel))
            session = SocketSession(stub)
            await session.send(operation(1_000, kv_pb2.GetRequest(key=b"none")))
            await session.take(1)
            await session.send(*(operation(n, kv_pb2.GetRequest(key=b"a")) for n in range(50)))
            silent.append(session)
        await until(lambda: not budget.free_bytes, "the budget is used up")
        late, count = SocketSession(it.kv), 0
        while not budget.stalls.ended_count:
            put = kv_pb2.PutRequest(key=b"b", value=VALUE)
            await late.send(*(operation(count + n, put) for n in range(20)))
            count += 20
            await late.take(count)
        for session in silent:
            await session.call.done_writing()
        failure = [await failure_of_stream(session.call) for session in silent]
        reasons = [
            each.info.reason for each in failure if each is not None and each.info is not None
        ]
        assert 0 < len(reasons) < len(silent)
        assert set(reasons) == {"STREAM_TOO_SLOW"}
