"""The protocol between a writer and a safekeeper, and its refusals, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shalekv.errors import (
    BadChecksum,
    DatabaseExists,
    InvalidRequest,
    InvalidUrl,
    NotAMember,
    Stopping,
)
from shalekv.format.quorum.messages import propose_request
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Ballot,
    Greet,
    LogEnd,
    LogHealth,
    Refusal,
    Vote,
)
from shalekv.rpc.methods import SAFEKEEPER_SERVICE
from shalekv.rpc.server import Server
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.store.files import FileSystem
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.v1 import safekeeper_pb2_grpc
from shalekv.write.quorum.links import DatabasePlace, LinkBroken
from shalekv_client import Client, Unimplemented
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    DEADLINE_S,
    Safekeeper,
    Writer,
    flushed_lsn,
    last_of,
    running_node,
    safekeeper,
    safekeeper_settings,
)
from tests.kit.serving.rpc import RawCalls, failure, runtime

SECOND = Ballot(2, b"2" * 16)


class HeldFileSystem(FileSystem):
    """A file system whose syncs of data wait while they are held."""

    def __init__(self) -> None:
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.is_waiting = threading.Event()

    def sync_data(self, descriptor: int) -> None:
        if not self.may_sync.is_set():
            self.is_waiting.set()
            assert self.may_sync.wait(DEADLINE_S)
        super().sync_data(descriptor)


async def test_vote_waits_for_the_disk(tmp_path: Path) -> None:
    """A vote is sent when the promise and the appends before it are on the disk (CE9)."""
    files = HeldFileSystem()
    async with safekeeper(tmp_path, filesystem=files) as it:
        await it.admit()
        old = await it.lead(1)
        new = Writer(await it.connect(), SECOND)
        await new.greet()
        files.may_sync.clear()
        await old.link.send(Append(old.ballot, old.make(b"one"), 0))
        assert await asyncio.to_thread(files.is_waiting.wait, DEADLINE_S)
        voting = asyncio.create_task(new.vote())
        member = it.node.find(it.place().database_id)
        while member.state.promise != SECOND:  # noqa: ASYNC110 - it is seen from outside alone
            await asyncio.sleep(0)
        assert not voting.done()
        files.may_sync.set()
        vote = await voting
        assert isinstance(vote, Vote)
        assert vote.log.last == last_of(old.records)


async def test_calls_of_other_roles(tmp_path: Path) -> None:
    """A safekeeper says that it is one, whatever is asked of it, by a call or in a session."""
    async with safekeeper(tmp_path) as it, Client(it.address) as client:
        for asked in (client.slow_calls(), client.status(), client.put(b"a", b"1")):
            with pytest.raises(
                Unimplemented, match=r"is a safekeeper, .* ask a writer or a reader"
            ):
                await asked


async def test_full_log(tmp_path: Path) -> None:
    """A log with too much unarchived data refuses appends, but takes votes and commit points."""
    async with safekeeper(tmp_path, unarchived_bytes_max=16 << 20) as it:
        await it.admit()
        writer = await it.lead(1)
        payload = bytes(6 << 20)
        assert await writer.append(payload, payload) == Appended(writer.ballot, 2)
        refused = writer.make(payload)
        assert await writer.send(refused, committed_lsn=2) == Appended(
            writer.ballot, 2, None, is_full=True
        )
        [status] = (await it.links.status(it.address)).members
        assert status.committed_lsn == 2
        other = Writer(await it.connect(), SECOND)
        await other.greet()
        assert isinstance(await other.vote(), Vote)


async def test_an_idle_writer_is_notified(tmp_path: Path) -> None:
    """A writer that sends nothing is notified at once that the member promised another one."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        old = await it.lead(1)
        new = Writer(await it.connect(), SECOND)
        await new.greet()
        assert isinstance(await new.vote(), Vote)
        async with asyncio.timeout(DEADLINE_S):
            refusal = await old.link.receive()
        assert isinstance(refusal, Refusal)
        assert refusal.promise == SECOND


async def test_end_of_the_stream(tmp_path: Path) -> None:
    """Closing a link wakes those who wait on it, and its messages do not count any more."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        receiving = asyncio.create_task(writer.link.receive())
        await asyncio.sleep(0)
        await writer.link.close()
        with pytest.raises(LinkBroken):
            await receiving
        with pytest.raises(LinkBroken):
            await writer.link.send(Greet())
        member = it.node.find(it.place().database_id)
        async with asyncio.timeout(DEADLINE_S):
            while member.state.leader is not None:  # noqa: ASYNC110 - it is seen from outside alone
                await asyncio.sleep(0)


async def test_unknown_database(tmp_path: Path) -> None:
    """A safekeeper without a log of the database refuses its writer with `NotAMember`."""
    async with safekeeper(tmp_path) as it:
        link = await it.connect()
        await link.send(Greet())
        with pytest.raises(NotAMember, match="no log of the database"):
            await link.receive()


async def test_damaged_on_the_way(tmp_path: Path) -> None:
    """A record that does not match its checksum is refused, and changes nothing."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        [record] = writer.make(b"one")
        damaged = replace(record, payload=b"two")
        await writer.link.send(Append(writer.ballot, (damaged,), 0))
        with pytest.raises(BadChecksum):
            await writer.link.receive()
        assert it.node.find(it.place().database_id).state.log.last == LogEnd()


async def test_admit_is_refused(tmp_path: Path) -> None:
    """Errors of an admission arrive with their classes."""
    async with safekeeper(tmp_path) as it:
        elsewhere = DatabasePlace(DATABASE_ID, "s3://elsewhere/db")
        with pytest.raises(InvalidUrl, match="s3://elsewhere/db is not at or below"):
            await it.links.admit(it.address, elsewhere, b"r" * 16)
        with pytest.raises(InvalidRequest, match="request_id"):
            await it.links.admit(it.address, it.place(), b"short")
        await it.admit()
        await it.lead(1)
        with pytest.raises(DatabaseExists):
            await it.links.admit(it.address, it.place(), b"o" * 16)


async def test_status(tmp_path: Path) -> None:
    """A status has the state of all members of the node."""
    async with safekeeper(tmp_path) as it:
        member_id = await it.admit()
        writer = await it.lead(3)
        await writer.append(bytes(5_000), b"two", committed_lsn=1)
        status = await it.links.status(it.address)
        assert status.disk_free_bytes > 0
        [member] = status.members
        assert member.place == it.place()
        assert (member.member_id, member.promise) == (member_id, writer.ballot)
        assert (member.health, member.log) == (LogHealth.SOUND, writer.log)
        assert (member.committed_lsn, member.archived_wal_id) == (1, None)
        assert member.log_bytes > 5_000
        assert not member.full_problem


async def propose(it: Safekeeper, *messages: bytes) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(it.address) as channel:
        call = RawCalls(channel).stream_stream(f"/{SAFEKEEPER_SERVICE}/Propose", [*messages])
        return (await failure(call)).code


async def test_streams_that_break_the_rules(tmp_path: Path) -> None:
    """Only the first message of a stream names the database; invalid bytes are refused."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        greet = propose_request(Greet())
        without = greet.SerializeToString()
        greet.database.CopyFrom(wire.DatabasePlace(database_id=DATABASE_ID))
        first = greet.SerializeToString()
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        assert await propose(it, without) is invalid
        assert await propose(it, first, first) is invalid
        assert await propose(it, b"\xff") is invalid
        assert await propose(it, first, b"\xff\xff") is invalid
        assert await propose(it, first, wire.ProposeRequest().SerializeToString()) is invalid


async def test_shutting_down(tmp_path: Path) -> None:
    """A node that shuts down replies to messages that it took, and ends streams with a reason."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        assert flushed_lsn(await writer.append(b"one")) == 1
        it.node.close()
        await writer.link.send(Append(writer.ballot, writer.make(b"two"), 0))
        with pytest.raises(LinkBroken, match="shutting down"):
            await writer.link.receive()


async def test_refusing_server(tmp_path: Path) -> None:
    """A server that refuses calls ends its open streams, and reports NOT_SERVING."""
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        server = Server(settings.server, runtime())
        await server.start_safekeeper(SafekeeperService(node))
        async with grpc.aio.insecure_channel(server.listen) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)  # the stubs leave its methods out
            checked = await health.Check(health_pb2.HealthCheckRequest(service=SAFEKEEPER_SERVICE))
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            stub = safekeeper_pb2_grpc.SafekeeperStub(channel)
            stream = stub.Propose()
            server.refuse(Stopping("not now"))
            checked = await health.Check(health_pb2.HealthCheckRequest(service=SAFEKEEPER_SERVICE))
            assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await failure(stream)).code is grpc.StatusCode.UNAVAILABLE
        await server.stop()


async def test_retire_and_status_are_refused(tmp_path: Path) -> None:
    """Requests about a member that the node does not have are refused."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        with pytest.raises(NotAMember, match="its disk may have been lost"):
            await it.links.retire(it.address, DATABASE_ID, b"x" * 16)
        with pytest.raises(NotAMember):
            await it.links.status(it.address, b"x" * 16)
