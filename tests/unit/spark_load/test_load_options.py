"""What a load is told, and what its frame looks like: refused before anything begins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql.types import (
    BinaryType,
    DateType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from shalekv.errors import InvalidRequest, InvalidSetting, InvalidUrl, ShaleError
from shalekv_spark.loading.options import LoadPlan
from shalekv_spark.loading.sink import check_name

URL = "file:///nowhere"
PAIRS = [StructField("key", BinaryType()), StructField("value", BinaryType())]

BAD_OPTIONS: list[tuple[dict[str, Any], type[ShaleError], str]] = [
    ({"on_duplicates": "error"}, InvalidSetting, "unknown option on_duplicates; known are commit"),
    ({"on_duplicate": "newest"}, InvalidRequest, "greatest:<column> or least:<column>, found 'new"),
    ({"on_duplicate": "least:"}, InvalidRequest, "found 'least:'"),
    ({"presorted": True, "on_duplicate": "least:n"}, InvalidSetting, "presorted: "),
    ({"presorted": True, "partitions": 2}, InvalidSetting, "presorted: "),
    ({"partitions": 0}, InvalidSetting, "partitions: expected 1 or more, found 0"),
    ({"writer": "nowhere"}, InvalidSetting, "writer: "),
    ({"writer": ""}, InvalidSetting, "writer: "),
    ({"lease_ttl_s": 9}, InvalidSetting, "lease_ttl_s: expected 10 or more"),
    ({"commit_timeout_s": 0}, InvalidSetting, "commit_timeout_s: "),
    ({"value_bytes_max": 0}, InvalidSetting, "value_bytes_max: "),
    ({"levels": {"sst_byte": 1}}, InvalidSetting, "sst_byte: "),
    ({"store": {"endpoint": "x"}}, InvalidSetting, "store.endpoint: "),
]

BAD_FRAMES = [
    (
        [StructField("k", BinaryType()), PAIRS[1]],
        {},
        "key: there is no column 'key'; the frame has",
    ),
    ([PAIRS[0]], {}, "value: there is no column 'value'"),
    ([*PAIRS, PAIRS[0]], {}, "key: there is 2 columns 'key'"),
    (
        [StructField("key", IntegerType()), PAIRS[1]],
        {},
        "column 'key' is of type int, expected bin",
    ),
    ([*PAIRS, StructField("op", IntegerType())], {}, "column 'op' is of type int, expected string"),
    ([*PAIRS, StructField("expire_at", DateType())], {}, "is of type date, expected timestamp"),
    ([*PAIRS, StructField("expire_at", TimestampNTZType())], {}, "timestamp_ntz, expected time"),
    ([*PAIRS, StructField("extra", DateType())], {}, "columns: no part of a load: extra. Select"),
    ([*PAIRS, StructField("op", StringType())], {"op": ""}, "no part of a load: op"),
    (PAIRS, {"op": "kind"}, "op: there is no column 'kind'"),
    (PAIRS, {"expire_at": "until"}, "expire_at: there is no column 'until'"),
    (PAIRS, {"on_duplicate": "greatest:seq"}, "on_duplicate: there is no column 'seq'"),
    (PAIRS, {"value": "key"}, "columns: key, key: a column is named twice"),
    (
        [*PAIRS, StructField("m", MapType(StringType(), StringType()))],
        {"on_duplicate": "least:m"},
        "column 'm' is of type map<string,string>, expected with an order",
    ),
]


@pytest.mark.parametrize(("options", "kind", "told"), BAD_OPTIONS, ids=[e[2] for e in BAD_OPTIONS])
def test_an_option_that_will_not_do_is_named(
    options: dict[str, Any], kind: type[ShaleError], told: str
) -> None:
    """Nothing is asked of a store or of Spark for that."""
    with pytest.raises(kind, match=re.escape(told)):
        LoadPlan.of(URL, options)  # type: ignore[arg-type]


def test_a_url_that_is_none_is_refused() -> None:
    """So is one of a database in memory, which tasks could not see."""
    with pytest.raises(InvalidUrl):
        LoadPlan.of("nowhere", {})
    with pytest.raises(InvalidSetting, match="memory"):
        LoadPlan.of("memory://here", {})


@pytest.mark.parametrize(("fields", "options", "told"), BAD_FRAMES, ids=[e[2] for e in BAD_FRAMES])
def test_a_frame_that_is_no_load_is_refused(
    fields: list[StructField], options: dict[str, Any], told: str
) -> None:
    """The error names the column and what the load needs."""
    plan = LoadPlan.of(URL, options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        plan.schema_of(StructType(fields))


def test_columns_may_have_any_name() -> None:
    """Those that are not named are found by their usual names, and the rule's by its own."""
    fields = [
        StructField("a.b", StringType()),
        StructField("`", StringType()),
        StructField("op", StringType()),
        StructField("expire_at", TimestampType()),
        StructField("n", IntegerType()),
    ]
    plan = LoadPlan.of(URL, {"key": "a.b", "value": "`", "on_duplicate": "greatest:n"})
    schema = plan.schema_of(StructType(fields))
    assert (schema.op, schema.expire_at) == ("op", "expire_at")
    assert schema.rule is not None
    assert schema.rule.is_greatest


@pytest.mark.parametrize("name", ["", "shalekv:x", "a\nb", "a/b", "n" * 236, "\ud800"], ids=ascii)
def test_a_stream_cannot_have_every_name(name: str) -> None:
    """It becomes part of the ids of its batches, and of the path of a checkpoint."""
    with pytest.raises(InvalidRequest, match=r"^name: "):
        check_name(name)


def test_a_stream_may_have_the_longest_name() -> None:
    """The id of its last batch fits beside it."""
    check_name("n" * 235)
