"""`shalekv bench`: what it asks for, what it counts, and that it cleans up."""

from __future__ import annotations

import json
import random
import re

import grpc
import pytest

from shalekv.cli.bench import bench
from shalekv.cli.benchmark.latencies import Latencies
from shalekv.errors import QueueFull
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.cli_client.conftest import Run

FEW = ["--count", "30", "--clients", "3", "--keys", "20", "--format", "json"]


@pytest.mark.parametrize("through", ["unary", "coalesced", "session"])
async def test_operations_are_counted(run: Run, server: DictServer, through: str) -> None:
    """Each kind is done as often as it was asked for, however it travels, and nothing stays."""
    result = await run(bench, "put", "get", "mixed", "txn", "scan", "--through", through, *FEW)
    assert result.exit_code == 0, result.output
    rows = {row["operation"]: row for row in map(json.loads, result.stdout.splitlines())}
    mixed = rows.pop("mixed get")["count"] + rows.pop("mixed put")["count"]
    assert {name: row["count"] for name, row in rows.items()} | {"mixed": mixed} == dict.fromkeys(
        ["put", "get", "mixed", "txn", "scan"], 30
    )
    for row in rows.values():
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["p99_9_ms"] <= row["max_ms"]
        assert row["errors"] == {}
    assert server.state.data == {}
    assert server.state.calls["DeleteRange"] == 1


async def test_a_duration_ends_it(run: Run) -> None:
    """Without a count the time decides."""
    result = await run(bench, "get", "--duration", "50ms", "--keys", "5", "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["count"] > 0


async def test_errors_are_counted_by_reason(run: Run, server: DictServer) -> None:
    """What fails is not repeated, and stands beside what succeeds."""
    server.state.failures.extend([refusing(QueueFull("full", retry_after_ms=1)), None, losing()])
    result = await run(bench, "put", *FEW, "--clients", "1", "--through", "unary")
    row = json.loads(result.stdout)
    assert row["errors"] == {"QUEUE_FULL": 1, "ConnectionLost": 1}
    assert row["count"] == 28


async def test_what_the_server_does_not_have_ends_it(run: Run, server: DictServer) -> None:
    """There is nothing to measure then, and the keys are deleted all the same."""
    server.state.failures.extend([None, bare(grpc.StatusCode.UNIMPLEMENTED, "nobody knows Txn")])
    result = await run(bench, "txn", *FEW, "--clients", "1", "--through", "unary")
    assert result.exit_code == 2
    assert "nobody knows Txn" in result.stderr
    assert server.state.data == {}


async def test_keys_can_be_kept(run: Run, server: DictServer) -> None:
    """--keep leaves them, and says where they are; two runs don't meet."""
    first = await run(bench, "get", *FEW, "--keep", "--value-bytes", "7")
    await run(bench, "get", *FEW, "--keep", "--value-bytes", "7")
    assert len(server.state.data) == 40
    found = re.search(r"all keys that begin with (\S+)", first.stderr)
    assert found is not None
    assert sum(key.startswith(found.group(1).encode()) for key in server.state.data) == 20
    assert {len(entry.value) for entry in server.state.data.values()} == {7}


async def test_a_table_is_for_people(run: Run) -> None:
    """Headings, and a dash where nothing failed."""
    table = await run(bench, "put", *FEW[:-1], "table")
    heading, row = table.stdout.splitlines()
    assert heading.split()[:3] == ["operation", "count", "per_s"]
    assert (row.split()[:2], row.split()[-1]) == (["put", "30"], "-")


async def test_a_duration_and_a_count_exclude_each_other(run: Run, server: DictServer) -> None:
    """Two ends are a usage error."""
    result = await run(bench, "--count", "1", "--duration", "1s")
    assert result.exit_code == 2
    assert server.state.requests == []


def test_percentiles_are_right_to_a_percent() -> None:
    """However many latencies there are, they are told nearly as if all were kept."""
    chance = random.Random(3)
    samples_s = [chance.lognormvariate(-6, 1.5) for _ in range(20_000)]
    latencies = Latencies()
    for sample_s in samples_s:
        latencies.record(sample_s)
    samples_s.sort()
    for percent in (0.01, 50.0, 90.0, 99.0, 99.9, 100.0):
        exact_ms = samples_s[max(0, -int(-len(samples_s) * percent // 100) - 1)] * 1000.0
        found_ms = latencies.percentile_ms(percent)
        assert found_ms is not None
        assert abs(found_ms - exact_ms) <= 0.01 * exact_ms + 0.001
    assert latencies.max_us == int(samples_s[-1] * 1e6)
    assert Latencies().percentile_ms(50.0) is None
