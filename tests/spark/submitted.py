"""Program for `spark-submit` in test_packaging.py: a scan, a load, and a scan of both.

It gets the URL of a database, and prints one line of JSON after the output of Spark.
"""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import shalekv_spark
from shalekv_spark import bulk_load, register, scan


def whereabouts(_: int) -> tuple[str, str]:
    """The file in which a task finds the pipeline, and a variable that was meant for executors."""
    import shalekv_spark as found  # noqa: PLC0415 - in the task

    return str(found.__file__), os.environ.get("FRUIT_SEASON", "")


def main(url: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    before = scan(spark, url, prefix=b"fruit/")
    louder = before.select(
        "key", f.upper(f.col("value").cast("string")).cast("binary").alias("value")
    )
    bulk_load(louder, url, load_id="louder", writer="open")  # its server has ended
    after = spark.read.format("shalekv").option("url", url).option("prefix", "fruit/").load()
    reported = {
        "driver": shalekv_spark.__file__,
        "task": spark.sparkContext.parallelize([1], 1).map(whereabouts).collect(),
        "after": sorted(
            (bytes(row.key).decode(), bytes(row.value).decode()) for row in after.collect()
        ),
    }
    sys.stdout.write(json.dumps(reported) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
