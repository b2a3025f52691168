"""`shalekv load`: batches of rows, their writes, and the messages after a failure."""

from __future__ import annotations

import gzip
import re

import grpc
import pytest

from shalekv.cli.commands.load import load
from shalekv.cli.load.batches import RowBatch
from shalekv.cli.load.ledger import Account
from shalekv.cli.load.lines import InputPosition
from shalekv.cli.load.run import RateLimit
from shalekv.errors import Fenced, InvalidRequest
from shalekv_client import Put
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.cli_client.conftest import Run

FENCED = refusing(Fenced("another took over", own_epoch=1, newer_epoch=2))
HELLO = [None]  # a load asks for the status first, which works


def lines(count: int) -> bytes:
    return b"".join(b"k%d\tv%d\n" % (number, number) for number in range(count))


def rows_at(number: int, first_line: int, count: int) -> RowBatch:
    puts = [Put(b"%d" % line, b"") for line in range(count)]
    begin, end = InputPosition(first_line - 1), InputPosition(first_line - 1 + count)
    return RowBatch(number, puts, range(first_line, first_line + count), [], 0, begin, end)


async def test_last_row_of_a_key_wins_when_an_earlier_one_is_late(
    run: Run, server: DictServer
) -> None:
    """A batch that is retried is not overtaken by a batch that sets one of its keys."""
    server.state.failures.extend([*HELLO, bare(grpc.StatusCode.UNAVAILABLE)])
    result = await run(load, "--batch-count", "1", stdin=b"k\tfirst\nk\tlast\n")
    assert result.exit_code == 0
    assert server.state.data[b"k"].value == b"last"


async def test_server_errors_report_how_far_it_got(run: Run, server: DictServer) -> None:
    """A refused batch ends the load with its exit code, its lines, and the last stored line."""
    server.state.failures.extend([*HELLO, None, FENCED])
    result = await run(load, "--batch-count", "2", "--in-flight", "1", stdin=lines(9))
    assert result.exit_code == 4
    assert "Error: lines 3 to 4:" in result.stderr
    assert "Lines 1 to 2 are stored. Loading again is safe." in result.stderr
    assert sorted(server.state.data) == [b"k0", b"k1"]


async def test_refused_fields_are_found_in_the_file(run: Run, server: DictServer) -> None:
    """If the server refuses one change of a batch, the message has its line."""
    server.state.failures.extend(
        [*HELLO, None, refusing(InvalidRequest("changes[1].put.value", "x"))]
    )
    result = await run(load, "--batch-count", "3", "--in-flight", "1", stdin=lines(6))
    assert result.exit_code == 2
    assert "Error: line 5: " in result.stderr


def test_only_a_gapless_beginning_is_certain() -> None:
    """Batches acknowledged out of order count once all earlier ones are."""
    account = Account()
    account.acknowledge(rows_at(1, 4, 3))
    assert (account.position.line, account.rows_ahead) == (0, 3)
    account.acknowledge(rows_at(3, 9, 2))
    account.acknowledge(rows_at(0, 1, 3))
    assert (account.position.line, account.rows_ahead) == (6, 2)
    assert account.certain_rows == 6


async def test_damaged_gzip_is_an_error(run: Run, server: DictServer) -> None:
    """Rows before the damage of a gzip file are stored, and the damage is an error."""
    data = gzip.compress(lines(30_000), compresslevel=1)
    result = await run(load, stdin=data[: len(data) // 2])
    assert result.exit_code == 2
    assert "the input cannot be read" in result.stderr
    said = re.search(r"Lines 1 to ([\d,]+) are stored", result.stderr)
    assert said is not None
    assert len(server.state.data) == int(said.group(1).replace(",", "")) > 0


async def test_a_load_outlives_its_server(run: Run, server: DictServer) -> None:
    """Writes with an unknown outcome are retried until --timeout-ms."""
    server.state.failures.extend([*HELLO, None, losing(), losing(), None, losing()])
    result = await run(load, "--batch-count", "1", "--in-flight", "2", stdin=lines(9))
    assert result.exit_code == 0, result.output
    assert values(server) == {b"k%d" % n: b"v%d" % n for n in range(9)}
    assert server.state.seq == 9  # each was applied once


def test_a_rate_is_kept_and_lost_time_is_not_made_up_for() -> None:
    """Batches keep the rate, and lost time is not made up for."""
    pace = RateLimit(rows_per_s=100)
    assert pace.wait_s(5.0, 50) == 0.0
    assert pace.wait_s(5.0, 50) == 0.5
    assert pace.wait_s(5.5, 10) == 0.5
    assert pace.wait_s(9.0, 10) == 0.0
    assert pace.wait_s(9.0, 10) == pytest.approx(0.1)
    assert (
        pace.batch_count_max(1_000),
        pace.batch_count_max(5),
        RateLimit(1).batch_count_max(9),
    ) == (
        10,
        5,
        1,
    )


def values(server: DictServer) -> dict[bytes, bytes]:
    return {key: entry.value for key, entry in server.state.data.items()}
