"""The metrics of running roles: all that they have, in a form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from shalekv.rpc.exposition import Exposition, sample_name, unit_of
from shalekv.server.reader import Reader
from shalekv.settings import ReaderConfig
from shalekv.store.memory import MemoryObjects
from shalekv.telemetry.metrics import FAMILIES, PREFIX, Family, Metrics
from shalekv.telemetry.sources import MetricSources
from shalekv_client import Client
from tests.kit.processes.in_process import memory_store, real_runtime, serving
from tests.kit.quorum.safekeepers import running_node, safekeeper_settings

OPEN = "application/openmetrics-text; version=1.0.0"
# Families of other parts of a process, or of other processes, or of what has not happened here.
NOT_OF_A_WRITER = {
    *("audit_lines_lost", "build", "certificate_expiry_timestamp_seconds", "elections", "fenced"),
    *("child_crashes", "child_running", "child_starts", "collected_objects", "collections"),
    *("compaction_bytes", "compaction_failures", "compactions", "event_loop_lag_seconds"),
    *(
        "process_cpu_seconds",
        "process_resident_bytes",
        "reader_gap_seconds",
        "reader_gaps",
        "refusals",
        "slow_calls",
    ),
    *("quorum_unarchived_bytes", "safekeeper_connected", "safekeeper_lag_records"),
    *("safekeeper_disk_free_bytes", "safekeeper_log_bytes", "safekeeper_unarchived_objects"),
    *("slowest_store_request_seconds", "slowest_store_request_waiting_calls", "spans_dropped"),
    *("level_bytes", "level_ssts"),
}


async def exposed(sources: MetricSources) -> Mapping[str, Metric]:
    """Collect, encode in both formats, and decode what was encoded, by the name of the family."""
    metrics = await sources.collect()
    exposition = Exposition()
    modern, _ = await exposition.text(metrics, OPEN)
    plain, _ = await exposition.text(metrics, "")  # of the lines that were kept
    families = text_string_to_metric_families(modern.decode())  # type: ignore[no-untyped-call]
    found = {each.name: each for each in families}
    others = [*plain_families(plain.decode())]
    assert sum(len(each.samples) for each in found.values()) == sum(
        len(each.samples) for each in others
    )
    for name, metric in found.items():
        family = FAMILIES[name.removeprefix(PREFIX)]
        assert metric.type == family.kind.value
        assert metric.documentation
        assert metric.unit == (metric.unit and name.rpartition("_")[2])
        assert {*metric.samples[0].labels} - {"le"} == {*family.labels}
    return {name.removeprefix(PREFIX): metric for name, metric in found.items()}


async def test_a_writer_has_all_that_is_its_own() -> None:
    """Each family of a writer has samples from the beginning, and they follow what is done."""
    async with serving(memory_store()) as served:
        sources = MetricSources()
        sources.add(served.server.collect)
        sources.add(served.writer.admin.collect)
        async with Client(served.listen) as client:
            await client.put(b"a", b"1")
            await client.get(b"a")
        found = await exposed(sources)
    assert {*FAMILIES} - {*found} == NOT_OF_A_WRITER
    calls = {
        (each.labels["method"], each.labels["code"]): each.value for each in found["calls"].samples
    }
    assert calls == {("Session.put", "OK"): 1, ("Session.get", "OK"): 1}
    assert [each.value for each in found["commits"].samples] == [1]
    stages = [each for each in found["commit_stage_duration_seconds"].samples if each.value]
    assert {each.labels["stage"] for each in stages} == {"queued", "encoded", "stored", "visible"}


async def test_a_scrape_asks_no_store() -> None:
    """However often metrics are collected, the store gets no request."""
    store = memory_store()
    async with serving(store) as served:
        await served.writer.admin.collect(Metrics())
        before = store.sent.total
        for _ in range(3):
            await served.writer.admin.collect(Metrics())
        assert store.sent.total == before


async def test_bill_of_metrics_is_that_of_the_store() -> None:
    """The requests that are billed are those that the store has counted, kind by kind."""
    store, metrics = memory_store(), Metrics()
    async with serving(store) as served:
        await served.writer.admin.collect(metrics)
        for kind, requests in store.sent.by_kind.items():
            assert metrics.get("store_billed_requests", "writer", kind.value) == requests


async def test_a_reader_and_a_safekeeper_expose_what_prometheus_reads(tmp_path: Path) -> None:
    """What they have is in the format; a reader tells its staleness, and takes no writes."""
    objects = MemoryObjects()
    settings = ReaderConfig.model_validate({"database": {"url": "memory://test"}})
    async with serving(memory_store(objects)):
        with real_runtime() as runtime:
            reader = await Reader.open(memory_store(objects), settings=settings, runtime=runtime)
            sources = MetricSources()
            sources.add(reader.admin.collect)
            found = await exposed(sources)
            await reader.release()
    assert found["staleness_seconds"].samples[0].value >= 0
    assert [each.labels["calls"] for each in found["ready"].samples] == ["reads"]
    assert {"reader_gaps", "reader_gap_seconds", "uncompacted_bytes"} <= {*found}
    async with running_node(safekeeper_settings(tmp_path)) as node:
        sources = MetricSources()
        sources.add(node.collect)
        found = await exposed(sources)
    assert found["safekeeper_disk_free_bytes"].samples[0].value > 0


async def test_labels_are_escaped() -> None:
    """Whatever a name has in it, it is one label of one line, and no scrape fails because of it."""
    names = ('token:"a"\n} 7', "jwt:\\", "cert:\udcff\r", "ü")
    metrics = Metrics()
    for name in names:
        metrics.add("principal_calls", 1, name)
    text, _ = await Exposition().text(metrics, OPEN)
    families = text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    (found,) = (family.samples for family in families)
    shown = {each.labels["principal"] for each in found}
    assert shown == {*names} - {names[2]} | {"cert:\\udcff\r"}


def test_names_are_an_interface() -> None:
    """Names, types, units and labels are those of the golden file: dashboards rely on them."""
    golden = (Path(__file__).parent / "metrics.golden.txt").read_text()
    assert golden == "".join(map(_line, FAMILIES.values())), "a change breaks dashboards and alerts"


def _line(family: Family) -> str:
    labels = ",".join(family.labels)
    return (
        f"{sample_name(family)}{{{labels}}} {family.kind.value} {unit_of(family)}".rstrip() + "\n"
    )
