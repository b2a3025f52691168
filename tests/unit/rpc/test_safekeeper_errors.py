"""What a safekeeper refuses, as its callers see it, and what it tells of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shalekv.core.quorum.messages import Append, Greet, Health
from shalekv.core.quorum.record import Ballot
from shalekv.engine.quorum.links import DatabasePlace, LinkBroken
from shalekv.errors import (
    DatabaseExists,
    InvalidRequest,
    InvalidUrl,
    Stopping,
)
from shalekv.format.quorum_messages import propose_request
from shalekv.roles.safekeeper.service import SafekeeperService
from shalekv.rpc.safekeeper import SERVICE
from shalekv.rpc.server import Server
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.v1 import safekeeper_pb2_grpc
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    Safekeeper,
    flushed_lsn,
    running_node,
    safekeeper,
    safekeeper_settings,
)
from tests.kit.serving.rpc import RawCalls, failure, runtime


async def test_admit_is_refused(tmp_path: Path) -> None:
    """Errors of an admission arrive as what they are."""
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
    """A status tells what the node holds."""
    async with safekeeper(tmp_path) as it:
        member_id = await it.admit()
        writer = await it.lead(3)
        await writer.append(bytes(5_000), b"two", committed_lsn=1)
        status = await it.links.status(it.address)
        assert status.disk_free_bytes > 0
        [member] = status.members
        assert member.place == it.place()
        assert (member.member_id, member.promise) == (member_id, writer.ballot)
        assert (member.health, member.log) == (Health.SOUND, writer.log)
        assert (member.committed_lsn, member.archived_wal_id) == (1, None)
        assert member.log_bytes > 5_000
        assert not member.full_problem


async def propose(it: Safekeeper, *messages: bytes) -> grpc.StatusCode:
    """How a stream with these messages ends."""
    async with grpc.aio.insecure_channel(it.address) as channel:
        call = RawCalls(channel).stream_stream(f"/{SERVICE}/Propose", [*messages])
        return (await failure(call)).code


async def test_streams_that_break_the_rules(tmp_path: Path) -> None:
    """The first message of a stream names the database, no other does, and all are messages."""
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
    """A node that shuts down answers what it took, ends its streams, and says so."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        assert flushed_lsn(await writer.append(b"one")) == 1
        it.node.close()
        await writer.link.send(Append(writer.ballot, writer.make(b"two"), 0))
        with pytest.raises(LinkBroken, match="shutting down"):
            await writer.link.receive()


async def test_refusing_server(tmp_path: Path) -> None:
    """A server that refuses ends streams that go on, and reports NOT_SERVING."""
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        server = Server(settings.server, runtime())
        await server.start_safekeeper(SafekeeperService(node))
        async with grpc.aio.insecure_channel(server.listen) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)  # the stubs leave its methods out
            checked = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            stub = safekeeper_pb2_grpc.SafekeeperStub(channel)
            stream = stub.Propose()
            await server.refuse(Stopping("not now"))
            checked = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await failure(stream)).code is grpc.StatusCode.UNAVAILABLE
        await server.stop()


async def test_ballot_is_said(tmp_path: Path) -> None:
    """A refusal over the wire names the ballot that was promised."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(5)
        [member] = (await it.links.status(it.address, DATABASE_ID)).members
        assert member.promise == Ballot(5, writer.ballot.nonce)
