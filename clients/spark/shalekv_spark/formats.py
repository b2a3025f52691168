"""The names under which Spark finds the data sources."""

from __future__ import annotations

from pyspark.sql import SparkSession

from shalekv_spark.feed.source import ChangesSource
from shalekv_spark.scanning.source import ScanSource, StatsSource


def register(spark: SparkSession) -> None:
    """Make "shalekv", "shalekv.stats" and "shalekv.changes" known to a session."""
    for source in (ScanSource, StatsSource, ChangesSource):
        spark.dataSource.register(source)
