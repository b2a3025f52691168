"""Slow calls of a real server, and what they have waited for."""

from __future__ import annotations

import grpc
import pytest
from structlog.testing import capture_logs

from shalekv.cli.process.traces import open_tracer
from shalekv.settings.telemetry import TelemetrySettings
from shalekv_client import Client
from tests.kit.processes.stalled_put import stalled_put
from tests.servers.otlp import collector
from tests.servers.s3 import S3Server

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMED = (("x-request-id", "checkout-81"), ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00"))


@pytest.fixture(autouse=True)
def credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


async def test_a_stalled_put_is_named_by_all_calls_that_waited_for_it(s3_server: S3Server) -> None:
    """The line and the list name the object, and how many calls shared its group."""
    with capture_logs() as logs:
        async with stalled_put(s3_server, "slow-calls-named") as stalled:
            await stalled.put_many(3, {1: NAMED})
            calls = await stalled.slow_calls()
            async with Client(stalled.served.listen) as client:
                told = await client.slow_calls()
    assert stalled.rule.spent == 1
    assert [call.method for call in calls] == ["KV.Put"] * 3
    for call in calls:
        assert call.code == "OK"
        assert call.wal_id == stalled.wal_id
        assert call.group_commits == 3
        assert call.waited_for.startswith(f"create of {stalled.wal_name}, ")
        assert call.requests[0].name == stalled.wal_name
        assert max(call.stages, key=lambda stage: stage.duration_ms).name == "stored"
        assert call.key_hash
    assert len({call.key_hash for call in calls}) == 3
    assert [call.waited_for for call in told.calls] == [call.waited_for for call in calls]
    assert told.calls[0].stages_ms["stored"] == max(told.calls[0].stages_ms.values())
    lines = [line for line in logs if line["event"] == "slow call"]
    assert [line["others_waiting"] for line in lines] == [2] * 3
    assert all(stalled.wal_name in line["waited_for"] for line in lines)
    (named,) = [line for line in lines if "request_id" in line]
    assert (named["request_id"], named["trace_id"]) == ("checkout-81", TRACE_ID)


async def test_a_call_whose_deadline_passes_names_the_put_that_is_still_running(
    s3_server: S3Server,
) -> None:
    """Whether the server has ended the call, or its client has gone."""
    async with stalled_put(s3_server, "slow-calls-late") as stalled:
        late = await stalled.put("late", timeout=0.3)
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        (call,) = await stalled.slow_calls()
    assert call.code == "DEADLINE_EXCEEDED"
    assert call.waited_for.startswith(f"create of {stalled.wal_name}, ")
    assert " so far, 1 attempt" in call.waited_for


async def test_a_trace_leads_from_a_call_to_the_put_that_it_has_waited_for(
    s3_server: S3Server,
) -> None:
    """The commit that calls link to has the stalled PUT as its longest child, and links back."""
    sampled = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
    async with collector() as collected:
        settings = TelemetrySettings(otlp_endpoint=collected.url, trace_ratio=0)
        async with (
            open_tracer(settings, "writer", "s3://bucket/slow-calls-traced") as tracer,
            stalled_put(s3_server, "slow-calls-traced", tracer=tracer) as stalled,
        ):
            await stalled.put_many(4, {0: sampled, 2: sampled})
    calls = collected.named("KV.Put")
    (commit,) = collected.named("commit")
    assert len(calls) == 2
    assert {(call.trace_id, call.parent_id) for call in calls} == {(TRACE_ID, SPAN_ID)}
    assert {call.links for call in calls} == {frozenset({commit.span_id})}
    assert commit.links == {call.span_id for call in calls}
    assert commit.attributes["shalekv.commit.commits"] == 4
    request = max(collected.children(commit), key=lambda span: span.duration_ms)
    assert request.name == "create wal"
    assert request.attributes["shalekv.store.object"] == stalled.wal_name
