"""Streams that are open when a right is withdrawn: they end, at every process of the database.

A policy that the writer stores reaches the reader through the object store alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from shalekv.clock import Clock
from shalekv.protocol.access import Grant, Policy, Role, Verb
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.constants import constants
from tests.kit.inline_runtime import MovedClock
from tests.kit.processes.guarded import (
    GuardedServer,
    Metadata,
    TokenBook,
    guarded_reader,
    guarded_writer,
)
from tests.kit.processes.in_process import memory_store
from tests.kit.serving.guarded import prefix
from tests.kit.serving.token_issuer import AUDIENCE, token_issuer

PERMISSION_DENIED, UNAUTHENTICATED = "PERMISSION_DENIED", "UNAUTHENTICATED"
VALUE_BYTES, VALUE_COUNT = 512 << 10, 24  # more than a client is sent that reads nothing
END_S = 20.0  # how long an end is waited for
LIFETIME_MS = 30_000
OFTEN = {
    "shalekv.server.access.guard:SWEEP_S": 0.05,
    "shalekv.server.access.authenticator:FILE_INTERVAL_MS": 50.0,
}

ROLES = (
    Role("p", (prefix(b"p/", Verb.READ, Verb.WRITE, Verb.WATCH),)),
    Role("q", (prefix(b"q/", Verb.READ, Verb.WRITE, Verb.WATCH),)),
)


def granted(*roles: str) -> Policy:
    """Alice has these roles, and `root` every verb."""
    grants = [Grant("token:root", ("root",))]
    grants += [Grant(f"{kind}:alice", roles) for kind in ("token", "oidc")]
    return Policy(is_enforced=True, roles=ROLES, grants=tuple(grants))


class OpenStreams:
    """A watch of each prefix, a scan that waits for its client, and a session, at one server."""

    def __init__(self, channel: grpc.aio.Channel, shown: Metadata) -> None:
        kv = kv_pb2_grpc.KVStub(channel)
        self.watches: Any = kv.Watch(metadata=shown)
        keys = kv_pb2.KeyRange(prefix=b"p/")
        self.scan: Any = kv.Scan(kv_pb2.ScanRequest(range=keys), metadata=shown)
        self.session: Any = kv.Session(metadata=shown)
        self._seen: asyncio.Queue[kv_pb2.WatchReply] = asyncio.Queue()

    async def begin(self) -> None:
        for watch_id, name in ((1, b"p/"), (2, b"q/")):
            create = kv_pb2.WatchCreate(watch_id=watch_id, range=kv_pb2.KeyRange(prefix=name))
            await self.watches.write(kv_pb2.WatchRequest(create=create))
            assert (await self.next_watch_reply()).opened_at_seq
        assert len((await self.scan.read()).entries) < VALUE_COUNT
        assert await self.get(b"q/1") == ""

    async def get(self, key: bytes) -> str:
        """Read a key in the session; returns the reason of a refusal."""
        operation = kv_pb2.SessionOperation(get=kv_pb2.GetRequest(key=key))
        await self.session.write(kv_pb2.SessionRequest(operations=[operation]))
        reply = await self.session.read()
        reason: str = reply.results[0].error.reason
        return reason

    async def next_watch_reply(self) -> kv_pb2.WatchReply:
        async with asyncio.timeout(END_S):
            while True:  # progress is told at any time
                reply = await self.watches.read()
                if reply is grpc.aio.EOF:
                    raise AssertionError(await self.watches.code())
                if not reply.HasField("progress_seq"):
                    assert isinstance(reply, kv_pb2.WatchReply)
                    return reply

    async def ends(self, *, reason: str) -> None:
        """All of them end, with this reason."""
        for call in (self.watches, self.scan, self.session):
            assert await ended(call) == reason


async def ended(call: Any) -> str:
    """Read a stream to its end; returns the code."""
    async with asyncio.timeout(END_S):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    code: str = (await call.code()).name
    return code


@asynccontextmanager
async def two_servers(
    tokens: TokenBook, clock: Clock | None = None, **access: str
) -> AsyncIterator[tuple[GuardedServer, list[OpenStreams]]]:
    """A writer and a reader, and the streams of alice at both."""
    objects = MemoryObjects()
    tokens.add("root")
    with constants(OFTEN):
        async with (
            guarded_writer(memory_store(objects), tokens, clock=clock, access=access) as writer,
            guarded_reader(memory_store(objects), tokens, clock=clock, access=access) as reader,
            grpc.aio.insecure_channel(writer.listen) as to_writer,
            grpc.aio.insecure_channel(reader.listen) as to_reader,
        ):
            kv = kv_pb2_grpc.KVStub(to_writer)
            for number in range(VALUE_COUNT):
                put = kv_pb2.PutRequest(key=b"p/%02d" % number, value=bytes(VALUE_BYTES))
                await kv.Put(put)
            await writer.set_policy(granted("p", "q"))
            waited = kv_pb2.GetRequest(header=kv_pb2.RequestHeader(min_seq=VALUE_COUNT), key=b"q/1")
            await until_refused(lambda: kv_pb2_grpc.KVStub(to_reader).Get(waited))
            streams = [OpenStreams(each, tokens.shown("alice")) for each in (to_writer, to_reader)]
            for each in streams:
                await each.begin()
            yield writer, streams


async def until_refused(call: Callable[[], Awaitable[Any]]) -> None:
    """Call until a call without credentials is refused: the policy has arrived."""
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            if error.code().name == UNAUTHENTICATED:
                return
            raise


async def test_streams_end_with_their_grant(tmp_path: Path) -> None:
    """Those that are still covered go on; a session ends when nothing at all is left."""
    tokens = TokenBook(tmp_path, "alice")
    async with two_servers(tokens) as (writer, streams):
        await writer.set_policy(granted("q"))
        for each in streams:
            closed = await each.next_watch_reply()
            assert (closed.watch_id, closed.closed.reason) == (1, PERMISSION_DENIED)
            assert await ended(each.scan) == PERMISSION_DENIED
            assert await each.get(b"p/00") == PERMISSION_DENIED
            assert await each.get(b"q/1") == ""
        kv = kv_pb2_grpc.KVStub(grpc.aio.insecure_channel(writer.listen))
        await kv.Put(kv_pb2.PutRequest(key=b"q/1"), metadata=tokens.shown("alice"))
        for each in streams:
            assert (await each.next_watch_reply()).commit.changes[0].entry.key == b"q/1"
        await writer.set_policy(granted())
        for each in streams:
            assert await ended(each.watches) == PERMISSION_DENIED
            assert await ended(each.session) == PERMISSION_DENIED


async def test_streams_end_with_their_token(tmp_path: Path) -> None:
    """One that is removed from the file proves nothing any more."""
    tokens = TokenBook(tmp_path, "alice")
    async with two_servers(tokens) as (_, streams):
        tokens.remove("alice")
        for each in streams:
            await each.ends(reason=UNAUTHENTICATED)


async def test_streams_end_when_their_token_expires(tmp_path: Path) -> None:
    """Nobody has to do anything for it."""
    tokens, clock = TokenBook(tmp_path), MovedClock()
    tokens.add("alice", lifetime_ms=LIFETIME_MS)
    async with two_servers(tokens, clock) as (_, streams):
        clock.ahead_ms = LIFETIME_MS
        for each in streams:
            await each.ends(reason=UNAUTHENTICATED)


async def test_streams_end_when_their_web_token_expires(tmp_path: Path) -> None:
    """The issuer has said when; the first call waits for its keys."""
    tokens, clock = TokenBook(tmp_path), MovedClock()
    async with token_issuer(tmp_path) as issuer:
        tokens.give("alice", issuer.token(exp=int(time.time()) + LIFETIME_MS // 1_000))
        settings = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_ca": issuer.ca}
        async with two_servers(tokens, clock, **settings) as (_, streams):
            clock.ahead_ms = LIFETIME_MS
            for each in streams:
                await each.ends(reason=UNAUTHENTICATED)
