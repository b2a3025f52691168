"""Rows of a load: which are refused, with which error, and which row of a key is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa
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
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns, Section
from shalekv.format.sst_writer import EncodedBlock, FinishedSst, SstWriter
from shalekv_spark.loading.options import LoadPlan
from shalekv_spark.loading.rows import EXPIRE_AT, PointRows
from shalekv_spark.loading.sink import check_name
from shalekv_spark.loading.task import BlockEncoder
from tests.kit.samples import LEVEL_NAME, properties
from tests.unit.spark_load.loads import Row, batch_of, batches_of, taken

REFUSED = [
    ([Row(None), Row(b"a")], "partition 3, row 0: the key is null"),
    ([Row(b""), Row(b"a")], "partition 3, row 0: a key must not be empty"),
    ([Row(b"a"), Row(b"b" * 9)], "row 1: key b'bbbbbbbbb': 9 bytes, and a key has 8 at most"),
    ([Row(b"b"), Row(b"a")], "row 1: the partition is not sorted: key b'a' comes after b'b'"),
    ([Row(b"a"), Row(b"a")], "row 1: key b'a' occurs twice"),
    ([Row(b"a", None)], "key b'a': the value of a put is null"),
    ([Row(b"a", bytes(17))], "key b'a': a value of 17 bytes, and a value has 16 at most"),
    ([Row(b"a", op=None)], "key b'a': op is null, expected put or delete"),
    ([Row(b"a"), Row(b"b", op="PUT")], "key b'b': op is 'PUT', expected put or delete"),
]


@pytest.mark.parametrize(("rows", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_row_that_cannot_be_loaded_is_named(rows: list[Row], message: str) -> None:
    """A refused row is named by partition and key, with the rows in one batch or in two."""
    for sizes in ([], [1]):
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            taken(batches_of(rows, sizes))


def test_a_delete_needs_neither_value_nor_expiry_and_has_none() -> None:
    """Value and expiry of a delete are ignored."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    rows = [Row(b"a", None, "delete", moment), Row(b"b", bytes(99), "delete"), Row(b"c", b"1")]
    (found,) = taken([batch_of(rows, large=True)])
    assert found.values.to_pylist() == [b"", b"", b"1"]
    assert found.kinds is not None
    assert found.kinds.tolist() == [2, 2, 1]
    assert found.expire_at_ms is not None
    assert found.expire_at_ms.tolist() == [0, 0, 0]


def test_times_become_milliseconds_and_never_no_time() -> None:
    """Times are rounded down to milliseconds; times before 1970 become the earliest expiry."""
    times = [
        datetime(1970, 1, 1, 0, 0, 1, 2_999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(1900, 1, 1, tzinfo=UTC),
        None,
    ]
    rows = [Row(b"%d" % at, expire_at=time) for at, time in enumerate(times)]
    (found,) = taken([batch_of(rows)])
    assert found.expire_at_ms is not None
    assert found.expire_at_ms.tolist() == [1_002, 1, 1, 0]


def test_of_rows_with_one_key_the_first_is_loaded() -> None:
    """The first of several rows with one key is loaded, wherever batches end."""
    random = Random(7)
    rows, winners = [], []
    for number in range(60):
        key = b"%04d" % number
        count = random.randint(1, 6)
        orders = [9, *sorted((random.randint(1, 4) for _ in range(count - 1)), reverse=True)]
        rows += [Row(key, b"%d" % at, order=order) for at, order in enumerate(orders)]
        winners.append(key)
    for _ in range(50):
        sizes = [random.randint(0, 7) for _ in range(random.randint(0, 40))]
        found = taken(batches_of(rows, sizes), has_rule=True)
        assert [key for part in found for key in part.keys.to_pylist()] == winners
        assert {value for part in found for value in part.values.to_pylist()} == {b"0"}


@pytest.mark.parametrize("order", [1, None, math.nan])
def test_two_rows_that_the_rule_does_not_distinguish_are_refused(order: float | None) -> None:
    """Two different rows with equal order values are refused; nulls, and NaN, are equal,
    and identical rows count as one.
    """
    same = Row(b"b", b"1", order=order)
    rows = [Row(b"a", order=5), same, same, same, Row(b"c", order=5)]
    for sizes in ([], [2], [1, 1, 1, 1], [3]):
        found = taken(batches_of(rows, sizes), has_rule=True)
        assert [key for part in found for key in part.keys.to_pylist()] == [b"a", b"b", b"c"]
        for at, other in ((2, same._replace(value=b"2")), (3, same._replace(op="delete"))):
            changed = [*rows[:at], other, *rows[at + 1 :]]
            with pytest.raises(InvalidRequest, match="key b'b' occurs twice, and on_duplicate"):
                taken(batches_of(changed, sizes), has_rule=True)


@pytest.mark.parametrize("zone", ["UTC", "GMT+08:00", "PST"])
def test_rows_are_compared_in_every_zone_that_spark_knows(zone: str) -> None:
    """Rows are compared also by times and zones that Python does not have."""
    for microseconds in (1, 10**18):
        batch = batch_of([Row(b"a", order=1), Row(b"a", order=1)])
        at = batch.schema.get_field_index(EXPIRE_AT)
        times = pa.array([microseconds] * 2, pa.timestamp("us", zone))
        (found,) = taken([batch.set_column(at, EXPIRE_AT, times)], has_rule=True)
        assert found.keys.to_pylist() == [b"a"]
        others = pa.array([microseconds, microseconds + 1], pa.timestamp("us", zone))
        with pytest.raises(InvalidRequest, match="key b'a' occurs twice, and on_duplicate"):
            taken([batch.set_column(at, EXPIRE_AT, others)], has_rule=True)


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
    ([*PAIRS, StructField("extra", DateType())], {}, "columns: not used by a load: extra. Select"),
    ([*PAIRS, StructField("op", StringType())], {"op": ""}, "not used by a load: op"),
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


@pytest.mark.parametrize(
    ("options", "kind", "message"), BAD_OPTIONS, ids=[e[2] for e in BAD_OPTIONS]
)
def test_an_option_that_will_not_do_is_named(
    options: dict[str, Any], kind: type[ShaleError], message: str
) -> None:
    """An invalid option is named, without a request to a store or to Spark."""
    with pytest.raises(kind, match=re.escape(message)):
        LoadPlan.of(URL, options)  # type: ignore[arg-type]


def test_a_url_that_is_none_is_refused() -> None:
    """An invalid URL is refused, as is one of a database in memory, which tasks cannot read."""
    with pytest.raises(InvalidUrl):
        LoadPlan.of("nowhere", {})
    with pytest.raises(InvalidSetting, match="memory"):
        LoadPlan.of("memory://here", {})


@pytest.mark.parametrize(
    ("fields", "options", "message"), BAD_FRAMES, ids=[e[2] for e in BAD_FRAMES]
)
def test_a_frame_that_is_no_load_is_refused(
    fields: list[StructField], options: dict[str, Any], message: str
) -> None:
    """An unsuitable frame is refused; the error names the column and what the load needs."""
    plan = LoadPlan.of(URL, options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        plan.schema_of(StructType(fields))


def test_columns_may_have_any_name() -> None:
    """Columns may have any name; those that are not named are found by their usual names."""
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
    """A name is refused that cannot be part of load ids, or of the path of a checkpoint."""
    with pytest.raises(InvalidRequest, match=r"^name: "):
        check_name(name)


def test_a_stream_may_have_the_longest_name() -> None:
    """The longest name leaves space for the id of the last batch."""
    check_name("n" * 235)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def writer(codec: Codec, block_bytes: int, filter_bits: int | None) -> SstWriter:
    own = properties(LEVEL_NAME)
    return SstWriter(own, block_bytes=block_bytes, codec=codec, filter_bits_per_key=filter_bits)


def by_rows(sst: SstWriter, parts: list[PointRows]) -> FinishedSst:
    """Return the SST as the server's own code writes it, all rows at once."""
    keys = [key for part in parts for key in part.keys.to_pylist()]
    values = [value for part in parts for value in part.values.to_pylist()]
    kinds: list[int] = []
    times: list[int] = []
    for part in parts:
        count = len(part.keys)
        kinds += [1] * count if part.kinds is None else part.kinds.tolist()
        times += [0] * count if part.expire_at_ms is None else part.expire_at_ms.tolist()
    sst.add(Section.POINTS, Columns(keys, [0] * len(keys), bytes(kinds), values, times))
    return sst.finish()


def random_rows(random: Random) -> Iterator[Row]:
    """Draw rows by key; some stretches have deletes or expiries, others have none."""
    for number in range(random.randint(1, 300)):
        mixed = number // 50 % 2
        yield Row(
            b"%06d" % number + b"k" * random.randint(0, 2),
            random.randbytes(random.choice((0, 3, 16))),
            "delete" if mixed and random.random() < 0.2 else "put",
            EPOCH + timedelta(milliseconds=random.randint(1, 10**12))
            if mixed and random.random() < 0.5
            else None,
        )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD])
def test_the_bytes_are_those_of_the_servers_code(codec: Codec) -> None:
    """Blocks have the bytes of the server's code for any rows, sizes of blocks and ends of
    batches.
    """
    for seed in range(60):
        random = Random(seed)
        rows = [*random_rows(random)]
        sizes = [random.randint(1, 80) for _ in range(random.randint(0, 6))]
        parts = taken(batches_of(rows, sizes))
        block_bytes = random.choice((1, 40, 300, 100_000))
        filter_bits = random.choice((None, 10))
        sst = writer(codec, block_bytes, filter_bits)
        encoder = BlockEncoder(
            block_bytes=block_bytes, codec=codec, has_filter=filter_bits is not None
        )
        for part in parts:
            for block in encoder.add(part):
                sst.add_block(block)
        for block in encoder.finish():
            sst.add_block(block)
        expected = writer(codec, block_bytes, filter_bits)
        assert sst.finish() == by_rows(expected, parts), f"seed {seed}"
        assert sst.first_expiry_ms == expected.first_expiry_ms, f"seed {seed}"


def test_a_block_out_of_order_is_refused() -> None:
    """A writer refuses a block below its last key, after single rows, or after another section."""
    parts = taken(batches_of([Row(b"a"), Row(b"b")], []))
    (block,) = encoded(parts)
    sst = writer(Codec.NONE, 100, None)
    sst.add_block(block)
    with pytest.raises(ValueError, match="not above the key before it"):
        sst.add_block(block)
    sst = writer(Codec.NONE, 100, None)
    sst.add(Section.POINTS, Columns([b"A"], [0], b"\x01", [b""], [0]))
    with pytest.raises(ValueError, match="cannot follow rows"):
        sst.add_block(block)


def encoded(parts: list[PointRows]) -> list[EncodedBlock]:
    encoder = BlockEncoder(block_bytes=100, codec=Codec.NONE, has_filter=False)
    blocks = [block for part in parts for block in encoder.add(part)]
    return [*blocks, *encoder.finish()]
