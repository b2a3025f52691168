"""What callers name their calls: `x-request-id` and `traceparent`, in replies and in logs."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.rpc.call_telemetry import Recorders
from shalekv.telemetry.activity import Activity, CallActivity, CommitActivity
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import kv_pb2
from shalekv_wire.trace_context import (
    REQUEST_ID_CHARS_MAX,
    UNNAMED,
    call_names,
    parse_traceparent,
)
from tests.kit.serving.rpc import serving
from tests.unit.rpc.sessions import SocketSession, operation

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
NAMED = (("x-request-id", "a1"), ("traceparent", TRACEPARENT))
OWN_TRACE = "f" * 32
CODES = {b"a": grpc.StatusCode.OK, b"!full": grpc.StatusCode.RESOURCE_EXHAUSTED}
TOLD = {"x-request-id": "a1", "x-trace-id": TRACE_ID}


class OneTracer:
    """A tracer that samples what its callers sample, or all; and keeps what it was told."""

    def __init__(self, *, samples_all: bool = False) -> None:
        self.samples_all = samples_all
        self.began: list[str] = []
        self.ended: list[tuple[str, CallActivity]] = []

    @property
    def dropped(self) -> int:
        return 0

    def by_chance(self) -> bool:
        return self.samples_all

    def begin_call(self, method: str, activity: CallActivity) -> None:
        self.began.append(method)
        activity.span = object()
        if activity.parent is None:
            activity.trace_id = OWN_TRACE

    def end_call(self, activity: CallActivity, code: str, ended_ns: int) -> None:
        assert ended_ns > activity.began_ns
        self.ended.append((code, activity))

    def end_commit(self, activity: CommitActivity, problem: str = "") -> None: ...

    def begin_job(self, name: str) -> Activity:
        raise AssertionError(name)  # calls are none

    def end_job(self, activity: Any, attributes: Any, problem: str = "") -> None: ...


def recorders(tracer: OneTracer) -> Recorders:
    return Recorders(SlowCalls(0, LoopClock()), tracer)


async def told_by(call: Any) -> dict[str, str]:
    """The names in the metadata of a call that has ended."""
    await call.code()
    metadata = [*(await call.initial_metadata()), *(await call.trailing_metadata())]
    return {key: value for key, value in metadata if key in TOLD}


async def test_replies_and_errors_have_the_names_of_their_calls() -> None:
    """Of calls with one reply and with many; calls without names have none."""
    async with serving() as it:
        for key, code in CODES.items():
            key_range = kv_pb2.KeyRange(prefix=key)
            calls: list[tuple[Any, Message]] = [
                (it.kv.Get, kv_pb2.GetRequest(key=key)),
                (it.kv.Put, kv_pb2.PutRequest(key=key)),
                (it.kv.Scan, kv_pb2.ScanRequest(range=key_range)),
            ]
            for method, request in calls:
                call = method(request, metadata=NAMED)
                assert await call.code() is code
                assert await told_by(call) == TOLD
                assert await told_by(method(request)) == {}
        assert {call.trace_id for call in it.service.calls} == {TRACE_ID, ""}


async def test_a_call_that_is_refused_before_it_begins_has_its_names() -> None:
    """They do not depend on what answers."""
    async with serving(concurrent_calls_max=1) as it:
        it.service.hold = True
        held = it.kv.Put(kv_pb2.PutRequest(key=b"a"))
        await it.service.holds(1)
        refused = it.kv.Get(kv_pb2.GetRequest(key=b"a"), metadata=NAMED)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await told_by(refused) == TOLD
        counts = it.server.counts
        assert counts.refusals == {"OVERLOADED": 1}
        assert {count.method: count.codes() for count in counts} == {
            "KV.Get": {"RESOURCE_EXHAUSTED": 1}
        }
        assert it.server.in_progress_count == 1
        held.cancel()


async def test_log_lines_have_the_names_of_their_calls() -> None:
    """The line of each call, and that of an error for which the server is to blame."""
    with capture_logs() as logs:
        async with serving(log_level="debug") as it:
            await told_by(it.kv.Get(kv_pb2.GetRequest(key=b"!corrupt"), metadata=NAMED))
            await told_by(it.kv.Get(kv_pb2.GetRequest(key=b"!bug"), metadata=NAMED))
    lines = {line["event"]: line for line in logs}
    for event in ("call", "call failed", "unexpected error in a call"):
        assert (lines[event]["request_id"], lines[event]["trace_id"]) == ("a1", TRACE_ID)


async def test_a_call_that_is_traced_by_chance_tells_its_trace() -> None:
    """Its span ends with its code, whether it is answered at once, waits, or streams."""
    tracer = OneTracer(samples_all=True)
    async with serving(recorders=recorders(tracer)) as it:
        get = it.kv.Get(kv_pb2.GetRequest(key=b"a"), metadata=NAMED[:1])
        assert await told_by(get) == {"x-request-id": "a1", "x-trace-id": OWN_TRACE}
        calls: list[Any] = [
            it.kv.Get(kv_pb2.GetRequest(key=b"!full")),
            it.kv.Put(kv_pb2.PutRequest(key=b"a")),
            it.kv.Scan(kv_pb2.ScanRequest()),
        ]
        for call in calls:
            assert await told_by(call) == {"x-trace-id": OWN_TRACE}
    assert tracer.began == ["KV.Get", "KV.Get", "KV.Put", "KV.Scan"]
    assert [code for code, _ in tracer.ended] == ["OK", "RESOURCE_EXHAUSTED", "OK", "OK"]
    assert all(activity.trace_id == OWN_TRACE for _, activity in tracer.ended)


async def test_a_call_is_traced_if_its_caller_is() -> None:
    """And not, if the caller says so; it keeps the trace of its caller all the same."""
    tracer = OneTracer(samples_all=True)
    unsampled = (("traceparent", TRACEPARENT[:-2] + "00"),)
    async with serving(recorders=recorders(tracer)) as it:
        assert await told_by(it.kv.Get(kv_pb2.GetRequest(), metadata=unsampled)) == {
            "x-trace-id": TRACE_ID
        }
        assert tracer.began == []
        await told_by(it.kv.Get(kv_pb2.GetRequest(), metadata=NAMED))
    assert [activity.parent for _, activity in tracer.ended] == [parse_traceparent(TRACEPARENT)]


async def test_operations_of_a_session_have_names_of_their_own() -> None:
    """An operation without any has those of the session."""
    tracer = OneTracer()
    async with serving(recorders=recorders(tracer)) as it:
        session = SocketSession(it.kv, metadata=(("x-request-id", "all"),))
        own = operation(1, kv_pb2.PutRequest(key=b"a"))
        own.request_id, own.traceparent = "one", TRACEPARENT
        await session.send(own, operation(2, kv_pb2.PutRequest(key=b"b")))
        await session.take(2)
        await session.rest()
    named = [(call.request_id, call.trace_id) for call in it.service.calls]
    assert named == [("one", TRACE_ID), ("all", "")]
    assert tracer.began == ["Session.put"]


async def test_the_error_of_an_operation_has_its_names() -> None:
    """Its own or those of the session, also if it is refused before it begins; or none."""
    for metadata, others in ((), ("", "")), (NAMED, ("a1", TRACE_ID)):
        async with serving() as it:
            session = SocketSession(it.kv, metadata=metadata)
            unset, full = operation(1), operation(2, kv_pb2.GetRequest(key=b"!full"))
            for each in unset, full:
                each.request_id, each.traceparent = "one", f"00-{OWN_TRACE}-{SPAN_ID}-00"
            await session.send(unset, full, operation(3), operation(4, full.get))
            results = await session.rest()
        found = [results[number].error for number in range(1, 5)]
        assert [error.code for error in found] == [3, 8, 3, 8]
        named = [(error.request_id, error.trace_id) for error in found]
        assert named == [("one", OWN_TRACE), ("one", OWN_TRACE), others, others]


@pytest.mark.parametrize(
    "text",
    ["", "x", f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01", f"{TRACEPARENT}-more"],
)
def test_a_malformed_span_is_none(text: str) -> None:
    """It is ignored, and nothing of it is sent back."""
    assert parse_traceparent(text) is None
    assert call_names("", text) is UNNAMED


def test_what_cannot_be_sent_is_no_request_id() -> None:
    """Only printable ASCII is; the rest of a long one is cut off."""
    assert call_names("a\u00e9", "") is UNNAMED
    assert call_names("a\r\nb: c", "") is UNNAMED
    assert call_names("x" * 1_000, "").request_id == "x" * REQUEST_ID_CHARS_MAX
    cut = "x" * (REQUEST_ID_CHARS_MAX - 1)
    assert call_names(f" {cut} y", "").request_id == cut
