"""`shalekv load`: rows to batches, batches to the server, and what it says of a failure."""

from __future__ import annotations

import io
import re
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.keys import Encoding
from shalekv.cli.load import load
from shalekv.cli.loading import Account
from shalekv.cli.scan import scan
from shalekv.cli.tsv import BadRow, Rows, read_rows
from shalekv.errors import Fenced, InvalidRequest, QueueFull
from shalekv_client import Batch, Put
from tests.unit.cli_client.conftest import Run
from tests.unit.client.dict_server import DictServer, bare, refusing

FENCED = refusing(Fenced("another took over", own_epoch=1, newer_epoch=2))
FULL = refusing(QueueFull("full", retry_after_ms=60_000))


def lines(count: int) -> bytes:
    """Rows k0 to k(count-1)."""
    return b"".join(b"k%d\tv%d\n" % (number, number) for number in range(count))


def batches(data: bytes, *, count: int = 1_000, size: int = 1_000_000) -> list[list[bytes]]:
    """The keys of each batch that `data` is cut into."""
    source = io.BytesIO(data)
    found = read_rows(source, Encoding.TEXT, batch_count=count, batch_bytes=size)
    return [[change.key for change in rows.batch] for rows in found]


def rows_at(first_line: int, count: int) -> Rows:
    """A batch of `count` rows."""
    batch = Batch(Put(b"%d" % number, b"") for number in range(count))
    return Rows(batch, first_line, source_bytes=1)


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
    server.state.failures.extend([None, FENCED])
    result = await run(load, "--batch-count", "2", "--in-flight", "1", stdin=lines(9))
    assert result.exit_code == 4
    assert "Error: lines 3 to 4:" in result.stderr
    assert "Lines 1 to 2 are stored for certain. Loading again is safe." in result.stderr
    assert sorted(server.state.data) == [b"k0", b"k1"]


async def test_unknown_outcomes_are_not_called_stored(run: Run, server: DictServer) -> None:
    """Rows whose outcome is unknown are counted as such."""
    server.state.failures.append(bare(grpc.StatusCode.UNAVAILABLE))
    result = await run(load, "--in-flight", "1", stdin=lines(3))
    assert result.exit_code == 11
    assert "No line is stored for certain, of 3 rows it is not known" in result.stderr


async def test_refused_fields_are_found_in_the_file(run: Run, server: DictServer) -> None:
    """When the server refuses one change of a batch, the message names its line."""
    server.state.failures.extend([None, refusing(InvalidRequest("changes[1].put.value", "x"))])
    result = await run(load, "--batch-count", "3", "--in-flight", "1", stdin=lines(6))
    assert result.exit_code == 2
    assert "Error: line 5: " in result.stderr


async def test_progress_goes_to_stderr(run: Run) -> None:
    """The bar is shown on demand, and leaves the totals on stdout alone."""
    result = await run(load, "--progress", stdin=lines(3))
    assert "3 rows" in result.stderr
    assert result.stdout.startswith("loaded 3 rows")


def test_batches_are_cut_by_count_and_bytes() -> None:
    """A batch ends before it has too many rows or bytes; a large row stands alone."""
    data = b"a\t1\nb\t2\nc\t3\nlarge\t" + b"x" * 20 + b"\nd\t4\n"
    assert batches(data, count=2) == [[b"a", b"b"], [b"c", b"large"], [b"d"]]
    assert batches(data, size=10) == [[b"a", b"b", b"c"], [b"large"], [b"d"]]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_line_ends_do_not_belong_to_values(end: bytes) -> None:
    """LF, CRLF and a missing end of the last line give the same value."""
    source = io.BytesIO(b"k\tv" + end)
    (rows,) = read_rows(source, Encoding.TEXT, batch_count=10, batch_bytes=10)
    assert list(rows.batch) == [Put(b"k", b"v")]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(max_size=9)), max_size=30))
def test_rows_are_read_as_they_were_spelled(pairs: list[tuple[bytes, bytes]]) -> None:
    """Pairs written in hexadecimal come out in order, with consecutive line numbers."""
    source = io.BytesIO(b"".join(f"{k.hex()}\t{v.hex()}\n".encode() for k, v in pairs))
    found = list(read_rows(source, Encoding.HEX, batch_count=4, batch_bytes=25))
    changes = [change for rows in found for change in rows.batch]
    assert changes == [Put(key, value) for key, value in pairs]
    assert [rows.first_line for rows in found] == [
        1 + sum(len(rows.batch) for rows in found[:number]) for number in range(len(found))
    ]


def test_bad_rows_come_after_the_good_ones() -> None:
    """The rows before a bad one are yielded before it is raised."""
    found = read_rows(io.BytesIO(b"a\t1\nbad\n"), Encoding.TEXT, batch_count=9, batch_bytes=99)
    assert next(found).last_line == 1
    with pytest.raises(BadRow, match="line 2"):
        next(found)


def test_only_a_gapless_beginning_is_certain() -> None:
    """Batches that are acknowledged out of order count once those before them are."""
    account = Account()
    account.acknowledge(rows_at(4, 3))
    assert (account.stored_line, account.rows_beyond) == (0, 3)
    account.acknowledge(rows_at(9, 2))
    account.acknowledge(rows_at(1, 3))
    assert (account.stored_line, account.rows_beyond) == (6, 2)
