"""Audit lines of real calls: of each kind of operation, from a server with a real writer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.clock import MachineClock
from shalekv.protocol.access import Policy, Verb
from shalekv.server.access.audit import AuditLog
from shalekv.server.access.audit_file import AuditFile
from shalekv.server.access.guard import Guard
from shalekv.settings import AccessSettings, AuditKeys, AuditLevel
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from tests.kit.processes.in_process import memory_store, serving
from tests.kit.serving.guarded import HeldPolicy, KnownTokens, policy_of, prefix, shown
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import failure, serving_of

MINE = policy_of(alice=prefix(b"a/", Verb.READ, Verb.WRITE, Verb.WATCH))
RANGE = kv_pb2.KeyRange(prefix=b"a/")
PUT = kv_pb2.PutRequest(key=b"a/1", value=b"SECRET")


class Audited:
    """A server with an audit log, calls to it, and its lines."""

    def __init__(
        self, channel: grpc.aio.Channel, guard: Guard, file: AuditFile, path: Path
    ) -> None:
        self.kv: Any = kv_pb2_grpc.KVStub(channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(channel)
        self.guard = guard
        self._file = file
        self._path = path

    def lines(self) -> list[dict[str, Any]]:
        self._file.flush()
        return lines_of(self._path)

    def text(self) -> str:
        self._file.flush()
        return self._path.read_text()

    def told(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(line.get(name) for name in names) for line in self.lines()]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@asynccontextmanager
async def audited(
    path: Path, level: AuditLevel, policy: Policy = MINE, keys: AuditKeys = AuditKeys.PLAIN
) -> AsyncIterator[Audited]:
    settings = AccessSettings(audit_log=str(path), audit_level=level, audit_keys=keys)
    clock = MachineClock()
    with closing(AuditFile(str(path), clock)) as file:
        audit = AuditLog(settings, file, clock, "writer")
        guard = Guard(KnownTokens("alice", "root"), HeldPolicy(policy), audit=audit)
        async with (
            serving(memory_store(), guard) as served,
            grpc.aio.insecure_channel(served.listen) as channel,
        ):
            audit.enter_term(lambda: served.writer.epoch)
            yield Audited(channel, guard, file, path)


def as_alice(request_id: str = "") -> tuple[tuple[str, str], ...]:
    return (*shown("alice"), ("x-request-id", request_id))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


async def test_a_line_of_a_put_has_its_place_in_the_history(path: Path) -> None:
    """Who, from where, what, when, and the sequence number and epoch of the commit."""
    async with audited(path, AuditLevel.WRITES) as it:
        reply = await it.kv.Put(PUT, metadata=as_alice("req-7"))
        (line,) = it.lines()
        for name, told in {
            "principal": "token:alice",
            "request_id": "req-7",
            "method": "KV.Put",
            "verb": "write",
            "keys": ["a/1"],
            "outcome": "ok",
            "seq": reply.header.seq,
            "epoch": reply.header.epoch,
            "role": "writer",
            "request_bytes": PUT.ByteSize(),
            "reply_bytes": reply.ByteSize(),
        }.items():
            assert line[name] == told, name
        assert "127.0.0.1" in line["peer"]
        assert line["duration_ms"] > 0


async def test_each_operation_of_a_session_has_a_line(path: Path) -> None:
    """Those that were refused as well; the session itself has none."""
    async with audited(path, AuditLevel.ALL) as it:
        call = it.kv.Session(metadata=as_alice("all of them"))
        keys = [b"a/1", b"b/1", b"a/2"]
        operations = [
            kv_pb2.SessionOperation(id=number, put=kv_pb2.PutRequest(key=key))
            for number, key in enumerate(keys, 1)
        ]
        operations.append(kv_pb2.SessionOperation(id=4, get=kv_pb2.GetRequest(key=b"a/1")))
        await call.write(kv_pb2.SessionRequest(operations=operations))
        await call.done_writing()
        seqs = {each.id: each.put.header.seq async for reply in call for each in reply.results}
        lines = {line["keys"][0] + line["verb"]: line for line in it.lines()}
        assert {name: line["outcome"] for name, line in lines.items()} == {
            "a/1write": "ok",
            "b/1write": "denied",
            "a/2write": "ok",
            "a/1read": "ok",
        }
        assert (lines["a/1write"]["seq"], lines["a/2write"]["seq"]) == (seqs[1], seqs[3])
        assert {line["request_id"] for line in lines.values()} == {"all of them"}


async def test_refusals_have_lines_at_every_level(path: Path) -> None:
    """Also of reads, streams, and credentials that are not valid; allowed calls have none."""
    async with audited(path, AuditLevel.DENIED) as it:
        await it.kv.Put(PUT, metadata=as_alice())
        await it.kv.Get(kv_pb2.GetRequest(key=b"a/1"), metadata=as_alice())
        await failure(it.kv.Get(kv_pb2.GetRequest(key=b"b/1"), metadata=as_alice()))
        await failure(it.kv.Scan(kv_pb2.ScanRequest(), metadata=as_alice()))
        await failure(it.kv.Put(PUT))
        await failure(it.kv.Put(PUT, metadata=shown("forged")))
        await failure(it.kv.Session(iter([kv_pb2.SessionRequest()])))
        assert it.told("outcome", "method", "principal") == [
            ("denied", "KV.Get", "token:alice"),
            ("denied", "KV.Scan", "token:alice"),
            ("unauthenticated", "KV.Put", ""),
            ("unauthenticated", None, ""),
            ("unauthenticated", "KV.Session", ""),
        ]
        refused = it.guard.status()
        assert (refused.denied, refused.unauthenticated) == (2, 3)
        status = await it.admin.Status(admin_pb2.StatusRequest(), metadata=shown("root"))
        assert status.access == refused
        assert "forged" not in it.text()


async def test_administration_has_lines_from_its_level_on(path: Path) -> None:
    """Snapshots are named; reads and writes have none at this level."""
    async with audited(path, AuditLevel.ADMIN) as it:
        await it.kv.Put(PUT, metadata=as_alice())
        await it.admin.CreateSnapshot(
            admin_pb2.CreateSnapshotRequest(name="daily", ttl_s=60), metadata=shown("root")
        )
        await it.admin.Status(admin_pb2.StatusRequest(), metadata=shown("root"))
        assert it.told("method", "object", "outcome", "principal") == [
            ("Admin.CreateSnapshot", "daily", "ok", "token:root")
        ]


async def test_scans_and_watches_have_lines(path: Path) -> None:
    """A scan at its end, with what it has sent; a watch when it begins and when it ends."""
    async with audited(path, AuditLevel.ALL) as it:
        await it.kv.Put(PUT, metadata=as_alice())
        scan = it.kv.Scan(kv_pb2.ScanRequest(range=RANGE), metadata=as_alice())
        sent = [reply.ByteSize() async for reply in scan]
        watch = it.kv.Watch(metadata=as_alice())
        create = kv_pb2.WatchCreate(watch_id=1, range=RANGE)
        await watch.write(kv_pb2.WatchRequest(create=create))
        await watch.read()
        assert it.told("method", "outcome")[1:] == [("KV.Scan", "ok"), ("KV.Watch", "begun")]
        assert it.lines()[1]["reply_bytes"] == sum(sent)
        await watch.write(kv_pb2.WatchRequest(cancel=kv_pb2.WatchCancel(watch_id=1)))
        await watch.read()
        assert it.told("method", "outcome", "ranges")[-1] == ("KV.Watch", "ok", [{"prefix": "a/"}])
        watch.cancel()


async def test_errors_have_their_reason(path: Path) -> None:
    """A condition that does not hold, and a malformed request."""
    async with audited(path, AuditLevel.ALL) as it:
        absent = kv_pb2.PutRequest(key=b"a/1", precondition=kv_pb2.Precondition(absent=True))
        await it.kv.Put(absent, metadata=as_alice())
        await failure(it.kv.Put(absent, metadata=as_alice()))
        await failure(it.kv.BatchGet(kv_pb2.BatchGetRequest(), metadata=as_alice()))
        assert it.told("outcome", "reason") == [
            ("ok", None),
            ("error", "CONDITION_FAILED"),
            ("error", "INVALID_REQUEST"),
        ]


async def test_a_log_without_a_policy_has_lines_too(path: Path) -> None:
    """Before a policy is enforced, the log shows who would call."""
    async with audited(path, AuditLevel.WRITES, Policy()) as it:
        await it.kv.Put(PUT, metadata=as_alice())
        await it.kv.Put(PUT)
        assert it.told("principal", "outcome") == [("token:alice", "ok"), ("", "ok")]


async def test_processes_of_one_policy_hash_alike(path: Path, tmp_path: Path) -> None:
    """The same key has the same hash in the log of another process, and no name in it."""
    paths = [path, tmp_path / "other.log"]
    hashes = []
    for each in paths:
        async with audited(each, AuditLevel.WRITES, keys=AuditKeys.HASHED) as it:
            await it.kv.Put(PUT, metadata=as_alice())
            hashes += [line["keys"] for line in it.lines()]
            assert "a/1" not in it.text()
    assert hashes[0] == hashes[1]


async def test_hostile_metadata_stays_in_its_field(path: Path) -> None:
    """A request id cannot make a line longer than it may be, or look like another one."""
    async with audited(path, AuditLevel.ALL) as it:
        hostile = '"},{"outcome":"ok' + "~" * 4_000
        await it.kv.Put(PUT, metadata=(*shown("alice"), ("x-request-id", hostile)))
        (line,) = it.lines()
        assert line["outcome"] == "ok"
        assert len(line["request_id"]) < 300
        assert "SECRET" not in it.text()
        assert "Bearer" not in it.text()


async def test_a_cut_off_write_is_unknown(path: Path) -> None:
    """A client that leaves before its commit does not learn whether it was applied."""
    settings = AccessSettings(audit_log=str(path), audit_level=AuditLevel.ALL)
    clock = MachineClock()
    with closing(AuditFile(str(path), clock)) as file:
        audit = AuditLog(settings, file, clock, "writer")
        guard = Guard(KnownTokens(), HeldPolicy(Policy()), audit=audit)
        async with serving_of(MemoryKv(), guard=guard) as it:
            it.service.hold = True
            put = it.kv.Put(PUT)
            await it.service.holds(1)
            put.cancel()
            await asyncio.wait(it.service.held)
            await asyncio.sleep(0)
            file.flush()
    (line,) = lines_of(path)
    assert (line["outcome"], line["reason"]) == ("unknown", "CANCELLED")
