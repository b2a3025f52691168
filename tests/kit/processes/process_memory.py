"""Memory of a process, as Linux reports it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    return _status_bytes(pid, "VmRSS")


def most_resident_bytes(pid: int) -> int:
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
