"""From Parquet files into a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from shalekv_spark.loading.load import LoadResult, bulk_load
from shalekv_spark.loading.options import LoadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def import_parquet(
    spark: SparkSession,
    path: str | Sequence[str],
    url: str,
    *,
    load_id: str,
    **options: Unpack[LoadOptions],
) -> LoadResult:
    """Load the rows of Parquet files, one path or several, as `bulk_load` does it.

    A column `seq`, as exports can have one, is left out: a load has one sequence number.
    """
    paths = [path] if isinstance(path, str) else [*path]
    df = spark.read.parquet(*paths)
    return bulk_load(df.drop("seq"), url, load_id=load_id, **options)
