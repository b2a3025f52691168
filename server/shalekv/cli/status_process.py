"""The sections of a status about what a process does: following, watches, calls."""

from __future__ import annotations

from collections.abc import Iterator

from shalekv.cli.console.output import Format, print_line, print_record, print_rows, record_of
from shalekv.core.trouble import duration_text
from shalekv_client import CallStatus, QuorumStatus, Status

_US_PER_MS = 1_000.0
_IN_ROWS = ("members", "archiver_id")  # of a quorum


def troubles(status: Status) -> Iterator[str]:
    """Yield a sentence for reads and for writes, where they do not succeed."""
    found = {"reads": status.read_readiness, "writes": status.write_readiness}
    for calls, readiness in found.items():
        if readiness is not None and not readiness.is_ready:
            duration = duration_text(readiness.unready_ms)
            yield f"{calls} fail: {readiness.cause} for {duration}: {readiness.problem}"


def print_heading(text: str) -> None:
    """What a section begins with."""
    print_line(f"\n{text}")


def print_process(status: Status) -> None:
    """What of it there is."""
    if status.reader is not None:
        print_heading("Following the writer")
        print_record(Format.TABLE, record_of(status.reader))
    if status.quorum is not None:
        _print_quorum(status.quorum)
    if status.watches is not None and (status.watches.watches or status.watches.cut):
        print_heading("Watches")
        print_record(Format.TABLE, record_of(status.watches))
    if status.calls:
        print_heading("Calls since the start")
        columns = ("method", "calls", "failures", "mean_ms", "p50_ms", "p99_ms")
        print_rows(Format.TABLE, columns, map(_call_row, status.calls))


def _print_quorum(quorum: QuorumStatus) -> None:
    print_heading("Safekeepers")
    parts = {name: value for name, value in record_of(quorum).items() if name not in _IN_ROWS}
    print_record(Format.TABLE, {**parts, "archiver": quorum.archiver})
    columns = ("member", "follows", "flushed_lsn", "archived_wal_id", "full", "problem")
    rows = [
        (
            each.address + (" (to be)" if each.is_next else ""),
            "yes" if each.is_connected else "no",
            each.flushed_lsn,
            "" if each.archived_wal_id is None else each.archived_wal_id,
            "yes" if each.is_full else "no",
            each.problem,
        )
        for each in quorum.members
    ]
    print_rows(Format.TABLE, columns, rows)


def _call_row(call: CallStatus) -> tuple[str, int, int, str, str, str]:
    mean_us = call.total_us / max(1, call.calls)
    times = (mean_us, call.percentile_us(0.5), call.percentile_us(0.99))
    mean, p50, p99 = (f"{(us or 0.0) / _US_PER_MS:,.2f}" for us in times)
    return (call.method, call.calls, call.failures, mean, p50, p99)
