"""`shalekv admin slow` against a server whose calls are all slow."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from shalekv.cli.commands.admin_slow import slow
from shalekv.clock import LoopClock
from shalekv.rpc.call_telemetry import Recorders
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import kv_pb2
from tests.kit.serving.memory_service import MemoryAdmin
from tests.kit.serving.rpc import serving
from tests.unit.rpc.test_names import NAMED, TOLD


async def test_a_table_has_a_row_for_each_call() -> None:
    """With what was waited for, and the names of the call; as JSON, also with its stages."""
    slow_calls = SlowCalls(1_000, LoopClock())
    slow_calls.slow_ns = -1
    with capture_logs():  # of the server, which would print into the command's output
        async with serving(recorders=Recorders(slow_calls)) as it:
            await it.kv.Get(kv_pb2.GetRequest(key=b"a"), metadata=NAMED)
            runner = CliRunner(env={"SHALEKV_ADDR": it.server.listen})
            table = await asyncio.to_thread(runner.invoke, slow, ["--format", "table"])
            found = await asyncio.to_thread(runner.invoke, slow, ["--format", "json"])
    head, row = table.stdout.splitlines()[:2]
    assert head.split()[:2] == ["ended", "method"]
    assert row.split()[-2:] == [TOLD["x-request-id"], TOLD["x-trace-id"]]
    assert " KV.Get " in row
    assert " other, " in row
    assert table.stderr.endswith("took longer than 1,000 ms.\n")
    assert "missing" not in table.stderr
    call = next(each for each in map(json.loads, found.stdout.splitlines()) if each["trace_id"])
    assert call["method"] == "KV.Get"
    assert list(call["stages_ms"]) == ["other"]
    assert call["key_hash"]
    assert call["process"] == 0


async def test_processes_that_share_a_port_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row begins with the number of its process; one that has not answered is named."""
    monkeypatch.setattr(MemoryAdmin, "missing_processes", (1,))
    slow_calls = SlowCalls(1_000, LoopClock(), process=2)
    slow_calls.slow_ns = -1
    with capture_logs():
        async with serving(recorders=Recorders(slow_calls)) as it:
            await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
            runner = CliRunner(env={"SHALEKV_ADDR": it.server.listen})
            table = await asyncio.to_thread(runner.invoke, slow, ["--format", "table"])
    head, row = table.stdout.splitlines()[:2]
    assert (head.split()[0], row.split()[0]) == ("process", "2")
    assert table.stderr.endswith("Process 1 has not answered: its calls are missing.\n")
