"""Sessions for tests: over a socket, and driven by hand without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_status.rpc_status import aio

from shalekv.clock import LoopClock
from shalekv.errors import ShaleError
from shalekv.read.memory_budget import MemoryBudget
from shalekv.rpc.call_telemetry import CallTelemetry, Recorders
from shalekv.rpc.session import Session
from shalekv.rpc.status import operation_error, status_of, status_of_bug
from shalekv.server.service import Call, KvService
from shalekv.settings import LimitSettings
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.serving.roles import METHODS
from tests.kit.serving.roles import Serving as Writer
from tests.kit.serving.roles import serving as serving_writer
from tests.kit.serving.rpc import Failure, Serving, failure_of, serving_of

Results = dict[int, kv_pb2.SessionResult]
BUG_ID = "c0ffee"


def operation(operation_id: int, request: Message | None = None) -> kv_pb2.SessionOperation:
    """A session operation with this request; None: without one."""
    made = kv_pb2.SessionOperation(id=operation_id)
    if request is not None:
        getattr(made, METHODS[type(request)]).CopyFrom(request)
    return made


def operations(*requests: Message, first_id: int = 0) -> list[kv_pb2.SessionOperation]:
    return [operation(first_id + number, request) for number, request in enumerate(requests)]


def by_id(replies: list[kv_pb2.SessionReply]) -> Results:
    results = [result for reply in replies for result in reply.results]
    found = {result.id: result for result in results}
    assert len(found) == len(results)
    return found


class SocketSession:
    """A session of a gRPC client."""

    def __init__(self, stub: kv_pb2_grpc.KVStub, **options: Any) -> None:
        self.call: Any = stub.Session(**options)
        self.replies: list[kv_pb2.SessionReply] = []

    async def send(self, *sent: kv_pb2.SessionOperation) -> None:
        await self.call.write(kv_pb2.SessionRequest(operations=sent))

    async def take(self, count: int) -> Results:
        """Read until this many results have come in total; returns all of them."""
        while len(by_id(self.replies)) < count:
            reply = await self.call.read()
            assert reply is not grpc.aio.EOF, "the stream has ended"
            self.replies.append(reply)
        return by_id(self.replies)

    async def rest(self) -> Results:
        await self.call.done_writing()
        while (reply := await self.call.read()) is not grpc.aio.EOF:
            self.replies.append(reply)
        assert await self.call.code() is grpc.StatusCode.OK
        return by_id(self.replies)

    async def failure(self) -> Failure:
        """Read until the stream ends with an error, and return it. Keeps the results before it."""
        try:
            while (reply := await self.call.read()) is not grpc.aio.EOF:
                self.replies.append(reply)
        except grpc.aio.AioRpcError as error:
            return failure_of(error, await aio.from_call(self.call))
        raise AssertionError("the stream ended well")


@asynccontextmanager
async def served_writer(
    *, limits: LimitSettings | None = None, **settings: Any
) -> AsyncIterator[tuple[Serving[Any], Writer]]:
    """A real writer on a held store behind a real server."""
    async with (
        serving_writer(limits=limits, **settings) as writer,
        serving_of(writer.kv, limits=limits) as it,
    ):
        yield it, writer
        writer.store.release_all()


class DrivenSession:
    """A session without a transport, whose messages the test reads and whose replies it takes."""

    def __init__(
        self, service: KvService, limits: LimitSettings, budget: MemoryBudget | None = None
    ) -> None:
        self.session = Session(
            service,
            limits,
            Call(peer="test"),
            budget=budget,
            describe=described,
            telemetry=CallTelemetry(Recorders(SlowCalls(0, LoopClock()))),
            now_ms=LoopClock().monotonic_ms,
        )
        self.read_count = 0  # messages that were asked for
        self._requests: asyncio.Queue[kv_pb2.SessionRequest | None] = asyncio.Queue()
        self._replies = self.session.replies()

    def send(self, *sent: kv_pb2.SessionOperation) -> None:
        self._requests.put_nowait(kv_pb2.SessionRequest(operations=sent))

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    async def take(self) -> kv_pb2.SessionReply:
        return kv_pb2.SessionReply.FromString(await anext(self._replies))

    async def rest(self) -> Results:
        self.half_close()
        return by_id([kv_pb2.SessionReply.FromString(reply) async for reply in self._replies])

    async def requests(self) -> AsyncIterator[kv_pb2.SessionRequest]:
        while (request := await self._requests.get()) is not None:
            self.read_count += 1
            yield request


@asynccontextmanager
async def driven(
    service: KvService, *, limits: LimitSettings | None = None, budget: MemoryBudget | None = None
) -> AsyncIterator[DrivenSession]:
    """A session that is reading; its client is gone at the end. It shares `budget` with others."""
    session = DrivenSession(service, limits or LimitSettings(), budget)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(session.session.read(session.requests(), tasks))
        yield session
        reader.cancel()
        session.session.close()


def described(error: BaseException, _call: Call) -> kv_pb2.OperationError:
    if isinstance(error, ShaleError):
        return operation_error(status_of(error))
    return operation_error(status_of_bug(BUG_ID))
