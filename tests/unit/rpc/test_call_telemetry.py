"""What is noted of calls of a real server: the slow ones, their names, and what must not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from shalekv.clock import LoopClock, MachineClock
from shalekv.rpc.call_telemetry import NotedCall, Recorders
from shalekv.server.access.audit import AuditLog
from shalekv.server.access.audit_file import AuditFile
from shalekv.server.access.guard import Guard
from shalekv.server.service import Call
from shalekv.settings import AccessSettings, AuditLevel
from shalekv.telemetry.activity import CURRENT, CallActivity
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import admin_pb2, kv_pb2, kv_pb2_grpc
from tests.kit.processes.in_process import memory_store
from tests.kit.processes.in_process import serving as serving_writer
from tests.kit.serving.guarded import HeldPolicy, HeldTokens, KnownTokens, policy_of, shown
from tests.kit.serving.rpc import Serving, serving
from tests.unit.rpc.sessions import SocketSession, operation
from tests.unit.rpc.test_names import NAMED, TOLD, OneTracer, told_by

PUT = kv_pb2.PutRequest(key=b"a", value=b"1")


class BrokenTracer(OneTracer):
    """A tracer that fails at each step after the first."""

    def __init__(self, broken: str) -> None:
        super().__init__(samples_all=True)
        self.broken = broken

    def __getattribute__(self, name: str) -> Any:
        if name != "broken" and name == self.broken:
            return _fail
        return super().__getattribute__(name)


class BrokenClock(LoopClock):
    """A clock that slow calls cannot read."""

    def wall_ms(self) -> int | None:
        raise AssertionError


def _fail(*_: object) -> None:
    raise AssertionError


def noting_all(slow_calls: SlowCalls, tracer: OneTracer | None = None) -> Recorders:
    """Recorders to which each call is slow."""
    slow_calls.slow_ns = -1
    return Recorders(slow_calls, tracer)


async def outcomes(it: Serving[Any]) -> list[object]:
    """The codes of calls of all shapes, and the results of a session."""
    calls: list[Any] = [
        it.kv.Get(kv_pb2.GetRequest(key=b"a")),
        it.kv.Get(kv_pb2.GetRequest(key=b"!full")),
        it.kv.Put(PUT),
        it.kv.Put(kv_pb2.PutRequest(key=b"!full")),
        it.kv.Scan(kv_pb2.ScanRequest()),
    ]
    codes = [await call.code() for call in calls]
    session = SocketSession(it.kv)
    await session.send(operation(1, PUT), operation(2, kv_pb2.GetRequest(key=b"!full")))
    results = await session.rest()
    return [*codes, *(results[each].WhichOneof("result") for each in sorted(results))]


@pytest.mark.parametrize("broken", ["slow calls", "begin_call", "end_call"])
async def test_calls_do_not_fail_with_what_records_them(broken: str) -> None:
    """A bug of a recorder changes no end of any call."""
    recorders = noting_all(SlowCalls(1, LoopClock()), BrokenTracer(broken))
    if broken == "slow calls":
        recorders = noting_all(SlowCalls(1, BrokenClock()))
    async with serving() as it:
        expected = await outcomes(it)
    async with serving(recorders=recorders) as it:
        assert await outcomes(it) == expected
    assert grpc.StatusCode.INTERNAL not in expected


def test_a_call_is_the_current_one_while_it_is_answered() -> None:
    """Reads inside of the call are recorded in its activity, and later ones are not."""
    noted = NotedCall("KV.Get", 0, Call(), activity=CallActivity(0))
    assert noted.run(CURRENT.get) is noted.activity
    assert CURRENT.get() is None


async def test_the_log_goes_on_with_a_tracer_that_fails() -> None:
    """A group whose span cannot be recorded is durable all the same, and so is the next one."""
    async with (
        serving_writer(memory_store(), None, BrokenTracer("end_commit")) as served,
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        kv = kv_pb2_grpc.KVStub(channel)
        seqs = [(await kv.Put(PUT)).header.seq for _ in range(3)]
        assert seqs == sorted({*seqs})


async def test_a_watch_that_is_refused_has_the_names_of_its_stream() -> None:
    """In the error with which it is closed; the stream goes on."""
    async with (
        serving_writer(memory_store()) as served,
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        stream: Any = kv_pb2_grpc.KVStub(channel).Watch(metadata=NAMED)
        create = kv_pb2.WatchCreate(watch_id=1, header=kv_pb2.RequestHeader(min_seq=1))
        await stream.write(kv_pb2.WatchRequest(create=create))
        closed = (await stream.read()).closed
        stream.cancel()
    assert closed.reason == "INVALID_REQUEST"
    assert (closed.request_id, closed.trace_id) == (TOLD["x-request-id"], TOLD["x-trace-id"])


async def test_scans_and_operations_are_slow_calls_as_well() -> None:
    """A stream is noted at its end, and each operation of a session by itself, with its names."""
    slow_calls = SlowCalls(1, LoopClock())
    async with serving(recorders=noting_all(slow_calls)) as it:
        async for _ in it.kv.Scan(kv_pb2.ScanRequest(), metadata=NAMED):
            pass
        session = SocketSession(it.kv, metadata=(("x-request-id", "all"),))
        await session.send(operation(1, PUT), operation(2, kv_pb2.GetRequest(key=b"!full")))
        await session.rest()
        told = await it.admin.ListSlowCalls(admin_pb2.ListSlowCallsRequest())
    found = {call.method: (call.code, call.request_id, call.trace_id) for call in told.calls}
    assert found["KV.Scan"] == ("OK", TOLD["x-request-id"], TOLD["x-trace-id"])
    assert found["Session.put"] == ("OK", "all", "")
    assert found["Session.get"] == ("RESOURCE_EXHAUSTED", "all", "")


@pytest.mark.parametrize("samples_all", [False, True], ids=["untraced", "traced"])
async def test_a_slow_call_names_a_caller_who_was_looked_up(*, samples_all: bool) -> None:
    """Who calls is found out while the call is in progress, and told at its end."""
    slow_calls, tokens = SlowCalls(1, LoopClock()), HeldTokens("root")
    tokens.known.set()
    recorders = noting_all(slow_calls, OneTracer(samples_all=samples_all))
    async with serving(recorders=recorders, guard=Guard(tokens, HeldPolicy(policy_of()))) as it:
        await it.kv.Get(kv_pb2.GetRequest(key=b"a"), metadata=shown("root"))
    (slow,) = slow_calls.newest()
    assert (slow.principal, slow.key_hash != "") == ("token:root", True)


async def test_a_call_has_the_same_names_everywhere(tmp_path: Path) -> None:
    """In the metadata of its reply, its log line, its audit line, and the list of slow calls."""
    path, slow_calls = tmp_path / "audit.log", SlowCalls(1, LoopClock())
    file = AuditFile(str(path), MachineClock())
    settings = AccessSettings(audit_log=str(path), audit_level=AuditLevel.ALL)
    audit = AuditLog(settings, file, MachineClock(), "writer")
    guard = Guard(KnownTokens("root"), HeldPolicy(policy_of()), audit=audit)
    with capture_logs() as logs:
        recorders = noting_all(slow_calls)
        async with serving(recorders=recorders, guard=guard, log_level="debug") as it:
            call = it.kv.Get(kv_pb2.GetRequest(key=b"a"), metadata=(*NAMED, *shown("root")))
            told = await told_by(call)
    file.flush()
    lines = {line["event"]: line for line in logs}
    (line,) = map(json.loads, path.read_text().splitlines())
    (slow,) = slow_calls.newest()
    assert told == TOLD
    for each in (line, lines["call"], lines["slow call"]):
        assert (each["request_id"], each["trace_id"]) == (told["x-request-id"], told["x-trace-id"])
    assert (slow.request_id, slow.trace_id) == (told["x-request-id"], told["x-trace-id"])
