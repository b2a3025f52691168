"""Commands whose server fails: exit code, message, and the output before."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys

import click
import grpc
import pytest

from shalekv.cli.commands.bench import Latencies, bench
from shalekv.cli.commands.get import get
from shalekv.cli.commands.put import put
from shalekv.cli.commands.scan import scan
from shalekv.cli.commands.top import top
from shalekv.cli.console.output import TABLE_ROWS
from shalekv.errors import Fenced, PageExpired, QueueFull
from shalekv.v1 import kv_pb2
from tests.kit.serving.dict_server import DictServer, Failure, bare, losing, refusing, silent
from tests.unit.cli_client.conftest import Run

UNAVAILABLE, UNIMPLEMENTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED
FULL = refusing(QueueFull("full", retry_after_ms=60_000))
FEW = ("--count", "30", "--clients", "1", "--keys", "20", "--format", "json", "--through", "unary")


@pytest.mark.parametrize(
    ("command", "args", "how", "code", "words"),
    [
        (put, "k v", refusing(Fenced("taken", own_epoch=1, newer_epoch=2)), 4, "taken"),
        (put, "k v", bare(UNIMPLEMENTED), 2, "does not know the call Put"),
        (put, "k v", FULL, 10, "Nothing was changed"),
        (put, "k v", bare(UNAVAILABLE, "gone"), 11, "is not known"),
        (get, "k --timeout-ms 50", silent(), 11, "The limit was 50 ms"),
        (scan, "--page-token Z29uZQ==", refusing(PageExpired("page token")), 10, "page token"),
    ],
    ids=["fenced", "absent", "full", "unknown", "silent", "expired"],
)
async def test_failures_report_what_is_certain(
    run: Run,
    server: DictServer,
    command: click.Command,
    args: str,
    how: Failure,
    code: int,
    words: str,
) -> None:
    """The exit code and the last line say whether a write may have been applied."""
    server.state.failures.extend([how] * 10)
    result = await run(command, *args.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr


@pytest.mark.parametrize("command", [get, top])
async def test_an_unknown_wire_in_the_environment_is_a_usage_error(
    run: Run, command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable and its values."""
    monkeypatch.setenv("SHALEKV_CLIENT_WIRE", "foo")
    result = await run(command, *(["k"] if command is get else ["--once"]))
    assert result.exit_code == 2
    assert "SHALEKV_CLIENT_WIRE must be one of native, grpcio, not 'foo'" in result.stderr


async def test_another_server_at_the_address_is_told(run: Run) -> None:
    """What answers in HTTP/1.1 is no server of ShaleKV, and the message says so."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await run(get, "k", "--addr", f"127.0.0.1:{port}")
    assert result.exit_code == 9
    assert result.stderr.splitlines() == [
        f"Error: 127.0.0.1:{port}: no connection to the server: this is not HTTP/2",
        "What listens there is no server of ShaleKV: correct --addr.",
    ]


async def test_interrupts_have_an_exit_code(server: DictServer) -> None:
    """Ctrl-C ends a waiting command with code 130 and without a traceback."""
    server.state.failures.append(silent())
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shalekv.cli.main", "get", "k", "--addr", server.address),
        stderr=asyncio.subprocess.PIPE,
    )
    await server.state.begun.wait()
    command.send_signal(signal.SIGINT)
    _, said = await command.communicate()
    assert (command.returncode, said) == (130, b"Interrupted.\n")


@pytest.mark.parametrize("output_format", ["table", "json", "raw"])
async def test_a_scan_prints_what_came_before_a_failure(
    run: Run, server: DictServer, output_format: str
) -> None:
    """The keys before a failure are printed once and in order, then the error."""
    keys = [f"{number:05}" for number in range(2 * TABLE_ROWS + 1)]
    for key in keys:
        server.state.data[key.encode()] = kv_pb2.Entry(key=key.encode(), seq=1)
    for failure_after, expected, code in ((None, keys, 0), (1, keys[:3], 11)):
        server.state.scan_failure_after = failure_after
        result = await run(scan, "--format", output_format, "--keys-only")
        found = result.stdout.split()
        if output_format == "json":
            found = [json.loads(line)["key"] for line in result.stdout.splitlines()]
        assert [key for key in found if key != "key"] == expected
        assert (result.exit_code, "made to fail" in result.stderr) == (code, bool(code))


async def test_bench_counts_errors_by_reason(run: Run, server: DictServer) -> None:
    """Failed operations are not retried, and are counted beside the successes."""
    server.state.failures.extend([FULL, None, losing()])
    row = json.loads((await run(bench, "put", *FEW)).stdout)
    assert row["errors"] == {"QUEUE_FULL": 1, "ConnectionLost": 1}
    assert row["count"] == 28


async def test_bench_ends_where_an_operation_is_missing(run: Run, server: DictServer) -> None:
    """A bench of an unimplemented operation ends, and deletes its keys."""
    server.state.failures.extend([None, bare(UNIMPLEMENTED)])
    result = await run(bench, "txn", *FEW)
    assert result.exit_code == 2
    assert "does not know the call Txn" in result.stderr
    assert server.state.data == {}


def test_percentiles_are_right_to_a_percent() -> None:
    """Percentiles are within 1 % of those of all latencies."""
    chance = random.Random(3)
    samples_s = sorted(chance.lognormvariate(-6, 1.5) for _ in range(20_000))
    latencies = Latencies()
    for sample_s in samples_s:
        latencies.record(sample_s)
    for percent in (0.01, 50.0, 90.0, 99.0, 99.9, 100.0):
        exact_ms = samples_s[max(0, -int(-len(samples_s) * percent // 100) - 1)] * 1000.0
        found_ms = latencies.percentile_ms(percent)
        assert found_ms is not None
        assert abs(found_ms - exact_ms) <= 0.01 * exact_ms + 0.001
    assert latencies.max_us == int(samples_s[-1] * 1e6)
    assert Latencies().percentile_ms(50.0) is None
