"""CPU time and resident memory of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shalekv.telemetry.metrics import Metrics

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The resident bytes of this process; 0 on a system without /proc."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def add_process_use(metrics: Metrics, process: str) -> None:
    """Add what this process uses, whose role is `process`."""
    metrics.add("process_cpu_seconds", time.process_time(), process)
    if resident := resident_bytes():
        metrics.add("process_resident_bytes", resident, process)
