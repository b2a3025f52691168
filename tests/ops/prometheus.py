"""A real Prometheus with the alerts of ops/, and what it says.

Time can be made to pass faster: all durations of the rules are then shorter by `SPEED`, and so is
the interval of scrapes. What takes its time in a server, such as the seconds until it calls itself
not ready, does not get faster. ALERTS_SPEED=1 are the rules as they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.servers.obtain import obtained
from tests.servers.process import HOST, Program, answers_http, folder, free_port, running

OPS = Path(__file__).parents[2] / "ops"
SPEED = float(os.environ.get("ALERTS_SPEED", "10"))
SCRAPE_S = 15.0  # as in ops/prometheus.yaml
SCRAPES_MIN = 5  # in the range of a rate
QUERY_S = 60.0
_DURATION = re.compile(r"(for: |\[|offset )(\d+)([smhd])\b")
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that fires."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    active_at: float  # seconds since 1970, when its condition began to hold

    @property
    def instance(self) -> str:
        return self.labels.get("instance", self.labels.get("job", ""))


def lasts_s(rule: str) -> float:
    """The sum of all durations in the text of a rule: it fires, or ends, within that time."""
    found = _DURATION.findall(rule)
    return sum(int(number) * _UNITS_MS[unit] for _, number, unit in found) / 1_000


def faster(rules: str, speed: float) -> str:
    """Return rules with all durations divided by `speed`; a range has some scrapes all the same."""
    scrape_ms = SCRAPE_S / speed * 1_000

    def divided(found: re.Match[str]) -> str:
        where, number, unit = found.groups()
        duration_ms = int(number) * _UNITS_MS[unit] / speed
        if where == "[":
            duration_ms = max(duration_ms, SCRAPES_MIN * scrape_ms)
        return f"{where}{duration_ms:.0f}ms"

    return _DURATION.sub(divided, rules)


class Prometheus:
    """A server that scrapes what it is told to."""

    def __init__(self, url: str, folder: Path) -> None:
        """`folder` has the files of targets that it watches, by scheme."""
        self.url = url
        self._folder = folder
        self._targets: dict[str, list[object]] = {}

    def watch(self, job: str, instance: str, address: str, *, scheme: str = "http") -> None:
        """Scrape HOST:PORT from now on, under the name `instance`."""
        targets = self._targets.setdefault(scheme, [])
        targets.append({"targets": [address], "labels": {"job": job, "instance": instance}})
        new = self._folder / f"{scheme}.new"
        new.write_text(json.dumps(targets))
        new.replace(self._folder / f"{scheme}.json")

    async def query_since(self, expression: str, begin_s: float) -> list[dict[str, Any]]:
        """The series of a query from `begin_s`, in seconds since 1970, until now."""
        span = {"start": str(begin_s), "end": str(time.time()), "step": "5"}
        found = await self._get("query_range", query=expression, **span)
        series: list[dict[str, Any]] = found["result"]
        return series

    async def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its state and its last evaluation."""
        found = await self._get("rules")
        return [rule for group in found["groups"] for rule in group["rules"]]

    async def targets(self) -> list[dict[str, Any]]:
        """Every target, with the error of its last scrape."""
        found = await self._get("targets")
        targets: list[dict[str, Any]] = found["activeTargets"]
        return targets

    async def firing(self) -> list[Alert]:
        """The alerts that fire."""
        found = await self._get("alerts")
        return [
            Alert(
                each["labels"]["alertname"],
                each["labels"],
                each["annotations"],
                datetime.fromisoformat(re.sub(r"\.\d+", "", each["activeAt"])).timestamp(),
            )
            for each in found["alerts"]
            if each["state"] == "firing"
        ]

    async def _get(self, what: str, **arguments: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urlencode(arguments)}"

        def read() -> Any:
            with urlopen(url, timeout=QUERY_S) as reply:  # noqa: S310 - it is http://127.0.0.1
                return json.load(reply)

        reply = await asyncio.to_thread(read)
        assert reply["status"] == "success", reply
        return reply["data"]


@contextmanager
def prometheus(speed: float, authority: Path, token: str) -> Iterator[Prometheus]:
    """Prometheus with the alerts, and no targets yet.

    Targets with the scheme https are verified by the file `authority`, and shown `token`.
    """
    usr = obtained("prometheus") / "usr"
    with folder() as work:
        port = free_port()
        (work / "alerts.yaml").write_text(faster((OPS / "alerts.yaml").read_text(), speed))
        with_tls = {
            "tls_config": {"ca_file": str(authority), "server_name": "localhost"},
            "authorization": {"credentials": token},
        }
        interval = f"{SCRAPE_S / speed * 1_000:.0f}ms"
        config = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                _scraped("http", work, {}),
                _scraped("https", work, with_tls),
            ],
        }
        (work / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        argv = [
            str(usr / "bin" / "prometheus"),
            f"--config.file={work / 'prometheus.yaml'}",
            f"--storage.tsdb.path={work / 'data'}",
            f"--web.listen-address={HOST}:{port}",
            "--log.level=warn",
        ]
        url = f"http://{HOST}:{port}"
        with running(Program(argv), work / "log", answers_http(f"{url}/-/ready")):
            yield Prometheus(url, work)


def _scraped(scheme: str, folder: Path, how: Mapping[str, object]) -> dict[str, object]:
    files = [{"files": [str(folder / f"{scheme}.json")]}]
    return {"job_name": scheme, "scheme": scheme, "file_sd_configs": files, **how}
