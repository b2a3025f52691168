"""Runs measures, one after the other, and keeps what they found."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import uvloop

from tests.bench import report
from tests.bench.measures.all import MEASURES
from tests.bench.plan import Found, Measure, Outcome
from tests.bench.stage import Stage
from tests.kit.processes.processes import Processes
from tests.servers.obtain import obtained

PEERS = ("etcd", "load", "redis", "slatedb", "versitygw")


def run_all(given: argparse.Namespace) -> int:
    """Run the measures that are named, print and keep what they found; 1 if one of them failed."""
    unknown = set(given.names) - {measure.name for measure in MEASURES}
    if unknown:
        sys.stderr.write(f"no such measure: {', '.join(sorted(unknown))}\n")
        return 2
    for name in PEERS:
        obtained(name)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no lines between figures
    chosen = [
        measure
        for measure in MEASURES
        if measure.name in given.names or not (given.names or measure.is_long)
    ]
    flags = tuple(given.flags.split())
    results = circumstances(flags)
    outcomes = [
        run_one(
            measure,
            is_tiny=given.tiny,
            base=Path(given.base).resolve() if given.base else None,
            flags=flags,
        )
        for measure in chosen
    ]
    results["measures"] = [outcome.as_json() for outcome in outcomes]
    if not given.tiny:
        report.keep(results, writes=given.write)
    failed = [outcome.measure.name for outcome in outcomes if outcome.failure]
    print(report.summary_line(results))
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def run_one(
    measure: Measure, *, is_tiny: bool, base: Path | None = None, flags: tuple[str, ...] = ()
) -> Outcome:
    """Run one measure in a folder of its own; a failure is part of the outcome."""
    found, failure, began_s = Found(), "", time.perf_counter()
    print(f"\n{measure.title}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shalekv-bench-", ignore_cleanup_errors=True) as name:
        try:
            with Processes() as processes:
                stage = Stage(Path(name), processes, is_tiny=is_tiny, base=base, flags=flags)
                uvloop.run(measure.run(stage, found))
        except Exception as error:  # noqa: BLE001 - told, and the next measure runs
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    outcome = Outcome(measure, found, time.perf_counter() - began_s, failure)
    print(report.section(outcome.as_json()), flush=True)
    return outcome


def circumstances(flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return what is known before a run: commit, date, and the machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": report.git("rev-parse", "--short=12", "HEAD"),
        "is_changed": bool(report.git("status", "--porcelain", "--untracked-files=no")),
        "flags": list(flags),
        "machine": {
            "processors": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }
