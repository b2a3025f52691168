"""Dashboard, alerts and runbook agree with each other, and with the metrics that there are.

Whether Prometheus takes them, and what they show, is tested in `tests/ops`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from shalekv.telemetry.metrics import FAMILIES, PREFIX, MetricType
from tests.style.sources import ROOT

RUNBOOK = ROOT / "server/docs/runbook.md"
RUNBOOK_URL = "https://shalekv.dev/docs/runbook#"
OF_PROMETHEUS = frozenset({"job", "instance"})  # the labels that it adds to what it scrapes
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "ops/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BOARD = json.loads((ROOT / "ops/grafana/shalekv.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
QUERIES = [(f"{title} {target['refId']}", target["expr"]) for title, target in TARGETS]
QUERIES += [(rule["alert"], rule["expr"]) for rule in RULES]
_SUFFIXES = {
    MetricType.COUNTER: ("_total",),
    MetricType.GAUGE: ("",),
    MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
    MetricType.INFO: ("_info",),
}
LABELS = {
    f"{PREFIX}{family.name}{suffix}": frozenset(family.labels)
    | ({"le"} if suffix == "_bucket" else frozenset())
    for family in FAMILIES.values()
    for suffix in _SUFFIXES[family.kind]
}
_METRIC = re.compile(rf"\b({PREFIX}\w+)(?:\{{([^}}]*)\}})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")


def metrics(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that a query names, with the labels of its selector."""
    for name, selector in _METRIC.findall(query):
        yield name, set(_MATCHER.findall(re.sub(r'"[^"]*"', '""', selector)))


def grouped(pattern: re.Pattern[str], query: str) -> set[str]:
    return {label for found in pattern.findall(query) for label in re.findall(r"\w+", found)}


def known(query: str) -> set[str]:
    """The labels that the metrics of a query have."""
    return set(OF_PROMETHEUS).union(*(LABELS.get(name, ()) for name, _ in metrics(query)))


def kept(query: str) -> set[str]:
    """The labels that the result of a query may have."""
    return grouped(_BY, query) or known(query)


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_queries_name_metrics_and_labels_that_exist(where: str, query: str) -> None:
    """A metric of a query is one of `FAMILIES` with the ending of its kind; so are its labels."""
    found = list(metrics(query))
    assert found or "up{" in query, where
    assert [name for name, _ in found if name not in LABELS] == []
    for name, labels in found:
        assert labels - LABELS[name] - OF_PROMETHEUS == set(), name
    assert grouped(_GROUPING, query) - known(query) == set()


def test_the_dashboard_shows_every_metric() -> None:
    """Whoever adds a metric adds it to a panel."""
    shown = {name for _, target in TARGETS for name, _ in metrics(target["expr"])}
    missing = [
        family.name
        for family in FAMILIES.values()
        if not shown & {f"{PREFIX}{family.name}{suffix}" for suffix in _SUFFIXES[family.kind]}
    ]
    assert missing == []


def test_legends_name_labels_of_their_query() -> None:
    """A legend shows no label that its query has summed up."""
    for title, target in TARGETS:
        named = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert named - kept(target["expr"]) == set(), title


def test_panels_have_places_of_their_own() -> None:
    """Numbers are unique, no two panels overlap, and variables are those of the dashboard."""
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    defined = {each["name"] for each in BOARD["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"])))
    assert used <= defined


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alerts_are_complete(rule: dict[str, Any]) -> None:
    """Each alert has its time, severity, texts, and section; texts name labels of its query."""
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    texts = rule["annotations"]
    assert set(texts) == {"summary", "description", "runbook_url"}
    assert texts["runbook_url"] == RUNBOOK_URL + rule["alert"].lower()
    named = set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"]))
    assert named - kept(rule["expr"]) == set()


def test_each_alert_has_its_section() -> None:
    """The runbook has a section for each alert, in their order, and for nothing else."""
    sections = re.findall(r"^## (ShaleKV\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]
    for section in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        if section.startswith("ShaleKV"):
            for part in ("**Meaning.**", "**Affected.**", "**Look.**", "**Do.**"):
                assert part in section, section
            for name, labels in metrics(section):
                assert labels <= LABELS[name] | OF_PROMETHEUS, name
