"""ShaleKV for Spark: scans, bulk loads, the change feed, an exactly-once sink, compaction.

    import shalekv_spark

    names = shalekv_spark.scan(spark, "s3://bucket/names")
    shalekv_spark.bulk_load(frame, "s3://bucket/names", load_id="names of November")
    shalekv_spark.register(spark)  # then: format("shalekv"), format("shalekv.changes")

Driver and tasks read and write the SSTs of a database in its object store; the server of a database
is asked for nothing but the one record that commits a load.
"""

from __future__ import annotations

from shalekv_spark.compact import compact
from shalekv_spark.formats import register
from shalekv_spark.frames import release
from shalekv_spark.load import LoadResult, bulk_load
from shalekv_spark.parquet_export import Exported, export_parquet
from shalekv_spark.parquet_import import import_parquet
from shalekv_spark.pinning import PinnedSnapshot, pin
from shalekv_spark.scan import scan
from shalekv_spark.sink import write_stream
from shalekv_spark.stats import stats

__all__ = [
    "Exported",
    "LoadResult",
    "PinnedSnapshot",
    "bulk_load",
    "compact",
    "export_parquet",
    "import_parquet",
    "pin",
    "register",
    "release",
    "scan",
    "stats",
    "write_stream",
]
