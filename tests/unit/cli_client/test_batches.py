"""Rows cut into batches, and the places in the input where a load can go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.keys import Encoding
from shalekv.cli.pairs.file_format import FileFormat
from shalekv.cli.pairs.lines import BadInput, Position
from shalekv.cli.pairs.reading import Reading
from shalekv_client import Put
from tests.unit.cli_client.inputs import batches, reading

CSV_ROWS = b'key,value\na,1\n"b\nb",2\nbad\n\nc,"3\r\n3"\nd,4\n'


def keys(data: bytes, *, count_max: int = 1_000, bytes_max: int = 1_000_000) -> list[list[bytes]]:
    """The keys of each batch that `data` is cut into."""
    found = batches(data, count_max=count_max, bytes_max=bytes_max)
    return [[put.key for put in rows.puts] for rows in found]


def test_batches_are_cut_by_count_and_bytes() -> None:
    """A batch ends before it has too many rows or bytes; a large row stands alone."""
    data = b"a\t1\nb\t2\nc\t3\nlarge\t" + b"x" * 20 + b"\nd\t4\n"
    assert keys(data, count_max=2) == [[b"a", b"b"], [b"c", b"large"], [b"d"]]
    assert keys(data, bytes_max=10) == [[b"a", b"b", b"c"], [b"large"], [b"d"]]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(max_size=9)), max_size=30))
def test_rows_are_read_as_they_were_spelled(pairs: list[tuple[bytes, bytes]]) -> None:
    """Pairs written in hexadecimal come out in order, with consecutive line numbers."""
    data = b"".join(f"{k.hex()}\t{v.hex()}\n".encode() for k, v in pairs)
    how = reading(FileFormat.TSV, encoding=Encoding.HEX)
    found = list(batches(data, how, count_max=4, bytes_max=25))
    assert [put for rows in found for put in rows.puts] == [Put(k, v) for k, v in pairs]
    assert [line for rows in found for line in rows.lines] == list(range(1, len(pairs) + 1))
    assert [rows.number for rows in found] == list(range(len(found)))


def test_bad_rows_come_after_the_good_ones() -> None:
    """The rows before a bad one are yielded before it is raised."""
    found = iter(batches(b"a\t1\nbad\n"))
    assert next(found).last_line == 1
    with pytest.raises(BadInput, match="line 2"):
        next(found)


def test_bad_rows_fill_batches_too() -> None:
    """Collected bad rows count for the limits, so that an input of nothing else takes no memory."""
    found = list(batches(b"bad\n" * 10, count_max=3, bad_rows_end_it=False))
    assert [len(rows.bad) for rows in found] == [3, 3, 3, 1]
    found = list(batches(b"bad\n" * 10, bytes_max=7, bad_rows_end_it=False))
    assert [len(rows.bad) for rows in found] == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b"a\t1\nb\t2\r\nbad\nc\t3", reading(FileFormat.TSV)),
        (CSV_ROWS, reading(FileFormat.CSV)),
        (b'{"key":"a","value":"1"}\nbad\n\n{"key":"b","value":"2"}\n', reading(FileFormat.NDJSON)),
    ],
)
def test_every_batch_ends_where_the_next_load_can_begin(data: bytes, how: Reading) -> None:
    """Reading from the end of any batch gives exactly what comes after it, with its lines."""
    whole = list(batches(data, how, count_max=1, bad_rows_end_it=False))
    assert whole[0].begin == Position()
    for number, rows in enumerate(whole):
        rest = batches(data, how, count_max=1, begin=rows.end, bad_rows_end_it=False)
        expected = [(r.puts, r.lines, r.bad, r.end) for r in whole[number + 1 :]]
        assert [(r.puts, r.lines, r.bad, r.end) for r in rest] == expected


def test_a_row_that_is_taken_out_becomes_a_bad_one() -> None:
    """What the server refuses is told by its line and key, among the other bad rows."""
    (rows,) = batches(b"a\t1\nbad\nb\t22\nbad\n", bad_rows_end_it=False)
    left = rows.without(1, "too large")
    assert (left.puts, left.lines, left.size_bytes) == ([Put(b"a", b"1")], [1], 2)
    assert [(bad.line, bad.row) for bad in left.bad] == [(2, b"bad"), (3, b"b"), (4, b"bad")]
    assert left.bad[1].problem == "too large"
