"""The Spark of the tests works, with tasks in this environment's Python."""

from __future__ import annotations

from pyspark.sql import SparkSession


def test_tasks_run_in_this_python(spark: SparkSession) -> None:
    """A task can import the pipeline."""

    def module(_number: int) -> str:
        import shalekv_spark  # noqa: PLC0415 - in the task

        return shalekv_spark.__name__

    assert spark.sparkContext.parallelize([1], 1).map(module).collect() == ["shalekv_spark"]
