"""Reads of one client show what it has written and seen, whichever server answers."""

from __future__ import annotations

import pytest

from shalekv.v1 import kv_pb2
from shalekv_client import (
    Client,
    ConditionFailed,
    Durability,
    Exists,
    ReadLevel,
    RetryPolicy,
    SeqIs,
    SeqNotReached,
    SessionToken,
    WrongDatabase,
)
from tests.kit.serving.dict_server import DATABASE_ID
from tests.unit.client.cluster import Cluster, Member, cluster

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)

together = pytest.mark.parametrize("coalesce", [True, False], ids=["together", "alone"])
silently = pytest.mark.parametrize("silently", [True, False], ids=["waits", "refuses"])


def lag(running: Cluster, *, silently: bool = False) -> None:
    for reader in running.readers:
        reader.state.lag(silently=silently)


def min_seqs(member: Member) -> list[int]:
    gets = (each for each in member.state.requests if isinstance(each, kv_pb2.GetRequest))
    return [request.header.min_seq for request in gets]


@together
@silently
async def test_own_writes_are_read_although_readers_lag(*, coalesce: bool, silently: bool) -> None:
    """A read after a write waits for readers for a part of its time, and then asks the writer."""
    async with cluster() as running:
        lag(running, silently=silently)
        async with Client(running.addresses, coalesce=coalesce, replica_wait_ms=40) as client:
            await client.put(b"k", b"v")
            found = await client.get(b"k")
            assert found is not None
            assert await client.batch_get([b"k"]) == [found]
            assert [entry.key async for entry in client.scan()] == [b"k"]
        assert [header.min_seq for header in running.writer.state.scan_headers] == [0]


async def test_reads_never_go_back() -> None:
    """A later read at another server shows at least the state that an earlier one has shown."""
    async with cluster() as running:
        fresh, behind = running.readers
        behind.state.lag(silently=False)
        async with Client(running.writer.address) as other:
            await other.put(b"k", b"new")
        async with Client([fresh.address, behind.address]) as client:
            found = [await client.get(b"k") for _ in range(6)]
        first = next(number for number, value in enumerate(found) if value is not None)
        assert all(value is not None for value in found[first:])
        assert first <= 1


async def test_without_consistency_each_read_is_alone() -> None:
    """With `consistency="none"` reads have no `min_seq`."""
    async with cluster() as running:
        lag(running)
        async with Client(running.addresses, consistency="none") as client:
            await client.put(b"k", b"v")
            assert [await client.get(b"k") for _ in range(4)] == [None] * 4
        assert [min_seqs(reader) for reader in running.readers] == [[0, 0], [0, 0]]


async def test_lone_writer_gets_no_min_seq() -> None:
    """Requests to one plain writer have no `min_seq`, and no server is asked for its role first."""
    async with cluster(readers=0) as running:
        async with Client(running.writer.address) as client:
            await client.put(b"k", b"v")
            await client.get(b"k")
            assert [entry.key async for entry in client.scan()] == [b"k"]
        assert min_seqs(running.writer) == [0]
        assert running.writer.state.scan_headers[0].min_seq == 0
        assert running.writer.state.statuses == 0


async def test_writer_that_was_replaced_unknowingly_is_not_believed() -> None:
    """When a stalled writer answers with an older state than was seen, the new writer is asked."""
    async with cluster(readers=0) as running:
        old = running.writer
        new = await running.take_over()
        async with Client(new.address) as other:
            await other.put(b"k", b"new")
            token = other.token
        async with Client([old.address, new.address], reads="writer", token=token) as client:
            for _ in range(3):
                found = await client.get(b"k")
                assert found is not None
        assert old.state.calls["Get"] <= 1


async def test_memory_writes_are_not_waited_for() -> None:
    """A write that a crash may revoke does not raise the `min_seq` of later reads."""
    async with cluster() as running, Client(running.addresses) as client:
        await client.put(b"a", b"1")
        await client.put(b"b", b"2", durability=Durability.MEMORY)
        await client.write([], durability=Durability.MEMORY)
        assert client.token == SessionToken(DATABASE_ID, 1)
        await client.put(b"c", b"3")
        assert client.token == SessionToken(DATABASE_ID, 3)


async def test_uncommitted_reads_are_not_waited_for() -> None:
    """Reads and scans of level UNCOMMITTED do not raise the `min_seq` of later reads."""
    async with cluster() as running:
        async with Client(running.writer.address) as other:
            await other.put(b"k", b"v")
        level = ReadLevel.UNCOMMITTED
        async with Client(running.addresses) as client:
            assert (await client.get(b"k", read_level=level)) is not None
            assert [entry.key async for entry in client.scan(read_level=level)] == [b"k"]
            token = client.token
            assert token is not None
            assert token.seq <= 1  # of the header of a status at most, which is committed
            lag(running)
            assert min_seqs(running.readers[0]) == []


async def test_refused_condition_is_remembered() -> None:
    """A read after a failed condition shows the state that the condition was checked against."""
    async with cluster(readers=1) as running:
        running.readers[0].state.lag(silently=False)
        async with Client(running.addresses) as client, Client(running.writer.address) as other:
            assert await client.get(b"k") is None
            await other.put(b"k", b"theirs")
            with pytest.raises(ConditionFailed):
                await client.put(b"k", b"mine", condition=SeqIs(seq=99))
            found = await client.get(b"k")
            assert found is not None
            assert found.value == b"theirs"
            await client.put(b"k", b"mine", condition=Exists())


async def test_token_carries_over_to_another_client() -> None:
    """A client with the token of another, given at creation or later, reads what that one wrote."""
    async with cluster() as running:
        lag(running)
        async with Client(running.addresses) as first:
            assert first.token is None
            await first.put(b"k", b"v")
            text = str(first.token)
        async with Client(running.addresses, token=text) as second:
            assert (await second.get(b"k")) is not None
        async with Client(running.addresses) as third:
            await third.get(b"k")
            third.advance(text)
            assert (await third.get(b"k")) is not None
            with pytest.raises(WrongDatabase):
                third.advance(SessionToken(bytes(16), 1))
            third.advance(SessionToken(DATABASE_ID, 0))
            assert str(third.token) == text


async def test_seq_that_nobody_has_is_an_error() -> None:
    """When no server reaches the `min_seq` in time, the error has the seq that one has reached."""
    async with cluster() as running:
        token = SessionToken(DATABASE_ID, 50)
        for reader in running.readers:
            reader.state.lag(silently=False)
        await running.writer.stop()
        async with Client(running.addresses, token=token, retry=QUICK) as client:
            with pytest.raises(SeqNotReached) as caught:
                await client.get(b"k", timeout_ms=1_500)
        assert (caught.value.seq, isinstance(caught.value, TimeoutError)) == (0, True)


async def test_lone_server_that_went_back_is_an_error() -> None:
    """A sole server with an older state than before is asked to reach it, and is not believed."""
    async with cluster(readers=0) as running:
        state = running.writer.state
        async with Client(running.writer.address, retry=QUICK) as client:
            await client.put(b"k", b"1")
            await client.put(b"k", b"2")
            state.seq = 1
            with pytest.raises(SeqNotReached):
                await client.get(b"k", timeout_ms=1_500)
        assert min_seqs(running.writer)[:2] == [0, 2]
