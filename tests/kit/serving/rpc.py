"""A real server on a free port with a service in memory behind it, and a channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import aio

from shalekv.clock import LoopClock
from shalekv.rpc.call_telemetry import Recorders
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.access.guard import Guard
from shalekv.server.service import KvService
from shalekv.settings import LimitSettings, ServerSettings, Wire
from shalekv.v1 import admin_pb2_grpc, kv_pb2_grpc
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches

MessageT = TypeVar("MessageT", bound=Message)
ServiceT = TypeVar("ServiceT", bound=KvService)


class RawCalls:
    """Calls by path with bytes, for requests that no client would send."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary(self, path: str, request: bytes, **options: Any) -> Any:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
        return method(request, **options)

    def stream_stream(self, path: str, requests: list[bytes]) -> Any:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(path)
        return method(iter(requests))


@dataclass(frozen=True, slots=True)
class Serving(Generic[ServiceT]):
    """A server that serves, and what a test needs to talk to it and about it."""

    server: Server
    service: ServiceT
    watches: MemoryWatches
    channel: grpc.aio.Channel
    raw: RawCalls
    kv: kv_pb2_grpc.KVStub
    admin: admin_pb2_grpc.AdminStub


WIRE = Wire.NATIVE  # of servers whose test does not name one


def server_settings(**settings: Any) -> ServerSettings:
    """Settings of a server on a free port; `settings` are those that are not the defaults."""
    return ServerSettings.model_validate({"listen": "127.0.0.1:0", "wire": WIRE} | settings)


def runtime() -> Runtime:
    """The runtime of a test: real time, seeded randomness."""
    return Runtime(clock=LoopClock(), random=Random(1), workers=ThreadWorkers(1))


@asynccontextmanager
async def serving(
    *, limits: LimitSettings | None = None, **settings: Any
) -> AsyncIterator[Serving[MemoryKv]]:
    """Serve a service in memory; `settings` are those of the server that are not the defaults."""
    async with serving_of(MemoryKv(), limits=limits, **settings) as it:
        yield it


@asynccontextmanager
async def serving_of(
    service: ServiceT,
    *,
    limits: LimitSettings | None = None,
    guard: Guard | None = None,
    open_services: bool = True,
    recorders: Recorders | None = None,
    **settings: Any,
) -> AsyncIterator[Serving[ServiceT]]:
    server = Server(
        server_settings(**settings),
        runtime(),
        limits=limits,
        guard=guard,
        open_services=open_services,
        recorders=recorders,
    )
    watches = MemoryWatches()
    await server.start(service, MemoryAdmin(), watches)
    try:
        async with grpc.aio.insecure_channel(server.listen) as channel:
            yield Serving(
                server,
                service,
                watches,
                channel,
                RawCalls(channel),
                kv_pb2_grpc.KVStub(channel),
                admin_pb2_grpc.AdminStub(channel),
            )
    finally:
        await server.stop()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client sees it."""

    code: grpc.StatusCode
    message: str
    info: error_details_pb2.ErrorInfo | None
    retry: error_details_pb2.RetryInfo | None
    bad: error_details_pb2.BadRequest | None


async def failure(call: Any) -> Failure:
    """The error of `call`: awaits it, or reads it to its end when it is a stream."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = await aio.from_call(call)
        return failure_of(error, status)
    raise AssertionError("the call succeeded")


def failure_of(error: grpc.aio.AioRpcError, status: status_pb2.Status | None) -> Failure:
    return Failure(
        code=error.code(),
        message=error.details() or "",
        info=_detail(status, error_details_pb2.ErrorInfo()),
        retry=_detail(status, error_details_pb2.RetryInfo()),
        bad=_detail(status, error_details_pb2.BadRequest()),
    )


def _detail(status: status_pb2.Status | None, into: MessageT) -> MessageT | None:
    for detail in status.details if status else ():
        if detail.Unpack(into):
            return into
    return None
