"""Counts, descriptions, touches and counted deletes: where they go, and how they are decoded."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shalekv.errors import InvalidRequest
from shalekv.v1 import kv_pb2
from shalekv_client import (
    Batch,
    Client,
    Commit,
    Count,
    DeadlineExceeded,
    KeyInfo,
    Put,
    ReadLevel,
    SyncClient,
    Touch,
    Unimplemented,
    Value,
    operations,
)
from shalekv_client.results import counted_commit_of, txn_result_of
from tests.kit.serving.dict_server import DictServer, bare, refusing, silent
from tests.unit.client.cluster import cluster


async def test_keys_are_counted_and_described(client: Client) -> None:
    """A count has the keys of a range up to its limit; a description has no value."""
    await client.write(Put(b"k%d" % n, b"v", ttl_ms=n) for n in range(3))
    assert await client.count() == Count(3, more=False)
    assert await client.count(start=b"k1", end=b"k2") == Count(1, more=False)
    assert await client.count(prefix=b"k", limit=2) == Count(2, more=True)
    assert await client.describe(b"k0") == KeyInfo(1, None, None)
    assert await client.describe(b"k2") == KeyInfo(1, 2, 2)
    assert await client.describe(b"x") is None
    assert (await client.exists(b"k0"), await client.exists(b"x")) == (True, False)
    async with client.session() as session:
        described = session.describe(b"k2")
    assert described.result() == KeyInfo(1, 2, 2)


async def test_threads_count(server: DictServer) -> None:
    """The client for threads has the same methods, and its sessions."""

    def work() -> None:
        with SyncClient(server.address) as client:
            client.put(b"k", b"v")
            assert client.count() == Count(1, more=False)
            assert client.describe(b"k") == KeyInfo(1, None, None)
            assert client.exists(b"k")
            with client.session() as session:
                assert session.describe(b"k").result() == KeyInfo(1, None, None)

    await asyncio.to_thread(work)


async def test_a_count_is_a_read() -> None:
    """Readers answer counts, of the state that the client has seen; the writer those of others."""
    async with cluster() as running, Client(running.addresses) as many:
        await many.put(b"k", b"v")
        assert await many.count() == Count(1, more=False)
        assert await many.count(read_level=ReadLevel.LINEARIZABLE) == Count(1, more=False)
        asked = [member.state.calls["Count"] for member in (*running.readers, running.writer)]
        assert sorted(asked[:-1]) == [0, 1]
        assert asked[-1] == 1
    demanding = operations.count(min_seq=7).demanding_min_seq()
    assert kv_pb2.CountRequest.FromString(demanding.data).header.min_seq == 7


async def test_a_count_may_take_all_of_its_time() -> None:
    """No other server is asked while a reader counts for longer than it may be silent."""
    async with cluster() as running:
        async with Client(running.writer.address) as client:
            await client.put(b"k", b"v")
        for reader in running.readers:
            reader.state.failures.append(silent())
        async with Client(running.addresses, replica_wait_ms=1) as client:
            with pytest.raises(DeadlineExceeded):
                await client.count(timeout_ms=100)
        members = (*running.readers, running.writer)
        assert sum(member.state.calls["Count"] for member in members) == 1


async def test_an_older_server_is_named_as_the_reason(client: Client, server: DictServer) -> None:
    """What an older server does not know is refused, or left out of the result."""
    await client.put(b"k", b"v", ttl_ms=1)
    server.state.failures.append(bare(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    with pytest.raises(Unimplemented, match="does not know the call Count: it may be older"):
        await client.count()
    for field in ("then[0].change", "changes[0]"):
        server.state.failures.append(refusing(InvalidRequest(field, "no change is set")))
        with pytest.raises(Unimplemented, match=r"kind of change in .*: it may be older"):
            await (client.touch(b"k") if "then" in field else client.write(Batch().touch(b"k")))
    deleted = await client.delete(b"k", count=True)
    assert (deleted.deleted, deleted.deleted_more) == (None, False)
    assert (await client.delete_range(prefix=b"k", count=True)).deleted is None


def test_results_are_decoded() -> None:
    """Counted deletes have numbers, and touches say whether there is a value."""
    commit = Commit(0, None, 0, None)
    assert counted_commit_of(kv_pb2.DeleteReply(deleted=0)) == Commit(0, None, 0, None, deleted=0)
    assert counted_commit_of(kv_pb2.DeleteReply()) == commit
    reply = kv_pb2.DeleteRangeReply(deleted=10_000, deleted_more=True)
    expected = Commit(0, None, 0, None, deleted=10_000, deleted_more=True)
    assert counted_commit_of(reply) == expected
    results = [kv_pb2.TxnResult(touched=True), kv_pb2.TxnResult(touched=False)]
    assert txn_result_of(kv_pb2.TxnReply(results=results)).results == (True, False)


def test_requests_say_what_is_wanted() -> None:
    """A touch is one change of a transaction; deletes are counted only on demand."""
    touch = kv_pb2.TxnRequest.FromString(operations.touch(b"k", 5).data)
    change = kv_pb2.Change(touch=kv_pb2.TouchChange(key=b"k", ttl_ms=5))
    assert touch.then == [kv_pb2.TxnOperation(change=change)]
    assert list(Batch().touch(b"k", 5)) == [Touch(b"k", 5)]
    assert Batch().touch(b"k", 5).size_bytes == 1
    plain = kv_pb2.DeleteRequest(key=b"k", durability=kv_pb2.DURABILITY_DURABLE)
    assert operations.delete(b"k").data == plain.SerializeToString()
    assert kv_pb2.DeleteRequest.FromString(operations.delete(b"k", count=True).data).count_deleted


def test_counters_can_be_read() -> None:
    """A value of 8 bytes is a number, little endian and signed; another one is refused."""
    assert Value((-2).to_bytes(8, "little", signed=True), 1, None).as_int() == -2
    with pytest.raises(ValueError, match="a counter has 8 bytes, and this value has 2"):
        Value(b"12", 1, None).as_int()
