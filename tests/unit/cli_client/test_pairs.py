"""Rows in TSV, CSV and NDJSON, and their batches."""

from __future__ import annotations

import io
from collections.abc import Iterable

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.console.keys import Encoding
from shalekv.cli.load.batches import BatchLimits, RowBatch
from shalekv.cli.load.formats import FileFormat, NotWritable, format_of_name, header, row_writer
from shalekv.cli.load.lines import BadInput, BadRow, ColumnChoice, InputPosition
from shalekv.cli.load.source import InputOptions, InputSource, read_batches
from shalekv_client import Entry, Put

NOW_MS = 1_000_000


def batches(
    data: bytes,
    reading: InputOptions | None = None,
    *,
    count_max: int = 1_000,
    bytes_max: int = 1_000_000,
    begin: InputPosition | None = None,
    stop_at_bad_row: bool = True,
) -> Iterable[RowBatch]:
    return read_batches(
        InputSource(io.BytesIO(data)),
        reading or InputOptions(),
        BatchLimits(count_max, bytes_max),
        now_ms=lambda: NOW_MS,
        begin=begin,
        stop_at_bad_row=stop_at_bad_row,
    )


def rows_of(data: bytes, reading: InputOptions) -> tuple[list[Put], list[BadRow]]:
    found = list(batches(data, reading, stop_at_bad_row=False))
    return [put for rows in found for put in rows.puts], [bad for r in found for bad in r.bad]


def reading(
    file_format: FileFormat,
    key: str | None = None,
    value: str | None = None,
    *,
    header: bool | None = None,
    encoding: Encoding = Encoding.TEXT,
) -> InputOptions:
    return InputOptions(file_format, ColumnChoice(key, value, header, encoding))


TSV, CSV, NDJSON = FileFormat.TSV, FileFormat.CSV, FileFormat.NDJSON
KEYS = st.binary(min_size=1, max_size=12)
VALUES = st.binary(max_size=12)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=8), st.sampled_from(Encoding))
@pytest.mark.parametrize("file_format", [CSV, NDJSON])
def test_what_is_written_is_read_again(
    file_format: FileFormat, pairs: list[tuple[bytes, bytes]], encoding: Encoding
) -> None:
    """CSV and NDJSON keep every byte of every pair, in every encoding."""
    entries = [Entry(key, value, 1, None) for key, value in pairs]
    data = header(file_format) + row_writer(file_format, encoding)(entries)
    said = Encoding.TEXT if file_format is NDJSON else encoding  # NDJSON names its encodings
    found, bad = rows_of(data, reading(file_format, encoding=said))
    assert (found, bad) == ([Put(key, value) for key, value in pairs], [])


@given(st.lists(st.tuples(KEYS, VALUES), max_size=8), st.sampled_from(Encoding))
def test_tsv_is_read_again_or_refused(pairs: list[tuple[bytes, bytes]], encoding: Encoding) -> None:
    """TSV keeps every byte, or refuses a pair with a separator in text."""
    entries = [Entry(key, value, 1, None) for key, value in pairs]
    try:
        data = row_writer(TSV, encoding)(entries)
    except NotWritable:
        assert encoding is Encoding.TEXT
        assert any(
            b"\t" in key + value or b"\n" in key + value or value[-1:] == b"\r"
            for key, value in pairs
        )
        return
    found, bad = rows_of(data, reading(TSV, encoding=encoding))
    assert (found, bad) == ([Put(key, value) for key, value in pairs], [])


@pytest.mark.parametrize("key", [b"\x1f\x8b", b"\x1f\x8b\x08"])
def test_text_that_begins_as_gzip_does_is_text(key: bytes) -> None:
    """A key may begin with bytes of the magic number of gzip."""
    assert rows_of(key + b"\tv\n", reading(TSV)) == ([Put(key, b"v")], [])


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b"key,value\nk,v\n", reading(CSV)),
        (b"id,value,key\n1,v,k\n", reading(CSV)),
        (b"k,v\n", reading(CSV, header=False)),
        (b"x,v,k\n", reading(CSV, "3", "2")),
        (b"a,b,c\nx,v,k\n", reading(CSV, "c", "b")),
        (b"a,b\nk,v\n", reading(CSV, "1", "2", header=True)),
        (b"\xef\xbb\xbfkey,value\r\nk,v\r\n", reading(CSV)),
        (b'key,value\n"k","v"\n', reading(CSV)),
        (b"key_hex,value_base64\n6b,dg==\n", reading(CSV)),
        (b"k\tv\n", reading(TSV)),
        (b"x\tv\tk\n", reading(TSV, "3", "2")),
        (b"value\tkey\nv\tk\n", reading(TSV, header=True)),
        (b"name\tid\nv\tk\n", reading(TSV, "id", "name")),
        (b'{"key":"k","value":"v"}\n', reading(NDJSON)),
        (b'{"key_hex":"6b","value_base64":"dg=="}\n', reading(NDJSON)),
        (b'{"key_escaped":"\\\\x6b","value":"v"}\n', reading(NDJSON, encoding=Encoding.TEXT)),
        (b'{"key":"6b","value":"76"}\n', reading(NDJSON, encoding=Encoding.HEX)),
        (b'\xef\xbb\xbf{"a":"k","b":"v","key":1}\n', reading(NDJSON, "a", "b")),
        (b'\n{"key":"k","value":"v"}\n  \n', reading(NDJSON)),
    ],
)
def test_columns(data: bytes, how: InputOptions) -> None:
    """Columns are chosen by name in a header, or by number; suffixes of names give encodings."""
    assert rows_of(data, how) == ([Put(b"k", b"v")], [])


@pytest.mark.parametrize(
    ("data", "how", "problem"),
    [
        (b"id,name\n", reading(CSV), "line 1: there is no column 'key'; the header has: id, name"),
        (b"", reading(CSV), "no column 'key'"),
        (b"a\tb\n", reading(TSV, "id", "name"), "no column 'id'"),
        (b"a\tb\n", reading(TSV, "id", "2", header=False), "need a header"),
    ],
)
def test_headers_that_lack_a_column_end_it(data: bytes, how: InputOptions, problem: str) -> None:
    """A header without a chosen column is an error."""
    with pytest.raises(BadInput, match=problem):
        list(batches(data, how))


@pytest.mark.parametrize(
    ("data", "how", "line", "problem"),
    [
        (b"a\tb\nx\n", reading(TSV), 2, "a TAB and a value; this has no TAB: 'x'"),
        (b"a\tb\tc\n", reading(TSV), 1, "this has 2 TABs"),
        (b"a\tb\n", reading(TSV, "3", "2"), 1, "a row has 3 columns here; this has 2"),
        (b"\tb\n", reading(TSV), 1, "a key has 1 to 65536 bytes, this one has 0"),
        (b"zz\tb\n", reading(TSV, encoding=Encoding.HEX), 1, "'zz' is not hexadecimal"),
        (b"key,value\na\n", reading(CSV), 2, "a row has 2 columns here; this has 1"),
        (b'key,value\n"a"b,c\n', reading(CSV), 2, "it is not CSV"),
        (b'key,value\n"a\nb",c\n"x,y\n', reading(CSV), 4, "it is not CSV"),
        (b"{}\n", reading(NDJSON), 1, "it has no 'key'"),
        (b'{"key":"k","value":null}\n', reading(NDJSON), 1, "it has no 'value'"),
        (b"[1]\n", reading(NDJSON), 1, "it is not a JSON object"),
        (b"{\n", reading(NDJSON), 1, "it is not JSON"),
        (b"[" * 100_000 + b"\n", reading(NDJSON), 1, "recursion"),
        (b'{"key":"\xff"}\n', reading(NDJSON), 1, "it is not UTF-8"),
        (b'{"key":"\\ud800","value":""}\n', reading(NDJSON), 1, "surrogate"),
        (b'{"key_hex":1,"value":""}\n', reading(NDJSON), 1, "'key_hex' is no text in hex"),
        (b'{"key":"k","value":"","expire_at_ms":"x"}\n', reading(NDJSON), 1, "no number of milli"),
    ],
)
def test_bad_rows_have_line_and_problem(
    data: bytes, how: InputOptions, line: int, problem: str
) -> None:
    """A bad row has its line, the problem, and the bytes of the row."""
    _, (bad,) = rows_of(data, how)
    assert bad.line == line
    assert problem in bad.problem
    assert bad.row == data.split(b"\n", line - 1)[-1].rstrip(b"\n")


def test_good_rows_around_bad_ones_are_read() -> None:
    """A bad row of CSV does not affect the next row."""
    data = b'key,value\na,1\n"x"y,2\nb,"two\nlines"\n\nc,3\n'
    found, (bad,) = rows_of(data, reading(CSV))
    assert found == [Put(b"a", b"1"), Put(b"b", b"two\nlines"), Put(b"c", b"3")]
    assert bad.line == 3
    (rows,) = batches(data, reading(CSV), stop_at_bad_row=False)
    assert rows.lines == [2, 4, 7]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ('"text"', b"text"),
        ("17", b"17"),
        ("true", b"true"),
        ('{"a": [1, "\u03b1"]}', '{"a":[1,"\u03b1"]}'.encode()),
        ('""', b""),
    ],
)
def test_values_of_ndjson_that_are_not_text(value: str, stored: bytes) -> None:
    """A number becomes its digits, and nested values their compact JSON."""
    data = f'{{"key": 5, "value": {value}}}\n'.encode()
    assert rows_of(data, reading(NDJSON)) == ([Put(b"5", stored)], [])


@pytest.mark.parametrize(
    ("expire_at_ms", "ttl_ms"), [(None, 0), (NOW_MS + 50, 50), (NOW_MS, 1), (NOW_MS - 99, 1)]
)
def test_expiry_is_kept(expire_at_ms: int | None, ttl_ms: int) -> None:
    """A pair keeps the expiry of its row; an expired one expires at once."""
    entry = Entry(b"k", b"v", 1, expire_at_ms)
    data = row_writer(NDJSON, Encoding.TEXT)([entry])
    assert rows_of(data, reading(NDJSON)) == ([Put(b"k", b"v", ttl_ms)], [])
    assert rows_of(data, InputOptions(NDJSON, ttl_ms=7)) == ([Put(b"k", b"v", 7)], [])


@pytest.mark.parametrize(
    ("name", "file_format"),
    [
        ("a.tsv", TSV),
        ("a.CSV", CSV),
        ("a.b.ndjson", NDJSON),
        ("a.jsonl.gz", NDJSON),
        ("a.csv.GZ", CSV),
        ("csv", None),
        ("a.gz", None),
        ("a.2026-11-27", None),
        ("a.1", None),
        ("v1.0/a", None),
        (".parquet", None),
        ("<stdin>", None),
        ("", None),
    ],
)
def test_names_determine_formats(name: str, file_format: FileFormat | None) -> None:
    """The extension of a file name gives the format, before the one of gzip."""
    assert format_of_name(name, "--input-format") is file_format


@pytest.mark.parametrize("name", ["a.parquet", "x/a.TXT", "a.parquet.gz", "a.tsv.zst", "a.csv.7z"])
def test_an_unknown_extension_is_refused(name: str) -> None:
    """A file of another format is not taken for text; the error has the flag that overrides it."""
    with pytest.raises(click.UsageError, match=r"known format.*\.tsv, .*\.gz.*use --input-format"):
        format_of_name(name, "--input-format")


CSV_ROWS = b'key,value\na,1\n"b\nb",2\nbad\n\nc,"3\r\n3"\nd,4\n'


def keys(data: bytes, *, count_max: int = 1_000, bytes_max: int = 1_000_000) -> list[list[bytes]]:
    """The keys of each batch of `data`."""
    found = batches(data, count_max=count_max, bytes_max=bytes_max)
    return [[put.key for put in rows.puts] for rows in found]


def test_batches_are_cut_by_count_and_bytes() -> None:
    """A batch ends before it exceeds a limit; a large row is a batch of its own."""
    data = b"a\t1\nb\t2\nc\t3\nlarge\t" + b"x" * 20 + b"\nd\t4\n"
    assert keys(data, count_max=2) == [[b"a", b"b"], [b"c", b"large"], [b"d"]]
    assert keys(data, bytes_max=10) == [[b"a", b"b", b"c"], [b"large"], [b"d"]]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(max_size=9)), max_size=30))
def test_rows_are_read_as_they_were_spelled(pairs: list[tuple[bytes, bytes]]) -> None:
    """Pairs in hexadecimal are read in order, with consecutive line numbers."""
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
    """Collected bad rows count for the limits, so that memory is bounded."""
    found = list(batches(b"bad\n" * 10, count_max=3, stop_at_bad_row=False))
    assert [len(rows.bad) for rows in found] == [3, 3, 3, 1]
    found = list(batches(b"bad\n" * 10, bytes_max=7, stop_at_bad_row=False))
    assert [len(rows.bad) for rows in found] == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b"a\t1\nb\t2\r\nbad\nc\t3", reading(FileFormat.TSV)),
        (CSV_ROWS, reading(FileFormat.CSV)),
        (b'{"key":"a","value":"1"}\nbad\n\n{"key":"b","value":"2"}\n', reading(FileFormat.NDJSON)),
    ],
)
def test_every_batch_ends_where_the_next_load_can_begin(data: bytes, how: InputOptions) -> None:
    """Reading from the end of any batch gives the remaining rows with their lines."""
    whole = list(batches(data, how, count_max=1, stop_at_bad_row=False))
    assert whole[0].begin == InputPosition()
    for number, rows in enumerate(whole):
        rest = batches(data, how, count_max=1, begin=rows.end, stop_at_bad_row=False)
        expected = [(r.puts, r.lines, r.bad, r.end) for r in whole[number + 1 :]]
        assert [(r.puts, r.lines, r.bad, r.end) for r in rest] == expected


def test_a_row_that_is_taken_out_becomes_a_bad_one() -> None:
    """A row refused by the server becomes a bad row with line and key."""
    (rows,) = batches(b"a\t1\nbad\nb\t22\nbad\n", stop_at_bad_row=False)
    left = rows.without(1, "too large")
    assert (left.puts, left.lines, left.size_bytes) == ([Put(b"a", b"1")], [1], 2)
    assert [(bad.line, bad.row) for bad in left.bad] == [(2, b"bad"), (3, b"b"), (4, b"bad")]
    assert left.bad[1].problem == "too large"
