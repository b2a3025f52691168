"""`shalekv load`: rows to batches, batches to the server, and what it says of a failure."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import grpc
import pytest

from shalekv.cli.load import load
from shalekv.cli.loading.account import Account
from shalekv.cli.loading.pace import Pace
from shalekv.cli.pairs.batches import Rows
from shalekv.cli.pairs.lines import Position
from shalekv.cli.scan import scan
from shalekv.errors import Fenced, InvalidRequest
from shalekv_client import Put
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.cli_client.conftest import Run

FENCED = refusing(Fenced("another took over", own_epoch=1, newer_epoch=2))
HELLO = [None]  # a load asks for the status first, which works


def lines(count: int) -> bytes:
    """Rows k0 to k(count-1)."""
    return b"".join(b"k%d\tv%d\n" % (number, number) for number in range(count))


def rows_at(number: int, first_line: int, count: int) -> Rows:
    """A batch of `count` rows."""
    puts = [Put(b"%d" % line, b"") for line in range(count)]
    begin, end = Position(first_line - 1), Position(first_line - 1 + count)
    return Rows(number, puts, range(first_line, first_line + count), [], 0, begin, end)


async def test_every_row_is_stored(run: Run, server: DictServer, tmp_path: Path) -> None:
    """A file and standard input load alike: all rows, in batches, with totals."""
    file = tmp_path / "rows.tsv"
    file.write_bytes(lines(2_500))
    for args, stdin in (([str(file)], None), ([], lines(2_500)), (["-"], lines(2_500))):
        server.state.data.clear()
        server.state.calls.clear()
        result = await run(load, *args, stdin=stdin)
        assert result.exit_code == 0, result.output
        assert re.match(r"loaded 2,500 rows, [\d,]+ bytes .* rows/s\)\n", result.stdout)
        assert len(server.state.data) == 2_500
        assert server.state.data[b"k2499"].value == b"v2499"
        assert server.state.calls["Write"] == 3


async def test_loading_again_changes_nothing(run: Run, server: DictServer) -> None:
    """The same rows twice end in the same state."""
    await run(load, stdin=lines(10))
    first = {key: entry.value for key, entry in server.state.data.items()}
    await run(load, stdin=lines(10))
    assert {key: entry.value for key, entry in server.state.data.items()} == first


async def test_last_row_of_a_key_wins(run: Run, server: DictServer) -> None:
    """Batches in flight together never overtake each other for a key."""
    rows = b"".join(b"k\t%d\n" % number for number in range(50))
    result = await run(load, "--batch-count", "1", "--in-flight", "16", stdin=rows)
    assert result.exit_code == 0
    assert server.state.data[b"k"].value == b"49"


async def test_last_row_of_a_key_wins_when_an_earlier_one_is_late(
    run: Run, server: DictServer
) -> None:
    """A batch that has to be repeated is not overtaken by one that sets a key of it."""
    server.state.failures.extend([*HELLO, bare(grpc.StatusCode.UNAVAILABLE)])
    result = await run(load, "--batch-count", "1", stdin=b"k\tfirst\nk\tlast\n")
    assert result.exit_code == 0
    assert server.state.data[b"k"].value == b"last"


async def test_what_scan_prints_loads_again(run: Run, server: DictServer) -> None:
    """`scan --escaped --format raw` is what `load --escaped` reads: a round trip for any bytes."""
    await run(load, "--hex", stdin=b"00090aff5c\t5c6e0d0a00\n61\t\n")
    before = dict(server.state.data)
    printed = (await run(scan, "--escaped", "--format", "raw")).stdout_bytes
    server.state.data.clear()
    await run(load, "--escaped", stdin=printed)
    assert {k: e.value for k, e in server.state.data.items()} == {
        k: e.value for k, e in before.items()
    }


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"no tab\n", "has no TAB"),
        (b"a\tb\tc\n", "has 2 TABs"),
        (b"\tvalue\n", "1 to 65536 bytes, this one has 0"),
        (b"x" * 65_537 + b"\tv\n", "this one has 65537"),
        (b"\n", "has no TAB"),
    ],
)
async def test_bad_rows_are_refused_by_line(
    run: Run, server: DictServer, bad: bytes, problem: str
) -> None:
    """The first bad row ends the load with its line number; all rows before it are stored."""
    data = lines(5) + bad + b"after\tit\n"
    result = await run(load, "--batch-count", "2", stdin=data)
    assert result.exit_code == 2
    assert re.search(f"^Error: line 6: .*{problem}", result.stderr, re.MULTILINE)
    assert "Lines 1 to 5 are stored for certain" in result.stderr
    assert sorted(server.state.data) == [b"k0", b"k1", b"k2", b"k3", b"k4"]


async def test_a_bad_row_in_another_encoding_is_refused_by_line(run: Run) -> None:
    """A cell that is not what the flag says is a bad row as well."""
    result = await run(load, "--hex", stdin=b"61\t62\nzz\t63\n")
    assert result.exit_code == 2
    assert "line 2: 'zz' is not hexadecimal" in result.stderr
    assert "Line 1 is stored for certain" in result.stderr


async def test_server_errors_tell_how_far_it_got(run: Run, server: DictServer) -> None:
    """A refused batch ends the load: exit code, its lines, and the last line that is stored."""
    server.state.failures.extend([*HELLO, None, FENCED])
    result = await run(load, "--batch-count", "2", "--in-flight", "1", stdin=lines(9))
    assert result.exit_code == 4
    assert "Error: lines 3 to 4:" in result.stderr
    assert "Lines 1 to 2 are stored for certain. Loading again is safe." in result.stderr
    assert sorted(server.state.data) == [b"k0", b"k1"]


async def test_unknown_outcomes_are_not_called_stored(run: Run, server: DictServer) -> None:
    """Rows whose outcome is unknown are counted as such."""
    server.state.failures.extend([*HELLO, *[bare(grpc.StatusCode.UNAVAILABLE)] * 99])
    result = await run(load, "--in-flight", "1", "--timeout-ms", "2000", stdin=lines(3))
    assert result.exit_code == 11
    assert "No line is stored for certain, of 3 rows it is not known" in result.stderr


async def test_refused_fields_are_found_in_the_file(run: Run, server: DictServer) -> None:
    """When the server refuses one change of a batch, the message names its line."""
    server.state.failures.extend(
        [*HELLO, None, refusing(InvalidRequest("changes[1].put.value", "x"))]
    )
    result = await run(load, "--batch-count", "3", "--in-flight", "1", stdin=lines(6))
    assert result.exit_code == 2
    assert "Error: line 5: " in result.stderr


async def test_progress_goes_to_stderr(run: Run) -> None:
    """The bar is shown on demand, and leaves the totals on stdout alone."""
    result = await run(load, "--progress", stdin=lines(3))
    assert "3 rows" in result.stderr
    assert result.stdout.startswith("loaded 3 rows")


def test_only_a_gapless_beginning_is_certain() -> None:
    """Batches that are acknowledged out of order count once those before them are."""
    account = Account()
    account.acknowledge(rows_at(1, 4, 3))
    assert (account.position.line, account.rows_beyond) == (0, 3)
    account.acknowledge(rows_at(3, 9, 2))
    account.acknowledge(rows_at(0, 1, 3))
    assert (account.position.line, account.rows_beyond) == (6, 2)
    assert account.certain_rows == 6


async def test_one_row_is_told_as_one(run: Run) -> None:
    """A number agrees with its noun."""
    assert (await run(load, stdin=lines(1))).stdout.startswith("loaded 1 row, ")


async def test_formats_go_by_name_by_flag_and_by_looks(
    run: Run, server: DictServer, tmp_path: Path
) -> None:
    """However an input says what it is, compressed or not, the same pairs are stored."""
    data = {
        "tsv": b"k0\tv0\nk1\tv1\n",
        "csv": b"key,value\nk0,v0\nk1,v1\n",
        "ndjson": b'{"key":"k0","value":"v0"}\n{"key":"k1","value":"v1"}\n',
    }
    no_flags: list[str] = []
    named = [(f"rows.{name}", content, no_flags) for name, content in data.items()]
    flagged = [("rows", content, ["--input-format", name]) for name, content in data.items()]
    looked_at = [("rows", data[name], no_flags) for name in ("tsv", "ndjson")]
    for name, content, flags in [*named, *flagged, *looked_at]:
        for file, stored in ((name, content), (f"{name}.gz", gzip.compress(content))):
            path = tmp_path / file
            path.write_bytes(stored)
            server.state.data.clear()
            result = await run(load, str(path), *flags)
            assert result.exit_code == 0, (file, result.output)
            assert values(server) == {b"k0": b"v0", b"k1": b"v1"}
    server.state.data.clear()
    assert (await run(load, stdin=gzip.compress(data["ndjson"]))).exit_code == 0
    assert values(server) == {b"k0": b"v0", b"k1": b"v1"}


async def test_columns_and_time_to_live_are_taken_from_the_flags(
    run: Run, server: DictServer
) -> None:
    """--key-column, --value-column and --ttl hold for all rows."""
    rows = b"id,name,x\n1,ada,\n2,alan,\n"
    flags = ["--input-format", "csv", "--key-column", "id", "--value-column", "2", "--ttl", "10m"]
    result = await run(load, *flags, stdin=rows)
    assert result.exit_code == 0, result.output
    assert values(server) == {b"1": b"ada", b"2": b"alan"}
    (_, request) = server.state.requests
    assert {change.put.ttl_ms for change in request.changes} == {600_000}


async def test_damaged_gzip_is_told(run: Run, server: DictServer) -> None:
    """Rows before the damage are stored, and the end of the input is not taken for its end."""
    data = gzip.compress(lines(50_000), compresslevel=1)
    result = await run(load, stdin=data[: len(data) // 2])
    assert result.exit_code == 2
    assert "the input cannot be read" in result.stderr
    said = re.search(r"Lines 1 to ([\d,]+) are stored", result.stderr)
    assert said is not None
    assert len(server.state.data) == int(said.group(1).replace(",", "")) > 0


async def test_a_load_outlives_its_server(run: Run, server: DictServer) -> None:
    """Writes whose outcome is unknown are sent again, as long as --timeout-ms allows."""
    server.state.failures.extend([*HELLO, None, losing(), losing(), None, losing()])
    result = await run(load, "--batch-count", "1", "--in-flight", "2", stdin=lines(9))
    assert result.exit_code == 0, result.output
    assert values(server) == {b"k%d" % n: b"v%d" % n for n in range(9)}
    assert server.state.seq == 9  # each was applied once


async def test_a_server_that_is_not_there_is_told_at_once(run: Run, server: DictServer) -> None:
    """Patience begins when there was a server."""
    await server.stop()
    result = await run(load, "--timeout-ms", "3600000", stdin=lines(9))
    assert result.exit_code == 9
    assert "no connection to the server" in result.stderr


async def test_the_rate_is_sent_as_batches(run: Run, server: DictServer) -> None:
    """A rate makes batches small, so that rows flow instead of coming in bursts."""
    result = await run(load, "--rate", "10000000", "--batch-count", "7", stdin=lines(20))
    assert result.exit_code == 0
    assert server.state.calls["Write"] == 3
    result = await run(load, "--rate", "1000", stdin=lines(200))
    assert {len(request.changes) for request in server.state.requests[5:]} == {100}


def test_a_pace_is_kept_and_not_made_up_for() -> None:
    """Each batch waits for the time of those before it; what was lost is lost."""
    pace = Pace(rows_per_s=100)
    assert pace.wait_s(5.0, 50) == 0.0
    assert pace.wait_s(5.0, 50) == 0.5
    assert pace.wait_s(5.5, 10) == 0.5
    assert pace.wait_s(9.0, 10) == 0.0
    assert pace.wait_s(9.0, 10) == pytest.approx(0.1)
    assert (pace.batch_count_max(1_000), pace.batch_count_max(5), Pace(1).batch_count_max(9)) == (
        10,
        5,
        1,
    )


def values(server: DictServer) -> dict[bytes, bytes]:
    """What is stored."""
    return {key: entry.value for key, entry in server.state.data.items()}
