"""Ordinary load for a while, in which no alert may fire: `-m tests.ops.quiet --minutes 60`.

The rules are those of ops/alerts.yaml, at their own pace. The exit code is 0 if none has fired.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.kit.processes.processes import Processes
from tests.ops.prometheus import Alert, Prometheus
from tests.ops.site import CLOCK, databases

POLL_MS = 5_000
REPORT_S = 300.0
WARM_UP_S = 90.0  # what was slow while processes started is told for a minute


@click.command()
@click.option("--minutes", type=click.FloatRange(0.1), default=60, show_default=True)
@click.option("--speed", type=click.FloatRange(1), default=1, show_default=True)
def main(minutes: float, speed: float) -> None:
    """Watch ordinary load for MINUTES, and tell which alerts have fired."""
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        fired = asyncio.run(quiet(processes, Path(folder), minutes * 60, speed))
    _tell(f"{minutes:g} minutes of ordinary load: {len(fired)} alerts fired")
    sys.exit(1 if fired else 0)


async def quiet(
    processes: Processes, folder: Path, duration_s: float, speed: float
) -> dict[str, Alert]:
    """The alerts that have fired within that time."""
    fired: dict[str, Alert] = {}
    async with databases(processes, folder, speed) as found:
        await found.start()
        async with found.loaded():
            await CLOCK.sleep_ms(WARM_UP_S * 1_000)
            begin_s = told_s = time.monotonic()
            while time.monotonic() < begin_s + duration_s:
                await CLOCK.sleep_ms(POLL_MS)
                for alert in await found.prometheus.firing():
                    if fired.setdefault(f"{alert.name} {alert.instance}", alert) is alert:
                        minutes = (time.monotonic() - begin_s) / 60
                        _tell(
                            f"{minutes:.1f} min: {alert.name}: {alert.annotations['description']}"
                        )
                if time.monotonic() > told_s + REPORT_S:
                    told_s = time.monotonic()
                    _tell(await _summary(found.prometheus, told_s - begin_s))
    return fired


async def _summary(prometheus: Prometheus, passed_s: float) -> str:
    found = await prometheus.query_since("sum(rate(shalekv_calls_total[1m]))", time.time() - 10)
    calls = float(found[0]["values"][-1][1]) if found else 0.0
    down = [each["labels"]["instance"] for each in await prometheus.targets() if each["lastError"]]
    return f"{passed_s / 60:.0f} min: {calls:.0f} calls/s, no metrics of: {down or 'none'}"


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
