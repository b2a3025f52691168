"""`shalekv admin stats` against a server with prepared statistics."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result

from shalekv.cli.commands.admin_stats import COLUMNS, ORIGIN_COLUMNS, between, stats
from shalekv.v1 import admin_pb2
from shalekv_client.admin import stats_of
from tests.kit.serving.dict_server import DictServer
from tests.unit.cli_client.conftest import Run

HOUR_MS = 3_600_000


def reported(
    *processes: admin_pb2.ProcessRequests, url: str = "s3://bucket", **fields: Any
) -> admin_pb2.StatsReply:
    return admin_pb2.StatsReply(url=url, processes=processes, **fields)


def process(role: str, uptime_ms: int, **requests: int) -> admin_pb2.ProcessRequests:
    """A process of the server with its requests by kind."""
    counts = [
        admin_pb2.RequestCount(
            kind=admin_pb2.RequestKind.Value(f"REQUEST_KIND_{kind.upper()}"), requests=number
        )
        for kind, number in requests.items()
    ]
    return admin_pb2.ProcessRequests(role=role, uptime_ms=uptime_ms, requests=counts)


def rows(result: Result) -> dict[tuple[str, str], tuple[int, float, float | None]]:
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(tuple(row) == COLUMNS for row in found)
    return {
        (row["process"], row["kind"]): (row["requests"], row["per_minute"], row["usd_per_month"])
        for row in found
    }


async def test_rates_prices_and_totals(server: DictServer, run: Run) -> None:
    """Rates use the uptime of each process, with totals by kind and over all."""
    writer = process("writer", HOUR_MS, write=6_000, list=60)
    collector = process("collector", HOUR_MS // 2, list=30, read=3_000)
    server.state.stats.append(reported(writer, collector))
    assert rows(await run(stats, "--format", "json")) == {
        ("writer", "write"): (6_000, 100.0, 21.6),
        ("writer", "list"): (60, 1.0, 0.216),
        ("collector", "list"): (30, 1.0, 0.216),
        ("collector", "read"): (3_000, 100.0, 1.728),
        ("all", "write"): (6_000, 100.0, 21.6),
        ("all", "list"): (90, 2.0, 0.432),
        ("all", "read"): (3_000, 100.0, 1.728),
        ("all", "all"): (9_090, 202.0, 23.76),
    }


async def test_a_price_that_is_not_known_is_no_zero(server: DictServer, run: Run) -> None:
    """A missing price makes sums unknown, and can be given as a flag."""
    own = reported(process("writer", HOUR_MS, write=60, read=60), endpoint="localhost:9000")
    server.state.stats.extend([own, own, own])
    unknown = rows(await run(stats, "--format", "json"))
    assert [usd for _, _, usd in unknown.values()] == [None] * 5
    partly = rows(await run(stats, "--format", "json", "--usd-per-1000-writes", "1"))
    assert (partly["all", "write"][2], partly["all", "all"][2]) == (43.2, None)
    chosen = rows(await run(stats, "--format", "json", "--prices", "r2"))
    assert chosen["all", "all"][2] == pytest.approx(0.1944 + 0.0156, abs=1e-3)


async def test_an_interval_shows_what_was_sent_in_it(server: DictServer, run: Run) -> None:
    """An interval shows the differences of requests and of uptimes."""
    server.state.stats.extend(
        [
            reported(process("writer", HOUR_MS, write=1_000)),
            reported(process("writer", HOUR_MS + 2_000, write=1_010)),
        ]
    )
    found = rows(await run(stats, "--format", "json", "--interval-s", "1"))
    assert found["writer", "write"] == (10, 300.0, 64.8)


def test_a_process_that_begins_in_between_counts_whole() -> None:
    """A restarted or new process counts since its start."""
    before = stats_of(reported(process("writer", 9_000, write=50)))
    after = stats_of(
        reported(process("writer", 6_000, write=5), process("compactor", 3_000, list=1))
    )
    found = {(rate.process, rate.kind): rate for rate in between(before, after)}
    assert found["writer", "write"].requests == 5
    assert found["writer", "write"].per_minute == {"write": 50.0}
    assert found["compactor", "list"].per_minute == {"list": 20.0}


def origin(name: str, calls: int, dimension: str = "METHOD", **requests: int) -> Any:
    """What the calls of one origin have caused."""
    return admin_pb2.OriginCost(
        dimension=admin_pb2.OriginCost.Dimension.Value(f"DIMENSION_{dimension}"),
        name=name,
        calls=calls,
        requests=process("", 0, **requests).requests,
    )


async def test_what_calls_have_cost_by_their_origin(server: DictServer, run: Run) -> None:
    """Each origin has its cost per hour and per 1,000 calls, and the sum is of all; an interval
    shows what came in it.
    """
    before = [origin("KV.Put", 500, write=100), origin("background", 0, list=10)]
    after = [
        origin("background", 0, list=20),
        origin("KV.Put", 1_000, write=200),
        origin("KV.Get", 50),
        origin("a/", 7, "PREFIX", write=200),
    ]
    begun = reported(process("writer", HOUR_MS), origins=before)
    found = reported(process("writer", 3 * HOUR_MS), origins=after)
    server.state.stats.extend([found, begun, found])
    columns = ("method", *ORIGIN_COLUMNS)

    async def told(*options: str) -> list[tuple[Any, ...]]:
        result = await run(stats, "--format", "json", "--by", "method", *options)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert all(tuple(row) == columns for row in rows)
        return [tuple(row.values()) for row in rows]

    assert await told() == [
        ("KV.Put", 1_000, 200, 0.001, 0.0003333, 0.001),
        ("background", 0, 20, 0.0001, 3.333e-05, None),
        ("KV.Get", 50, 0, 0.0, 0.0, 0.0),
        ("all", 1_050, 220, 0.0011, 0.0003667, 0.001048),
    ]
    assert (await told("--interval-s", "1"))[0] == ("KV.Put", 500, 100, 0.0005, 0.00025, 0.001)


async def test_prices_of_the_server_come_before_those_of_lists(
    server: DictServer, run: Run
) -> None:
    """What the server knows of its prices is used, unless others are chosen or given."""
    told = reported(process("writer", HOUR_MS, write=60), usd_per_1000={"write": 1.0})
    server.state.stats.extend([told, told, told])
    own = await run(stats, "--format", "json")
    assert rows(own)["all", "all"][2] == 43.2
    assert "(the prices of the server)" in own.stderr
    chosen = await run(stats, "--format", "json", "--prices", "s3")
    assert rows(chosen)["all", "all"][2] == 0.216
    given = await run(stats, "--format", "json", "--usd-per-1000-writes", "2")
    assert rows(given)["all", "all"][2] == 86.4


async def test_a_short_uptime_is_remarked_on(server: DictServer, run: Run) -> None:
    """A short uptime is remarked on; without any requests there is no error."""
    server.state.stats.extend(
        [reported(process("writer", 5_000)), reported(process("writer", HOUR_MS))]
    )
    young = await run(stats, "--format", "json")
    assert rows(young) == {("all", "all"): (0, 0, 0)}
    assert young.stderr.splitlines()[-1] == (
        "Only 5 s of data, mostly start-up. Use --interval-s 60 for the current rate."
    )
    assert "--interval-s" not in (await run(stats)).stderr
