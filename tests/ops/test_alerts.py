"""Faults fire their alerts, and the dashboard shows data, in a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from tests.kit.processes.processes import Processes
from tests.ops.faults import Fault, of_elected, of_guarded, of_main, of_quorum
from tests.ops.prometheus import OPS, SPEED, Alert, Prometheus, lasts_s
from tests.ops.site import CLOCK, databases

PREFIX = "ShaleKV"
WARM_UP_S = 300 / SPEED
SLACK_S = 120.0
SLOW_MS = 500  # less than a stalled request, more than one on a busy machine
POLL_MS = 250
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((OPS / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
# No process can be brought to these within a test: they are tested with made-up samples.
NOT_INJECTED = {"MemoryFull", "OldPins"}


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one alert of a fault."""

    fault: str
    alert: str
    seconds: float | None  # until it fired; None: it did not
    fired: Alert | None

    def line(self) -> str:
        """The row of the table in the runbook."""
        rule = RULES[PREFIX + self.alert]
        took = "never" if self.seconds is None else f"{self.seconds:.0f}"
        return f"| {self.fault} | {PREFIX}{self.alert} | {rule['for']} | {took} |"


@pytest.mark.soak
@pytest.mark.timeout(4 * 3_600)
async def test_faults_fire_their_alerts_and_the_dashboard_shows_them(
    processes: Processes, tmp_path: Path
) -> None:
    """Each fault fires its alerts, every rule is healthy, and every panel has had data."""
    begin_s = time.time()
    async with databases(processes, tmp_path, SPEED, slow_ms=SLOW_MS) as found:
        await found.start()
        async with found.loaded():
            await CLOCK.sleep_ms(WARM_UP_S * 1_000)
            targets = await found.prometheus.targets()
            silent = [each["labels"]["instance"] for each in targets if each["lastError"]]
            of = (
                ({"main"}, of_main(found.main)),
                ({"quorum", "safekeepers"}, of_quorum(found.quorum)),
                ({"guarded"}, of_guarded(found.guarded)),
                ({"elected"}, of_elected(found.elected)),
            )
            done = await asyncio.gather(
                *(watched(found.prometheus, jobs, faults) for jobs, faults in of)
            )
        rows = [row for each in done for row in each]
        unhealthy = [rule for rule in await found.prometheus.rules() if rule["health"] != "ok"]
        empty = await panels_without_data(found.prometheus, begin_s)
    assert silent == []
    assert unhealthy == []
    assert [row.line() for row in rows if row.seconds is None] == []
    assert empty == set()
    (stalled,) = [row.fired for row in rows if row.alert == "SlowStoreRequest"]
    assert stalled is not None
    assert stalled.labels["operation"] == "create"
    assert stalled.labels["object"].startswith("wal/")
    assert re.search(r"waited for it: [1-9]", stalled.annotations["description"])
    tested = {PREFIX + name for name in {row.alert for row in rows} | NOT_INJECTED}
    assert tested == set(RULES)


async def watched(
    prometheus: Prometheus, jobs: Collection[str], faults: Sequence[Fault]
) -> list[Row]:
    """One fault after the other; alerts of other jobs don't count."""
    rows: list[Row] = []
    for fault in faults:
        names = {PREFIX + name for name in fault.alerts}
        before = await until_fired(prometheus, jobs, names, set(), SLACK_S)
        if before:
            sys.stdout.write(f"{fault.title}: {', '.join(before)} fired before\n")
        began_s = time.monotonic()
        fired: dict[str, tuple[float, Alert]] = {}
        try:
            async with fault.inject():
                fired = await until_fired(prometheus, jobs, names, names, SLACK_S + fault.more_s)
        except AssertionError as error:  # the others are tried all the same
            sys.stdout.write(f"{fault.title}: {error}\n")
        for name in fault.alerts:
            at_s, alert = fired.get(PREFIX + name, (None, None))
            rows.append(Row(fault.title, name, None if at_s is None else at_s - began_s, alert))
            sys.stdout.write(f"{rows[-1].line()}\n")
            sys.stdout.flush()
    return rows


async def until_fired(
    prometheus: Prometheus,
    jobs: Collection[str],
    names: set[str],
    wanted: set[str],
    slack_s: float,
) -> dict[str, tuple[float, Alert]]:
    """Wait until those of `names` that fire are `wanted`; when each of these was first seen."""
    longest_s = max(lasts_s(f"for: {RULES[name]['for']} {RULES[name]['expr']}") for name in names)
    end_s = time.monotonic() + longest_s / SPEED + slack_s
    seen: dict[str, tuple[float, Alert]] = {}
    while time.monotonic() < end_s:
        firing = [each for each in await prometheus.firing() if each.name in names]
        firing = [each for each in firing if each.labels["job"].removeprefix("shalekv-") in jobs]
        if not wanted and not firing:
            return {}
        for alert in firing:
            seen.setdefault(alert.name, (time.monotonic(), alert))
        if wanted and seen.keys() >= wanted:
            break
        await CLOCK.sleep_ms(POLL_MS)
    return seen


async def panels_without_data(prometheus: Prometheus, begin_s: float) -> set[str]:
    """The titles of panels of which a query has had no data since then."""
    board = json.loads((OPS / "grafana" / "shalekv.json").read_text())
    empty = set()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m")
            for variable in ("$job", "$instance"):
                query = query.replace(variable, ".*")
            if not await prometheus.query_since(query, begin_s):
                empty.add(f"{panel['title']} {target['refId']}")
    return empty
