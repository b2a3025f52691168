"""Rows of a load: what is refused, by which words, and which row of a key counts."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from random import Random

import pyarrow as pa
import pytest

from shalekv.errors import InvalidRequest
from shalekv_spark.loading.schema import EXPIRE_AT
from tests.unit.spark_load.batches import Row, batch_of, batches_of, taken

REFUSED = [
    ([Row(None), Row(b"a")], "partition 3, row 0: the key is null"),
    ([Row(b""), Row(b"a")], "partition 3, row 0: a key must not be empty"),
    ([Row(b"a"), Row(b"b" * 9)], "row 1: key b'bbbbbbbbb': 9 bytes, and a key has 8 at most"),
    ([Row(b"b"), Row(b"a")], "row 1: the partition is not sorted: key b'a' stands after b'b'"),
    ([Row(b"a"), Row(b"a")], "row 1: key b'a' stands twice"),
    ([Row(b"a", None)], "key b'a': the value of a put is null"),
    ([Row(b"a", bytes(17))], "key b'a': a value of 17 bytes, and a value has 16 at most"),
    ([Row(b"a", op=None)], "key b'a': op is null, expected put or delete"),
    ([Row(b"a"), Row(b"b", op="PUT")], "key b'b': op is 'PUT', expected put or delete"),
]


@pytest.mark.parametrize(("rows", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_a_row_that_cannot_be_loaded_is_named(rows: list[Row], told: str) -> None:
    """By partition and key, whether the rows come in one batch or in two."""
    for sizes in ([], [1]):
        with pytest.raises(InvalidRequest, match=re.escape(told)):
            taken(batches_of(rows, sizes))


def test_a_delete_needs_neither_value_nor_expiry_and_has_none() -> None:
    """Whatever stands there does not count."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    rows = [Row(b"a", None, "delete", moment), Row(b"b", bytes(99), "delete"), Row(b"c", b"1")]
    (found,) = taken([batch_of(rows, large=True)])
    assert found.values.to_pylist() == [b"", b"", b"1"]
    assert found.kinds is not None
    assert found.kinds.tolist() == [2, 2, 1]
    assert found.expire_at_ms is not None
    assert found.expire_at_ms.tolist() == [0, 0, 0]


def test_times_become_milliseconds_and_never_no_time() -> None:
    """Rounded down; before 1970 they are the earliest that there is, which is past as well."""
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
    """Wherever batches end; the rows that lose may be alike among themselves."""
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
def test_two_rows_that_the_rule_does_not_tell_apart_are_refused(order: float | None) -> None:
    """Nulls and NaN are alike; rows that are the same in everything are one row."""
    same = Row(b"b", b"1", order=order)
    rows = [Row(b"a", order=5), same, same, same, Row(b"c", order=5)]
    for sizes in ([], [2], [1, 1, 1, 1], [3]):
        found = taken(batches_of(rows, sizes), has_rule=True)
        assert [key for part in found for key in part.keys.to_pylist()] == [b"a", b"b", b"c"]
        for at, other in ((2, same._replace(value=b"2")), (3, same._replace(op="delete"))):
            changed = [*rows[:at], other, *rows[at + 1 :]]
            with pytest.raises(InvalidRequest, match="key b'b' stands twice, and by on_duplicate"):
                taken(batches_of(changed, sizes), has_rule=True)


@pytest.mark.parametrize("zone", ["UTC", "GMT+08:00", "PST"])
def test_rows_are_compared_in_every_zone_that_spark_knows(zone: str) -> None:
    """Also times of which Python knows none: after the year 9999."""
    for microseconds in (1, 10**18):
        batch = batch_of([Row(b"a", order=1), Row(b"a", order=1)])
        at = batch.schema.get_field_index(EXPIRE_AT)
        times = pa.array([microseconds] * 2, pa.timestamp("us", zone))
        (found,) = taken([batch.set_column(at, EXPIRE_AT, times)], has_rule=True)
        assert found.keys.to_pylist() == [b"a"]
        others = pa.array([microseconds, microseconds + 1], pa.timestamp("us", zone))
        with pytest.raises(InvalidRequest, match="key b'a' stands twice, and by on_duplicate"):
            taken([batch.set_column(at, EXPIRE_AT, others)], has_rule=True)
