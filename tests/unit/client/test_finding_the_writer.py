"""Writes reach the writer at any address, and are applied once."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from shalekv.errors import Fenced, IssuerUnavailable, Stopping
from shalekv.v1 import kv_pb2
from shalekv_client import (
    AccessUnknown,
    Client,
    Commit,
    ConnectionLost,
    Missing,
    NotTheWriter,
    NoWriter,
    RetryPolicy,
    SessionToken,
    ShaleKVError,
    Unauthenticated,
    WrongDatabase,
    request_id_of_calls,
)
from shalekv_client import Stopping as ClientStopping
from shalekv_client.routing.fleet import Routing
from tests.kit.constants import set_constants
from tests.kit.serving.dict_server import losing, received, refusing, silent
from tests.kit.timeouts import scaled_timeout_s
from tests.unit.client.cluster import Cluster, cluster, until_asked, until_called
from tests.unit.client.token_server import WRONG, guarded

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)
WITHOUT_KEYS = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20, idempotent=False)
FENCED = refusing(Fenced("another took over", own_epoch=7, newer_epoch=8))
STOPPING = refusing(Stopping("stopping"))

together = pytest.mark.parametrize("coalesce", [True, False], ids=["together", "alone"])


def writes(running: Cluster) -> list[int]:
    """Return how many puts each server was asked for, the writer last."""
    return [member.state.calls["Put"] for member in (*running.readers, running.writer)]


@together
async def test_reader_is_followed_to_a_writer_that_nobody_listed(*, coalesce: bool) -> None:
    """A client of one reader writes to the writer that the reader reports, and remembers it."""
    async with cluster(readers=1) as running:
        (reader,) = running.readers
        async with Client(reader.address, coalesce=coalesce) as client:
            for number in range(3):
                assert (await client.put(b"k", b"%d" % number)).seq == number + 1
            assert (await client.get(b"k")) is not None
        assert writes(running) == [1, 3]
        assert reader.state.calls["Get"] == 1


@together
async def test_reader_that_knows_no_writer_leaves_none(*, coalesce: bool) -> None:
    """Without a writer, a write ends at its deadline as not applied."""
    async with cluster(readers=1) as running:
        (reader,) = running.readers
        reader.state.writer_address = ""
        async with Client(reader.address, coalesce=coalesce, retry=QUICK) as client:
            with pytest.raises(NoWriter) as caught:
                await client.put(b"k", b"v", timeout_ms=1_500)
        assert isinstance(caught.value.__cause__, NotTheWriter) or reader.state.statuses
        assert reader.address in str(caught.value)


@together
async def test_new_writer_at_a_new_address_is_found_through_readers(*, coalesce: bool) -> None:
    """When the writer is gone and readers report the old address for a while, writes
    continue, each applied once.
    """
    async with cluster() as running:
        async with Client(running.addresses, coalesce=coalesce, retry=QUICK) as client:
            await client.add(b"n")
            old = running.writer
            new = await running.take_over()
            await old.stop()
            write = asyncio.create_task(client.add(b"n"))
            for member in running.readers:
                await until_asked(member, 3)
            assert not write.done()
            running.tell(new)
            assert await write == 2
            assert await client.add(b"n") == 3
        assert new.state.calls["Write"] == 2


async def test_write_whose_reply_is_lost_is_applied_once_across_writers() -> None:
    """A repeat at the next writer has the same idempotency key, so that the write is
    applied once.
    """
    async with cluster() as running:
        async with Client(running.addresses, retry=QUICK) as client:
            old = running.writer
            old.state.failures.append(losing())
            write = asyncio.create_task(client.put(b"k", b"v", condition=Missing()))
            await until_called(old, "Put")
            new = await running.take_over()
            old.state.role = kv_pb2.ROLE_READER  # it is not asked for writes any more
            old.state.epoch, old.state.writer_address = new.state.epoch, new.address
            running.tell(new)
            assert (await write).seq == 1
        keys = [member.state.requests[-1].header.idempotency_key for member in (old, new)]
        assert keys[0] == keys[1] != b""
        assert len(new.state.replies) == 1


@together
async def test_fenced_writer_is_left_for_the_new_one(*, coalesce: bool) -> None:
    """A writer that reports that it was fenced is not asked again, even if it reports
    itself as the writer.
    """
    async with cluster() as running:
        async with Client(running.addresses, coalesce=coalesce, retry=WITHOUT_KEYS) as client:
            await client.put(b"k", b"0")
            old = running.writer
            old.state.failures.extend([FENCED] * 9)
            new = await running.take_over()
            write = asyncio.create_task(client.put(b"k", b"1"))
            await until_called(old, "Put", 2)
            running.tell(new)
            assert (await write).seq > 1 << 32
        assert old.state.calls["Put"] == 2


async def test_writer_that_stops_is_asked_no_more_often_than_the_policy_says() -> None:
    """Attempts at a sole writer that answers STOPPING are counted, although the search
    finds it again.
    """
    async with cluster() as running:
        running.writer.state.failures.extend([STOPPING] * 99)
        policy = RetryPolicy(attempts_max=4, backoff_initial_ms=1)
        async with Client(running.addresses, retry=policy) as client:
            with pytest.raises(ClientStopping):
                await client.put(b"k", b"v")
        assert writes(running) == [0, 0, 4]


async def test_silent_writer_is_left_when_there_is_another() -> None:
    """A stalled writer delays a write only until its role is checked."""
    async with cluster() as running, Client(running.addresses, retry=QUICK) as client:
        client.fleet.set_routing(Routing(writer_silence_ms=50))
        await client.put(b"k", b"0")
        old = running.writer
        old.state.failures.append(silent())
        old.state.status_is_silent = True
        running.tell(await running.take_over())
        assert (await client.put(b"k", b"1")).seq > 1 << 32


async def test_what_was_not_sent_yet_goes_to_the_new_writer() -> None:
    """Operations that were not sent to a writer that is gone are repeated at the new one,
    even without an idempotency key.
    """
    async with cluster() as running, Client(running.addresses, retry=WITHOUT_KEYS) as client:
        await client.put(b"first", b"")
        old = running.writer
        old.state.answering.clear()
        value = bytes(900_000)  # of which a session holds nine
        puts = [asyncio.create_task(client.put(b"%02d" % n, value)) for n in range(15)]
        await received(old, 10)
        running.tell(await running.take_over())
        await old.stop()
        ended = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(each) for each in ended] == [ConnectionLost] * 9 + [Commit] * 6
        assert running.writer.state.calls["Put"] == 6


async def test_write_under_way_leaves_a_writer_that_is_dropped() -> None:
    """A write that an old writer never answers continues as soon as the new writer is known."""
    async with cluster() as running:
        addresses = [member.address for member in running.readers]
        async with Client(addresses, retry=QUICK) as client:
            client.fleet.set_routing(Routing(writer_silence_ms=3_600_000))
            await client.put(b"k", b"0")
            old = running.writer
            old.state.answering.clear()
            under_way = asyncio.create_task(client.put(b"k", b"1"))
            await received(old, 2)
            running.tell(await running.take_over())
            assert await client.get(b"k") is not None  # its reply has a newer epoch
            assert (await client.put(b"k", b"2")).seq > 1 << 32
            assert (await under_way).seq > 1 << 32
            old.state.answering.set()


async def test_session_goes_to_the_writer() -> None:
    """An explicit session finds the writer itself; later the new one."""
    async with cluster() as running, Client(running.addresses, retry=QUICK) as client:
        async with client.session() as session:
            put, get = session.put(b"k", b"0"), session.get(b"k")
        assert (put.result().seq, get.result() is not None) == (1, True)
        old = running.writer
        running.tell(await running.take_over())
        await old.stop()
        assert (await client.put(b"k", b"1")).seq > 1
        async with client.session() as session:
            put = session.put(b"k", b"2")
        assert put.result().seq > 1 << 32


async def test_server_of_another_database_is_not_written_to() -> None:
    """A list with servers of two databases is refused before anything is written."""
    async with cluster() as running, cluster(readers=0) as other:
        other.writer.state.database_id = bytes(16)
        async with Client([*running.addresses, other.writer.address], retry=QUICK) as client:
            await client.get(b"k")  # binds the client to the first database
            running.writer.state.role = kv_pb2.ROLE_READER
            with pytest.raises(WrongDatabase):
                await client.put(b"k", b"v")
        assert other.writer.state.calls["Put"] == 0


async def test_token_of_another_database_stops_a_write() -> None:
    """With a token, a lone server is asked for its database before the first write."""
    async with cluster(readers=0) as running:
        token = SessionToken(bytes(16), 5)
        async with Client(running.writer.address, token=token) as client:
            with pytest.raises(WrongDatabase):
                await client.put(b"k", b"v")
            with pytest.raises(WrongDatabase):
                await client.get(b"k")
        assert running.writer.state.calls["Put"] == 0


async def test_many_writes_search_together() -> None:
    """All writes that wait for the writer share one search: a round asks each server once,
    and is followed by another if the writer answers late.
    """
    async with cluster() as running:
        async with Client(running.addresses, retry=QUICK) as client:
            await asyncio.gather(*(client.put(b"%d" % n, b"") for n in range(200)))
        assert all(member.state.statuses <= 5 for member in (*running.readers, running.writer))


async def test_session_without_a_writer_fails_as_not_applied() -> None:
    """When no writer is found, the operations of a session fail as not applied."""
    async with cluster(readers=1) as running:
        (reader,) = running.readers
        await running.writer.stop()
        async with (
            Client([reader.address, running.writer.address], timeout_ms=1_500) as client,
            client.session() as session,
        ):
            put = session.put(b"k", b"v")
        with pytest.raises(NoWriter):
            put.result()


@together
async def test_each_call_has_its_own_name_in_the_error_of_a_search(*, coalesce: bool) -> None:
    """All calls share one search, which tells servers none of their names."""

    async def put(client: Client, name: str, timeout_ms: int) -> ShaleKVError:
        with (
            request_id_of_calls(name) if name else nullcontext(),
            pytest.raises(ShaleKVError) as failed,
        ):
            await client.put(b"k", b"v", timeout_ms=timeout_ms)
        return failed.value

    names = ("a1", "a2", "")
    async with guarded() as refusing_server, cluster(readers=1) as running:
        (reader,) = running.readers
        reader.state.writer_address = refusing_server.address  # so the search ends soon
        both = [refusing_server.address, reader.address]
        async with Client(both, access_token=WRONG, coalesce=coalesce) as client:
            found = await asyncio.gather(*(put(client, name, 3_600_000) for name in names))
        assert {type(error) for error in found} == {Unauthenticated}
        reader.state.writer_address = ""
        async with Client(reader.address, coalesce=coalesce) as client:
            found += await asyncio.gather(*(put(client, name, 200) for name in names))
    assert {type(error) for error in found[len(names) :]} == {NoWriter}
    assert [error.details.request_id for error in found] == [*names, *names]


@together
async def test_a_server_that_refuses_the_caller_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, *, coalesce: bool
) -> None:
    """The others are asked until one of them is the writer, and it is left alone meanwhile."""
    set_constants(monkeypatch, {"shalekv_client.routing.writer_search:REFUSED_PAUSE_S": 1_000})
    async with guarded() as refusing_server, cluster(readers=1) as running:
        (reader,) = running.readers
        reader.state.writer_address = ""
        addresses = [refusing_server.address, reader.address]
        async with Client(addresses, access_token=WRONG, coalesce=coalesce) as client:
            write = asyncio.create_task(client.put(b"k", b"v"))
            await until_asked(reader, 3)
            assert not write.done()
            running.tell(running.writer)
            assert (await write).seq == 1
        assert refusing_server.refused == 1
        assert writes(running) == [0, 1]


async def test_the_refusal_is_the_error_when_no_other_server_is_the_writer() -> None:
    """It says more than that none was found. If the others say that the writer is the one that
    refuses, the search ends before the deadline.
    """
    async with guarded() as refusing_server, cluster(readers=1) as running:
        (reader,) = running.readers
        reader.state.writer_address = ""
        addresses = [refusing_server.address, reader.address]
        async with Client(addresses, access_token=WRONG) as client:
            timeout_ms = round(1_000 * scaled_timeout_s(1))  # in which all are asked several times
            with pytest.raises(Unauthenticated, match=refusing_server.address):
                await client.put(b"k", b"v", timeout_ms=timeout_ms)
            assert reader.state.statuses > 2
            reader.state.writer_address, before = refusing_server.address, reader.state.statuses
            with pytest.raises(Unauthenticated, match=refusing_server.address):
                await client.put(b"k", b"v", timeout_ms=3_600_000)
            assert reader.state.statuses <= before + 2


@together
async def test_an_unknown_outcome_stays_unknown_when_repeats_are_refused(*, coalesce: bool) -> None:
    """A server that cannot find out who calls says nothing about an attempt before."""
    away = refusing(IssuerUnavailable("its issuer does not answer"))
    async with cluster(readers=0) as running:
        running.writer.state.failures.extend([losing(), away, away])
        policy = RetryPolicy(attempts_max=3, backoff_initial_ms=1)
        address = running.writer.address
        async with Client(address, coalesce=coalesce, retry=policy) as client:
            with pytest.raises(ConnectionLost) as lost:
                await client.put(b"k", b"v")
            assert isinstance(lost.value.__cause__, AccessUnknown)
            assert (await client.get(b"k")) is not None
