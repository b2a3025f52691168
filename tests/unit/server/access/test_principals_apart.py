"""What a principal keeps in a server or a database is out of the reach of others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.protocol.access import Verb
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from tests.kit.processes.guarded import TokenBook, guarded_reader, guarded_writer
from tests.kit.processes.in_process import memory_store
from tests.kit.processes.stubs import reason_of
from tests.kit.serving.guarded import policy_of, prefix

KEY = b"one key of two requests"
# Both may do the same, so that nothing but their names keeps them apart.
ALL = prefix(b"", *Verb)
POLICY = policy_of(alice=ALL, bob=ALL)


class Peer:
    """A server, and calls of principals on it."""

    def __init__(self, channel: grpc.aio.Channel, tokens: TokenBook) -> None:
        self._kv = kv_pb2_grpc.KVStub(channel)
        self._admin = admin_pb2_grpc.AdminStub(channel)
        self._tokens = tokens

    async def put(self, name: str, key: bytes, **fields: Any) -> kv_pb2.PutReply:
        request = kv_pb2.PutRequest(key=key, value=b"v", **fields)
        reply: kv_pb2.PutReply = await self._kv.Put(request, metadata=self._tokens.shown(name))
        return reply

    async def status(self, name: str) -> admin_pb2.StatusReply:
        request = admin_pb2.StatusRequest()
        reply = await self._admin.Status(request, metadata=self._tokens.shown(name))
        assert isinstance(reply, admin_pb2.StatusReply)
        return reply

    async def who_am_i(self, name: str) -> admin_pb2.WhoAmIReply:
        request = admin_pb2.WhoAmIRequest()
        reply = await self._admin.WhoAmI(request, metadata=self._tokens.shown(name))
        assert isinstance(reply, admin_pb2.WhoAmIReply)
        return reply

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[str]:
        """Watch for a consumer; yields the kind of the first event."""
        create = kv_pb2.WatchCreate(watch_id=1, consumer="c")
        call: Any = self._kv.Watch(metadata=self._tokens.shown(name))
        await call.write(kv_pb2.WatchRequest(create=create))
        yield (await call.read()).WhichOneof("event")
        call.cancel()

    async def snapshot(self, name: str) -> bytes:
        request = admin_pb2.CreateSnapshotRequest(ttl_s=60)
        reply = await self._admin.CreateSnapshot(request, metadata=self._tokens.shown(name))
        found: bytes = reply.snapshot.id
        return found

    async def page(self, name: str, token: bytes = b"", at: bytes = b"") -> tuple[bytes, bytes]:
        """The key of a page of one entry, and the token of the next page."""
        header = kv_pb2.RequestHeader(snapshot_id=at)
        request = kv_pb2.ScanRequest(header=header, limit=1, page_token=token)
        replies = self._kv.Scan(request, metadata=self._tokens.shown(name))
        (reply,) = [each async for each in replies]
        return reply.entries[0].key, reply.page_token

    async def refusal(self, name: str, token: bytes, at: bytes = b"") -> tuple[Any, str]:
        """The status and the reason with which a page is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.page(name, token, at)
        return caught.value.code(), reason_of(caught.value)


INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
EXPIRED = (grpc.StatusCode.ABORTED, "PAGE_EXPIRED")


@asynccontextmanager
async def peer(server: Any, tokens: TokenBook) -> AsyncIterator[tuple[Peer, Any]]:
    async with server as served, grpc.aio.insecure_channel(served.listen) as channel:
        yield Peer(channel, tokens), served


async def test_idempotency_keys_are_of_their_principals(tmp_path: Path) -> None:
    """Another principal with the same key neither gets the reply, nor is refused, nor blocks it;
    the next writer tells them apart as well.
    """
    store, tokens = memory_store(), TokenBook(tmp_path, "alice", "bob")
    header = kv_pb2.RequestHeader(idempotency_key=KEY)
    async with peer(guarded_writer(store, tokens), tokens) as (writer, served):
        await served.set_policy(POLICY)
        squatted = await writer.put("bob", b"of bob", header=header)
        first = await writer.put("alice", b"of alice", header=header)
        assert first.header.seq > squatted.header.seq
        assert (
            await writer.put("alice", b"of alice", header=header)
        ).header.seq == first.header.seq
    async with peer(guarded_writer(store, tokens), tokens) as (writer, _):
        again = await writer.put("alice", b"of alice", header=header)
        assert again.header.seq == first.header.seq
        copied = await writer.put("bob", b"of bob", header=header)
        assert copied.header.seq == squatted.header.seq
        with pytest.raises(grpc.aio.AioRpcError) as reused:
            await writer.put("alice", b"of bob", header=header)
        assert reason_of(reused.value) == "IDEMPOTENCY_KEY_REUSED"


async def test_page_tokens_are_of_their_principals(tmp_path: Path) -> None:
    """A page token is refused for another principal as one that was made up, at each server; at a
    snapshot it is good for its own principal at each server.
    """
    store, tokens = memory_store(), TokenBook(tmp_path, "alice", "bob")
    async with AsyncExitStack() as stack:
        writer, served = await stack.enter_async_context(
            peer(guarded_writer(store, tokens), tokens)
        )
        await served.set_policy(POLICY)
        for key in (b"a", b"b", b"c"):
            await writer.put("alice", key)
        _, token = await writer.page("alice")
        assert (await writer.page("alice", token))[0] == b"b"
        assert await writer.refusal("bob", token) == INVALID
        assert await writer.refusal("bob", bytes(16) + token[16:]) == INVALID
        snapshot_id = await writer.snapshot("alice")
        _, token = await writer.page("alice", at=snapshot_id)
        reader, _ = await stack.enter_async_context(peer(guarded_reader(store, tokens), tokens))
        for each in (writer, reader):
            assert (await each.page("alice", token, snapshot_id))[0] == b"b"
            assert await each.refusal("bob", token, snapshot_id) == INVALID
            assert await each.refusal("alice", token) == INVALID


async def test_consumers_are_of_their_principals(tmp_path: Path) -> None:
    """Two principals watch with one name of a consumer at a time; one does so only once."""
    store, tokens = memory_store(), TokenBook(tmp_path, "alice", "bob")
    async with peer(guarded_writer(store, tokens), tokens) as (writer, served):
        await served.set_policy(POLICY)
        async with AsyncExitStack() as stack:
            events = [
                await stack.enter_async_context(writer.watch(name))
                for name in ("alice", "bob", "alice")
            ]
        assert events == ["opened_at_seq", "opened_at_seq", "closed"]


async def test_status_tells_others_nothing_but_how_the_server_is(tmp_path: Path) -> None:
    """Without the verb ADMIN nothing is shown that depends on the keys and calls of others, apart
    from the number of commits; with it all is.
    """
    store, tokens = memory_store(), TokenBook(tmp_path, "alice", "root")
    async with AsyncExitStack() as stack:
        writer, served = await stack.enter_async_context(
            peer(guarded_writer(store, tokens), tokens)
        )
        await served.set_policy(policy_of(alice=prefix(b"a/", Verb.READ)))
        reader, _ = await stack.enter_async_context(peer(guarded_reader(store, tokens), tokens))
        for each in (writer, reader):
            (full, little) = (await each.status("root"), await each.status("alice"))
            assert {"memtable", "levels", "manifest", "memory"} <= fields_of(full)
            assert fields_of(little) <= {
                *("header", "version", "uptime_ms", "wall_ms", "read_readiness", "write_readiness"),
            }
            assert little.read_readiness.is_ready


async def test_a_stranger_is_not_told_how_much_is_written(tmp_path: Path) -> None:
    """Who asks who it is, and may do nothing, learns of no commits; others do as by any reply."""
    store, tokens = memory_store(), TokenBook(tmp_path, "alice", "bob")
    async with AsyncExitStack() as stack:
        writer, served = await stack.enter_async_context(
            peer(guarded_writer(store, tokens), tokens)
        )
        await writer.put("", b"a/1")
        await served.set_policy(policy_of(alice=prefix(b"a/", Verb.READ)))
        reader, _ = await stack.enter_async_context(peer(guarded_reader(store, tokens), tokens))
        for each in (writer, reader):
            known, denied, stranger = [
                (await each.who_am_i(name)).header for name in ("alice", "bob", "")
            ]
            assert known.seq == 1
            assert known.HasField("wal_id")
            for other in (denied, stranger):
                assert (other.seq, other.HasField("wal_id")) == (0, False)
                assert (other.database_id, other.role) == (known.database_id, known.role)


def fields_of(message: admin_pb2.StatusReply) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


async def test_page_tokens_of_before_the_policy_have_expired(tmp_path: Path) -> None:
    """A client whose scan began without a policy, and without credentials, begins it again."""
    store, tokens = memory_store(), TokenBook(tmp_path, "alice")
    async with peer(guarded_writer(store, tokens), tokens) as (writer, served):
        for key in (b"a", b"b"):
            await writer.put("", key)
        _, token = await writer.page("")
        assert (await writer.page("", token))[0] == b"b"
        await served.set_policy(POLICY)
        assert await writer.refusal("alice", token) == EXPIRED
        assert (await writer.page("alice"))[0] == b"a"
