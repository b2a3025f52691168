"""A Spark for tests: two cores, tasks that are tried three times, small and quick to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

MASTER = "local[2,3]"  # two cores; with local[2] no task would be tried again
HEAP = "1g"
# The first compiler alone, and one thread that collects: quick to start on few cores.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@contextmanager
def started(
    folder: Path, *, heap: str = HEAP, java_options: str = JAVA_OPTIONS, **settings: str
) -> Iterator[SparkSession]:
    """A session that writes into `folder`; `settings` have underscores in the place of points."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # interpreter of the tasks
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = (
        SparkSession.builder.master(MASTER)
        .config("spark.driver.memory", heap)
        .config("spark.driver.extraJavaOptions", f"{java_options} -Dderby.system.home={folder}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
    )
    for name, value in settings.items():
        builder = builder.config(name.replace("_", "."), value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
