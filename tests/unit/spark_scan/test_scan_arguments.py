"""What callers may write, and what becomes an option of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from shalekv.errors import InvalidSetting
from shalekv_spark.scanning import scan as scanning
from shalekv_spark.scanning.frames import called
from shalekv_spark.scanning.scan import scan

SPARK = cast("SparkSession", SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2)))


def test_one_column_may_be_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not taken for a column for each of its letters."""
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
    """Rows of Spark have bytes as a bytearray."""
    assert called(snapshot) == "01" * 16
