"""A load and a scan in one trace, from the program on the driver to the tasks and the server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from pyspark.sql import SparkSession

from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes
from tests.servers.otlp import Collected, Collector, collector
from tests.spark.conftest import SparkDatabase
from tests.spark.loading import load, pairs
from tests.spark.scanning import at_once

COUNT = 200
TASKS = 2


@pytest_asyncio.fixture
async def collected(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Collector]:
    """Spans of a program with OpenTelemetry, and of the executors that it has configured."""
    async with collector() as collecting:
        provider = TracerProvider(shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{collecting.url}/v1/traces")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        environment = spark.sparkContext.environment  # as of `spark.executorEnv`
        monkeypatch.setitem(environment, "OTEL_EXPORTER_OTLP_ENDPOINT", collecting.url)
        yield collecting
        await at_once(provider.shutdown)


async def test_each_task_of_a_load_and_a_scan_is_a_child_of_its_job(
    spark: SparkSession, processes: Processes, folder: SparkDatabase, collected: Collector
) -> None:
    """Each process of Spark sends the spans of its tasks; the server's span of the commit is in the
    trace of the load too.
    """
    server = await processes.serve(folder.url, *ALONE, "--otlp-endpoint", collected.url)
    rows = pairs(spark, COUNT, partitions=TASKS)
    result = await load(rows, folder, "traced", presorted=True)
    frame = await at_once(lambda: scan(spark, folder.url, min_partitions=TASKS))
    assert len(await at_once(frame.collect)) == COUNT
    await at_once(lambda: release(frame))
    await server.stop()  # it has sent its spans then

    (loading,), (scanning,) = (collected.named(f"shalekv.{job}") for job in ("load", "scan"))
    tasks = tasks_of(collected, loading)
    assert {each.attributes["spark.partition"] for each in tasks} == {*range(TASKS)}
    assert len(tasks) == result.files, "each writes one"
    assert len(tasks_of(collected, scanning)) == TASKS
    (commit,) = collected.named("Admin.IngestSst")
    assert commit.trace_id == loading.trace_id


def tasks_of(collected: Collector, job: Collected) -> list[Collected]:
    """All tasks of the kind of `job`, which are its children."""
    tasks = collected.named(f"{job.name}.task")
    assert {(each.trace_id, each.parent_id) for each in tasks} == {(job.trace_id, job.span_id)}
    return tasks
