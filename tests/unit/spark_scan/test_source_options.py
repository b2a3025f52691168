"""What the options of the sources mean, and what is refused before anything is read."""

from __future__ import annotations

import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from shalekv.core.key_range import KeyRange
from shalekv.errors import InvalidRequest, InvalidSetting, InvalidUrl
from shalekv_spark.scanning.prefixes import Prefixes
from shalekv_spark.scanning.source import ScanSource, SnapshotReader, scan_request, stats_request

URL = "file:///data/db"


def test_options_are_read_whatever_their_case() -> None:
    """As Spark has it; `path` is what ``load`` is given."""
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
    """And no columns, which are theirs to choose."""
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
    """With what would be right."""
    with pytest.raises(InvalidSetting, match=message):
        scan_request({"url": URL} | given)


def test_bad_url_is_refused() -> None:
    """Before anybody asks a store."""
    with pytest.raises(InvalidUrl):
        scan_request({"url": "nowhere"})


def test_schema_of_ones_own_is_refused() -> None:
    """Spark would not ask for the source's, with which the snapshot is made."""
    source = ScanSource({"url": URL})
    with pytest.raises(InvalidRequest, match="schema"):
        source.reader(StructType())


def test_reader_leaves_filters_to_spark() -> None:
    """Spark would give the rows of one query to another: see the module."""
    assert SnapshotReader.pushFilters is DataSourceReader.pushFilters
