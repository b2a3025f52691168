"""`shalekv bench`: what it asks for, what it counts, and that it cleans up."""

from __future__ import annotations

import json
import random

import grpc

from shalekv.cli.bench import bench
from shalekv.cli.benchmark.latencies import Latencies
from shalekv.errors import QueueFull
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.cli_client.conftest import Run

FEW = ["--count", "30", "--clients", "3", "--keys", "20", "--format", "json"]


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
