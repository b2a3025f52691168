"""Requests to the sources: options, formats and arguments, and the counts of statistics."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from shalekv.errors import InvalidRequest, InvalidSetting, InvalidUrl
from shalekv.protocol.entry import KeyRange, Kind
from shalekv_spark.place import Place, freeze_imports
from shalekv_spark.scanning import export
from shalekv_spark.scanning import scan as scanning
from shalekv_spark.scanning.export import export_parquet
from shalekv_spark.scanning.frames import snapshot_name
from shalekv_spark.scanning.scan import fields_of, scan
from shalekv_spark.scanning.source import (
    Prefixes,
    ScanSource,
    SnapshotReader,
    scan_request,
    stats_request,
)
from shalekv_spark.scanning.view import SnapshotPin

URL = "file:///data/db"


def test_options_are_read_whatever_their_case() -> None:
    """The case of options does not matter; `path` is the argument of ``load``."""
    given = {
        "PATH": URL,
        "keyencoding": "HEX",
        "START": "00ff",
        "prefix": "00",
        "Columns": "seq, key",
        "partitionBytes": "1000",
        "minPartitions": "3",
        "tailMemoryBytes": "0",
        "snapshotTtl": "60",
        "store.endpoint_url": "http://127.0.0.1:9",
    }
    request = scan_request(given)
    assert request.reading.place.url == URL
    assert request.reading.place.settings.endpoint_url == "http://127.0.0.1:9"
    assert request.reading.keys == KeyRange(b"\x00\xff", b"\x01")
    assert request.reading.columns == ("seq", "key")
    assert (request.reading.wanted.partition_bytes, request.reading.wanted.count_min) == (1_000, 3)
    assert (request.reading.tail_memory_bytes, request.ttl_s) == (0, 60)


def test_statistics_take_a_delimiter_in_the_encoding_of_keys() -> None:
    """Statistics accept a delimiter in the encoding of keys, but no columns."""
    request, prefixes = stats_request({"url": URL, "keyEncoding": "hex", "delimiter": "2f"})
    assert prefixes == Prefixes(0, b"/")
    assert request.reading.all_versions
    with pytest.raises(InvalidSetting, match="unknown option columns"):
        stats_request({"url": URL, "columns": "key"})
    with pytest.raises(InvalidSetting, match="prefixBytes and delimiter"):
        stats_request({"url": URL, "prefixBytes": "2", "delimiter": "/"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startKey": "a"}, "unknown option startkey; known are columns, end, keyEncoding"),
        ({"columns": "key,value,size"}, "option columns: expected some of key, value"),
        ({"columns": "key,key"}, "each once"),
        ({"columns": ""}, "option columns"),
        ({"partitionBytes": "64MiB"}, "option partitionBytes: expected a number from 1"),
        ({"partitionBytes": "0"}, "option partitionBytes"),
        ({"tailMemoryBytes": "-1"}, "option tailMemoryBytes: expected a number from 0"),
        ({"keyEncoding": "latin-1"}, "option keyEncoding: expected one of utf-8, hex, base64"),
        ({"keyEncoding": "hex", "start": "0g"}, "option start"),
        ({"keyEncoding": "base64", "end": "*"}, "option end"),
        ({"snapshotTtl": "0"}, "option snapshotTtl"),
        ({"snapshotTtl": "3600000"}, "option snapshotTtl: expected a number from 1 to 2592000"),
        ({"store.no_such": "1"}, "store.no_such"),
        ({"url": ""}, "option url is missing"),
        ({"paths": '["file:///a","file:///b"]'}, "option path: expected one"),
        ({"url": "memory://db"}, "cannot share what is in memory"),
    ],
)
def test_bad_option_is_named(given: dict[str, str], message: str) -> None:
    """An invalid option is named, with what is expected."""
    with pytest.raises(InvalidSetting, match=message):
        scan_request({"url": URL} | given)


def test_bad_url_is_refused() -> None:
    """An invalid URL is refused without a request to a store."""
    with pytest.raises(InvalidUrl):
        scan_request({"url": "nowhere"})


def test_schema_of_ones_own_is_refused() -> None:
    """A schema of the user is refused: Spark would not ask for that of the source, which
    pins the snapshot.
    """
    source = ScanSource({"url": URL})
    with pytest.raises(InvalidRequest, match="schema"):
        source.reader(StructType())


def test_reader_leaves_filters_to_spark() -> None:
    """The reader does not accept filters, since Spark would reuse its rows for another query."""
    assert SnapshotReader.pushFilters is DataSourceReader.pushFilters


def test_fields_follow_each_other() -> None:
    """Fields of a format follow each other; padding is no field, and bytes are one."""
    fields = fields_of("<2xHI4s2b")
    assert [(f.code, f.offset, f.width) for f in fields] == [
        ("H", 2, 2),
        ("I", 4, 4),
        ("s", 8, 4),
        ("b", 12, 1),
        ("b", 13, 1),
    ]


@pytest.mark.parametrize("layout", ["", "Q", ">", "=Q", ">d", ">Q ", ">Z", "utf-16", ">2x"])
def test_other_formats_are_refused(layout: str) -> None:
    """Formats without a byte order are refused, since their padding depends on the machine."""
    with pytest.raises(InvalidRequest, match="format"):
        fields_of(layout)


FOUND = SnapshotPin(b"f" * 16, 7, "nightly")


class _Scanned(Exception):
    """Raised with the snapshot that was to be scanned."""


@pytest.mark.parametrize("snapshot", ["nightly", FOUND.snapshot_id])
def test_an_export_reads_the_snapshot_whose_number_it_reports(
    monkeypatch: pytest.MonkeyPatch, snapshot: str | bytes
) -> None:
    """An export reads the snapshot whose seq it returns, even if its name is reused meanwhile."""

    async def find(place: Place, name: str) -> SnapshotPin:
        assert place.url == "file:///db"
        assert name in ("nightly", FOUND.snapshot_id.hex())
        return FOUND

    def scan(*_: object, **arguments: Any) -> None:
        raise _Scanned(arguments["snapshot"])

    monkeypatch.setattr(export, "_find", find)
    monkeypatch.setattr(export, "scan", scan)
    with pytest.raises(_Scanned) as scanned:
        export_parquet(cast("SparkSession", None), "file:///db", "/nowhere", snapshot=snapshot)
    assert scanned.value.args == (FOUND.snapshot_id,)


SPARK = cast("SparkSession", SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2)))


def test_one_column_may_be_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single column may be a text, and is not split into letters."""
    seen: list[str] = []

    def load(spark: SparkSession, source: str, options: Mapping[str, str], *_: Any) -> None:
        assert (spark, source) == (SPARK, "shalekv")
        seen.append(options["columns"])

    monkeypatch.setattr(scanning, "load", load)
    for columns in ("key", "key, seq", ["seq", "key"], ("value",)):
        scan(SPARK, "file:///db", columns=columns)
    assert seen == ["key", "key, seq", "seq,key", "value"]
    with pytest.raises(InvalidSetting, match="found 'size'"):
        scan(SPARK, "file:///db", columns="size")


@pytest.mark.parametrize("snapshot", [b"\x01" * 16, bytearray(b"\x01" * 16), "01" * 16])
def test_a_snapshot_has_many_forms(snapshot: bytes | str) -> None:
    """A snapshot may be given as any of its forms, also as a bytearray from rows of Spark."""
    assert snapshot_name(snapshot) == "01" * 16


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what `freeze_imports` has done, as in a new process."""
    freeze_imports.cache_clear()
    yield
    freeze_imports.cache_clear()


@pytest.mark.parametrize("is_reused", [True, False])
def test_only_where_tasks_follow_each_other_imports_are_taken_out_of_sight(
    monkeypatch: pytest.MonkeyPatch, *, is_reused: bool
) -> None:
    """Imports are frozen once, and only in workers that Spark reuses."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    if is_reused:
        monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    else:
        monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    freeze_imports()
    freeze_imports()
    assert frozen == [True] * is_reused


KEYS = [b"a/b/c", b"a/x", b"q", b"\xff\n\x00/y", b"/"]


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        (Prefixes(), [b""] * 5),
        (Prefixes(prefix_bytes=2), [b"a/", b"a/", b"q", b"\xff\n", b"/"]),
        (Prefixes(delimiter=b"/"), [b"a/", b"a/", b"", b"\xff\n\x00/", b"/"]),
        (Prefixes(delimiter=b"\xff"), [b"", b"", b"", b"\xff", b""]),
        (Prefixes(delimiter=b"b/"), [b"a/b/", b"", b"", b"", b""]),
        (Prefixes(delimiter=b"."), [b""] * 5),
    ],
)
def test_prefixes_of_any_bytes(prefixes: Prefixes, expected: list[bytes]) -> None:
    """Any byte in keys and delimiters means itself."""
    assert prefixes.of(pa.array(KEYS, pa.binary())).to_pylist() == expected


def test_versions_are_counted_by_what_they_are() -> None:
    """Only keys that a read sees count as keys; every stored version counts as a version."""
    put, tombstone = int(Kind.PUT), int(Kind.TOMBSTONE)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"a1", b"a1", b"a2", b"b"], pa.binary()),
            "value_bytes": pa.array([10, 20, 0, 5], pa.int32()),
            "kind": pa.array([put, put, tombstone, put], pa.uint8()),
            "is_live": pa.array([True, False, False, True]),
        }
    )
    assert Prefixes(prefix_bytes=1).count(batch).to_pylist() == [
        {"prefix": b"a", "keys": 1, "bytes": 12, "tombstones": 1, "versions": 3},
        {"prefix": b"b", "keys": 1, "bytes": 6, "tombstones": 0, "versions": 1},
    ]
