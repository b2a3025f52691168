"""Each alert fires beyond its threshold and not below it, by promtool with made-up samples.

A series has a sample each minute: a constant, or a counter that grows from 0 by so much each. `$`
is what a case is about: a value that fires the alert, and one that does not.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from tests.ops.prometheus import OPS
from tests.servers.obtain import obtained

PROMTOOL_S = 120.0
MINUTES = 90  # of samples
EVALUATED = 80
NAMES = [
    rule["alert"]
    for group in yaml.safe_load((OPS / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


@dataclass(frozen=True, slots=True)
class Case:
    """One alert: series, and the two values of `$`."""

    series: tuple[str, ...]
    fires: str
    fires_not: str
    more: tuple[str, ...] = ()  # labels that the alert has beside job and instance


def gauge(name: str, fires: str, fires_not: str, *more: str) -> Case:
    return Case((f"{name} $",), fires, fires_not, more)


WRITER = 'build_info{role="writer",version="1"} 1'
FAILED = 'store_requests_total{outcome="failed",process="p",operation="o",folder="f"} 0+$'
WELL = 'store_requests_total{outcome="ok",process="p",operation="o",folder="f"} 0+95'
SLOWEST = 'slowest_store_request_seconds{process="p",operation="o",folder="f",object="wal/1"} 0.8'
WAITING = SLOWEST.replace("_seconds", "_waiting_calls").replace("0.8", "$")
OF_REQUEST = ("process", "operation", "folder")
CASES = {
    "TargetDown": gauge("up", "0", "1"),
    "NoWriter": Case((WRITER, "serving $"), "0", "1"),
    "WritesFail": gauge('ready{calls="writes"}', "0", "1", "calls"),
    "ReadsFail": gauge('ready{calls="reads"}', "0", "1", "calls"),
    "Fenced": gauge("fenced_total", "0+0.01", "1"),
    "ElectionsFlap": gauge('elections_total{event="lost"}', "0+0.1", "0+0.08"),
    "Restarts": gauge(
        'process_cpu_seconds_total{process="p"}',
        "5+0x60 4 5 3 4 2 2+0x30",
        "5+0x60 4 5 3 3+0x30",
        "process",
    ),
    "CallsFail": Case(
        (
            'calls_total{method="m",code="UNAVAILABLE"} 0+$',
            'calls_total{method="m",code="OK"} 0+95',
        ),
        "6",
        "4",
        ("method",),
    ),
    "InternalErrors": gauge(
        'calls_total{method="m",code="INTERNAL"}', "_x74 1+0x30", "1", "method", "code"
    ),
    "SlowCalls": Case(
        ('slow_calls_total{method="m"} 0+$', 'calls_total{method="m",code="OK"} 0+1000'),
        "11",
        "9",
        ("method",),
    ),
    "Overloaded": gauge('refusals_total{reason="QUEUE_FULL"}', "0+7", "0+5", "reason"),
    "QuotaExceeded": gauge('refusals_total{reason="QUOTA_EXCEEDED"}', "0+7", "0+5"),
    "CallsDenied": gauge('refusals_total{reason="UNAUTHENTICATED"}', "0+31", "0+29", "reason"),
    "SlowStoreRequest": Case((SLOWEST, WAITING), "1", "0", (*OF_REQUEST, "object")),
    "StoreErrors": Case((FAILED, WELL), "6", "4", OF_REQUEST),
    "CommitsSlow": Case(
        (
            'commit_stage_duration_seconds_bucket{stage="stored",le="1"} 0+$',
            'commit_stage_duration_seconds_bucket{stage="stored",le="2"} 0+1000',
            'commit_stage_duration_seconds_bucket{stage="stored",le="+Inf"} 0+1000',
        ),
        "980",
        "995",
    ),
    "CostHigh": gauge('cost_dollars_total{process="p",kind="k"}', "0+0.017", "0+0.016"),
    "ReaderStale": gauge("staleness_seconds", "31", "29"),
    "CompactionBehind": gauge("read_amplification", "12", "11"),
    "CompactionFails": gauge("compaction_failures_total", "0+0.2", "0+0.05"),
    "CollectionFails": Case(
        (
            'collections_total{outcome="failed"} 0+1',
            'collections_total{outcome="ok"} $',
        ),
        "0",
        "0+1",
    ),
    "OldPins": Case(("oldest_pin_age_seconds $", "pinned_bytes 2000000000"), "604801", "604799"),
    "ChildDown": gauge('child_running{child="c"}', "0", "1", "child"),
    "ChildCrashes": gauge('child_crashes_total{child="c"}', "0+0.2", "0+0.05", "child"),
    "MemoryFull": Case(
        ('memory_bytes{component="c"} $', 'memory_max_bytes{component="c"} 100'), "91", "89"
    ),
    "WritesNearLimit": Case(
        ('memory_bytes{component="memtable"} $', 'memory_max_bytes{component="memtable"} 100'),
        "76",
        "74",
        ("component",),
    ),
    "EventLoopLag": gauge("event_loop_lag_seconds", "0.6", "0.4"),
    "QuorumLost": Case(
        (
            'safekeeper_connected{member="a"} 1',
            *(f'safekeeper_connected{{member="{m}"}} $' for m in "bc"),
        ),
        "0",
        "1",
    ),
    "SafekeeperDisconnected": gauge('safekeeper_connected{member="m"}', "0", "1", "member"),
    "SafekeeperLags": gauge('safekeeper_lag_records{member="m"}', "10001", "9999", "member"),
    "SafekeeperDiskNearlyFull": gauge("safekeeper_disk_free_bytes", "2147483647", "2147483649"),
    "LogUnarchived": gauge('safekeeper_unarchived_objects{database="d"}', "101", "99", "database"),
    # The time of the tests begins at 1970.
    "CertificateExpires": gauge(
        'certificate_expiry_timestamp_seconds{file="f"}', "1209600", "1300000", "file"
    ),
    "CertificateExpiresNow": gauge(
        'certificate_expiry_timestamp_seconds{file="f"}', "172800", "1209600", "file"
    ),
    "AuditLinesLost": gauge("audit_lines_lost_total", "0+0.1", "1"),
    "SpansDropped": gauge("spans_dropped_total", "0+0.1", "1"),
}


def series_of(text: str, value: str, job: str) -> dict[str, str]:
    """The series of a job with that value of `$`, until the end of the test."""
    found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (.*)", text)
    assert found is not None
    name, labels, values = found[1], found[2], found[3].replace("$", value)
    if re.fullmatch(r"[\d.]+", values):
        values = f"{values}+0"
    if re.fullmatch(r"0\+[\d.]+|[\d.]+\+0", values):
        values = f"{values}x{MINUTES}"
    name = name if name == "up" else f"shalekv_{name}"
    joined = ",".join(filter(None, (f'job="{job}",instance="i"', labels)))
    return {"series": f"{name}{{{joined}}}", "values": values}


def promtool(*argv: str) -> None:
    """Run it; what it has against its input fails the test."""
    program = obtained("prometheus") / "usr" / "bin" / "promtool"
    done = subprocess.run(
        [program, *argv], capture_output=True, text=True, check=False, timeout=PROMTOOL_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.soak
def test_rules_and_configuration_are_valid() -> None:
    """Promtool has nothing against the alerts, nor against the configuration that loads them."""
    promtool("check", "config", str(OPS / "prometheus.yaml"))


@pytest.mark.soak
def test_alerts_fire_at_their_thresholds(tmp_path: Path) -> None:
    """A value beyond the threshold fires the alert, with its labels; one below it fires nothing."""
    series: list[dict[str, str]] = []
    asked: list[dict[str, object]] = []
    for name, case in CASES.items():
        labels = "".join(f', {label}=~".+"' for label in case.more)
        for value, fires in ((case.fires, True), (case.fires_not, False)):
            job = f"shalekv-{name}-{fires}"
            of_alert = f'alertname="ShaleKV{name}", alertstate="firing", job="{job}"'
            samples = [{"labels": "{}", "value": 1}] if fires else []
            query = {"expr": f"count(ALERTS{{{of_alert}{labels}}})", "eval_time": f"{EVALUATED}m"}
            asked.append(query | {"exp_samples": samples})
            series += [series_of(text, value, job) for text in case.series]
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(OPS / "alerts.yaml")], "tests": tests}))
    promtool("test", "rules", str(file))


def test_each_alert_has_a_case() -> None:
    """The cases are those of ops/alerts.yaml."""
    assert [f"ShaleKV{name}" for name in CASES] == NAMES
