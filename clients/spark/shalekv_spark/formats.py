"""Registers the data sources with Spark."""

from __future__ import annotations

from pyspark.sql import SparkSession

from shalekv_spark.feed.source import ChangesSource
from shalekv_spark.scanning.source import ScanSource, StatsSource


def register(spark: SparkSession) -> None:
    """Register the formats "shalekv", "shalekv.stats" and "shalekv.changes" with a session."""
    for source in (ScanSource, StatsSource, ChangesSource):
        spark.dataSource.register(source)
