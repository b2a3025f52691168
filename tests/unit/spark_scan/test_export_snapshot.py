"""Which snapshot an export reads."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from shalekv_spark.place import Place
from shalekv_spark.scanning import export
from shalekv_spark.scanning.export import export_parquet
from shalekv_spark.scanning.view import Pin

FOUND = Pin(b"f" * 16, 7, "nightly")


class _Scanned(Exception):
    """With the snapshot that was to be scanned."""


@pytest.mark.parametrize("snapshot", ["nightly", FOUND.snapshot_id])
def test_an_export_reads_the_snapshot_whose_number_it_tells(
    monkeypatch: pytest.MonkeyPatch, snapshot: str | bytes
) -> None:
    """Even if the name is given to another one meanwhile."""

    async def find(place: Place, name: str) -> Pin:
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
