"""A standby server, the health that servers report, and streams of watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shalekv.errors import Fenced, StandingBy, Stopping
from shalekv.rpc.server import READY, Server
from shalekv.server.readiness import Readiness
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from shalekv.wording import Trouble
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches
from tests.kit.serving.rpc import Serving, failure, runtime, server_settings, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STANDING = StandingBy("there:7654 is elected", writer_address="there:7654")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A standby server."""
    made = Server(server_settings(), runtime())
    await made.stand_by(STANDING)
    yield made
    await made.stop()


async def start(server: Server, service: MemoryKv) -> None:
    await server.start(service, MemoryAdmin(), MemoryWatches())


async def test_every_kind_of_call_is_refused(server: Server) -> None:
    """Calls of every shape get UNAVAILABLE, with the reason and the address of the writer."""
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv, admin = kv_pb2_grpc.KVStub(channel), admin_pb2_grpc.AdminStub(channel)
        calls = [
            kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v")),
            kv.Scan(kv_pb2.ScanRequest()),
            kv.Session(iter([kv_pb2.SessionRequest()])),
            kv.Watch(iter([kv_pb2.WatchRequest()])),
            admin.Status(admin_pb2.StatusRequest()),
        ]
        for call in calls:
            refused = await failure(call)
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert refused.info is not None
            assert refused.info.reason == "STANDING_BY"
            assert refused.info.metadata["writer_address"] == "there:7654"


async def test_the_latest_refusal_counts(server: Server) -> None:
    """Later calls get the latest refusal."""
    server.set_refusal(StandingBy("nobody is", writer_address=""))
    async with grpc.aio.insecure_channel(server.listen) as channel:
        refused = await failure(kv_pb2_grpc.KVStub(channel).Get(kv_pb2.GetRequest(key=b"k")))
        assert refused.message == "nobody is"


async def test_it_serves_and_is_a_standby_in_turn(server: Server) -> None:
    """On one connection calls are answered, refused, and answered by the next service; health
    watches see each change.
    """
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs leave its methods out
        watch = health.Watch(health_pb2.HealthCheckRequest(service="shalekv.v1.KV"))
        assert (await watch.read()).status == NOT_SERVING
        for _ in range(3):
            service = MemoryKv()
            await start(server, service)
            assert (await watch.read()).status == SERVING
            await kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v"))
            assert (await kv.Get(kv_pb2.GetRequest(key=b"k"))).value == b"v"
            server.refuse(Stopping("no more"))
            assert (await watch.read()).status == NOT_SERVING
            assert await server.drain(10_000)
            await server.stand_by(STANDING)
            refused = await failure(kv.Get(kv_pb2.GetRequest(key=b"k")))
            assert refused.info is not None
            assert refused.info.reason == "STANDING_BY"


async def test_what_does_not_end_is_cut_off(server: Server) -> None:
    """A call in progress is ended when the server becomes a standby; its outcome is unknown."""
    begun = asyncio.Event()

    class Slow(MemoryKv):
        async def never(self) -> kv_pb2.PutReply:
            begun.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody completes it")

        def put(self, *_: object) -> object:  # type: ignore[override]
            return self.never()

    await start(server, Slow())
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        call = kv.Put(kv_pb2.PutRequest(key=b"k", value=b"v"))
        await begun.wait()
        server.refuse(Stopping("no more"))
        assert not await server.drain(1)
        await server.stand_by(STANDING)
        ended = await failure(call)
        assert ended.info is not None
        assert ended.info.reason == "OUTCOME_UNKNOWN"
        assert ended.code is grpc.StatusCode.UNKNOWN


UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
LIST_RESPONSE: Any = vars(health_pb2)["HealthListResponse"]  # its type stubs leave it out
SERVICES = ["", "shalekv.v1.KV", "shalekv.v1.Admin"]


def _health(it: Serving[Any]) -> Any:
    """A stub of the health service, whose type stubs leave its methods out."""
    return health_pb2_grpc.HealthStub(it.channel)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_serves_until_it_stops(service: str) -> None:
    """Health is SERVING from the start, and NOT_SERVING as soon as calls are refused."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with serving() as it:
        health = _health(it)
        watch = health.Watch(request)
        assert (await health.Check(request)).status == SERVING
        assert (await watch.read()).status == SERVING
        it.server.refuse(Stopping("shutting down"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await health.Check(request)).status == NOT_SERVING


async def test_an_unknown_service_is_unknown() -> None:
    """For an unknown service Check returns NOT_FOUND, and Watch waits for it to appear."""
    request = health_pb2.HealthCheckRequest(service="shalekv.v1.Nobody")
    async with serving() as it:
        health = _health(it)
        assert (await failure(health.Check(request))).code is grpc.StatusCode.NOT_FOUND
        assert (await health.Watch(request).read()).status == UNKNOWN


async def test_all_that_was_reported_is_listed() -> None:
    """List has the health of the server, of its services, and of reads and writes."""
    async with serving() as it:
        data = await it.raw.unary("/grpc.health.v1.Health/List", b"")
        listed = LIST_RESPONSE.FromString(data).statuses
        assert {*listed} == {*SERVICES, "shalekv.read", "shalekv.write"}
        assert {each.status for each in listed.values()} == {SERVING}


async def test_a_health_watch_that_is_not_read_delays_nothing() -> None:
    """A health watch whose client reads nothing gets the latest status alone, when it reads on."""
    request = health_pb2.HealthCheckRequest(service="shalekv.v1.KV")
    async with serving() as it:
        watch = _health(it).Watch(request)
        assert (await watch.read()).status == SERVING
        troubled = Readiness(reads=Trouble("store unreachable", "it does not answer", 0))
        for readiness in (troubled, READY) * 100:
            it.server.report(readiness)
        it.server.report(troubled)
        assert (await watch.read()).status == NOT_SERVING
        assert (await _health(it).Check(request)).status == NOT_SERVING


def create(watch_id: int) -> kv_pb2.WatchRequest:
    return kv_pb2.WatchRequest(create=kv_pb2.WatchCreate(watch_id=watch_id))


async def endless() -> AsyncIterator[kv_pb2.WatchRequest]:
    yield create(7)
    await asyncio.Event().wait()


async def test_stream_fails_with_its_error() -> None:
    """The error of a stream arrives as that of any call, and the stream does its cleanup."""
    async with serving() as it:
        failed = await failure(it.kv.Watch(iter([create(7), kv_pb2.WatchRequest()])))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.info is not None
        assert dict(failed.info.metadata) == {"field": "request"}
        await it.watches.streams[0].left.wait()


async def test_client_that_goes_cuts_nothing_off() -> None:
    """The cleanup of a stream is completed although its client has gone."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        (stream,) = it.watches.streams
        stream.may_leave.clear()
        stream.end()
        await stream.leaving.wait()
        watch.cancel()
        await failure(it.kv.Watch(iter([kv_pb2.WatchRequest()])))  # noticed by then
        stream.may_leave.set()
        async with asyncio.timeout(10):
            await stream.left.wait()


async def test_server_waits_for_what_streams_have_to_do() -> None:
    """A server that stops waits for the cleanups of streams."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        (stream,) = it.watches.streams
        stream.may_leave.clear()
        stream.end()
        await stream.leaving.wait()
        watch.cancel()
        stopping = asyncio.create_task(it.server.stop())
        asyncio.get_running_loop().call_later(0.05, stream.may_leave.set)
        await stopping
        assert stream.left.is_set()


async def test_streams_end_with_their_server() -> None:
    """Watches, which never end by themselves, are ended by `refuse` with its error."""
    async with serving() as it:
        watch = it.kv.Watch(endless())
        await anext(aiter(watch))
        async with asyncio.timeout(10):
            await it.server.drain(60_000)
            it.server.refuse(Fenced("epoch 8 has taken over", own_epoch=7, newer_epoch=8))
            failed = await failure(watch)
        assert failed.info is not None
        assert failed.info.reason == "FENCED"
