"""`shalekv status`: print the status of a server.

For people it begins with what is wrong, or that all is well, and a summary; --verbose adds a
section for each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from shalekv.cli.commands.status_problems import problems, remarks
from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.output import (
    GAP,
    Format,
    Record,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
    record_of,
)
from shalekv.cli.console.talking import talk
from shalekv.cli.console.units import US_PER_MS, share, size, time
from shalekv.wording import counted
from shalekv_client import (
    CacheStatus,
    CallStatus,
    Client,
    LevelsStatus,
    ProcessState,
    ProcessStatus,
    QuorumStatus,
    ReadStatus,
    Status,
)

_IN_ROWS = ("members", "archiver_id")  # fields of a quorum that are printed as rows

_HELP = """Print whether all is well with a server, and a summary of its state.

The first line is "All is well", or one line for each problem begins with "Problem": writes or reads
that fail, a compaction or a safekeeper that is behind, memory near its limit. Each says what to do.
Remarks explain what is no problem, such as slow reads. The exit code is 0 if the server answers:
`shalekv health` tells by its exit code whether it is ready.

With --verbose follow the write path and memory; the levels and their amplification, caches,
filters, calls, requests to the object store, and what snapshots pin. The formats json and raw have
everything.

\b
Examples:
  shalekv status
  shalekv status -v
  shalekv status --addr 10.0.0.5:7654 --format json | jq .writer.commits
  shalekv status --format raw | grep memtable
"""


def print_summary(status: Status) -> None:
    """Print the problems, or that there are none; then the state in some lines, and remarks."""
    found = list(problems(status))
    for each in found:
        print_line(f"Problem: {each.text}. {each.advice}")
    if not found:
        print_line("All is well.")
    print_line("")
    lines = dict(_summary(status))
    width = max(map(len, lines))
    for name, text in lines.items():
        print_line(f"{name:<{width}}{GAP}{text}")
    for number, remark in enumerate(remarks(status)):
        print_line(remark if number else f"\n{remark}")


def _summary(status: Status) -> Iterator[tuple[str, str]]:
    view, memory = status.view, status.memory
    yield "role", f"{role_of(status)}, epoch {view.epoch}"
    yield "database", status.url
    yield "version", f"{status.version}, up {time(status.uptime_ms * US_PER_MS)}"
    yield "newest commit", f"seq {view.seq}{_written(status)}"
    if status.reader is not None:
        writer_address = status.reader.writer_address or "at an unknown address"
        yield "follows", f"the writer {writer_address}; at most {_age(status)} behind"
    if status.quorum is not None:
        members = status.quorum.members
        following = sum(each.is_connected for each in members)
        yield "safekeepers", f"{following} of {len(members)} follow"
    if status.processes:
        serving = sum(each.state is ProcessState.SERVING for each in status.processes)
        yield "processes", f"{serving} of {len(status.processes)} serve"
    if status.calls:
        calls = sum(each.calls for each in status.calls)
        failures = sum(each.failures for each in status.calls)
        yield "calls", f"{calls:,} since the start, {failures:,} failed"
    if memory.bytes_max:
        yield "memory", share(memory.bytes, memory.bytes_max)
    if status.levels is not None:
        ssts = sum(each.ssts for each in status.levels.levels)
        yield "levels", f"{counted(ssts, 'SST')}, {size(status.levels.bytes)}"
        objects = counted(status.levels.wal_objects, "WAL object")
        not_merged = share(status.memtable.bytes, status.memtable.bytes_max)
        yield "not merged", f"{objects}, {not_merged} in memory"
    if status.snapshots:
        yield "snapshots", f"{len(status.snapshots):,}"
    if status.watches is not None and status.watches.watches:
        yield "watches", f"{status.watches.watches:,}"


def role_of(status: Status) -> str:
    """The name of the role of a process."""
    return status.view.role.name.lower() if status.view.role else "?"


def _written(status: Status) -> str:
    if status.writer is None:
        return ""
    return f", {counted(status.writer.commits, 'commit')} since the start"


def _age(status: Status) -> str:
    return time(status.view.staleness_ms * US_PER_MS)


def print_heading(text: str) -> None:
    """Print the heading of a section."""
    print_line(f"\n{text}")


def print_process(status: Status) -> None:
    """Print the sections about processes, following, safekeepers, watches and calls."""
    if status.processes:
        print_heading("Processes")
        names = ("process", "state", "pid", "uptime_ms", "replacements", "seq", "stale_ms", "calls")
        print_rows(Format.TABLE, names, map(_process_row, status.processes))
    if status.reader is not None:
        print_heading("Following the writer")
        print_record(Format.TABLE, record_of(status.reader))
    if status.quorum is not None:
        _print_quorum(status.quorum)
    if status.watches is not None and (status.watches.watches or status.watches.cut):
        print_heading("Watches")
        print_record(Format.TABLE, record_of(status.watches))
    if status.access is not None and any(record_of(status.access).values()):
        print_heading("Refused since the start")
        print_record(Format.TABLE, record_of(status.access))
    if status.calls:
        print_heading("Calls since the start")
        columns = ("method", "calls", "failures", "mean_us", "p50_us", "p99_us")
        print_rows(Format.TABLE, columns, map(_call_row, status.calls))


def _process_row(process: ProcessStatus) -> Sequence[Any]:
    return (
        process.number,
        process.state.name.lower() if process.state else "?",
        process.pid or None,
        process.uptime_ms,
        process.replacements,
        process.seq or None,
        process.staleness_ms if process.seq else None,
        process.calls,
    )


def _print_quorum(quorum: QuorumStatus) -> None:
    print_heading("Safekeepers")
    parts = {name: value for name, value in record_of(quorum).items() if name not in _IN_ROWS}
    print_record(Format.TABLE, {**parts, "archiver": quorum.archiver})
    columns = ("member", "follows", "flushed_lsn", "archived_wal_id", "full", "problem")
    rows = [
        (
            each.address + (" (to be)" if each.is_next else ""),
            each.is_connected,
            each.flushed_lsn,
            each.archived_wal_id,
            each.is_full,
            each.problem,
        )
        for each in quorum.members
    ]
    print_rows(Format.TABLE, columns, rows)


def _call_row(call: CallStatus) -> Sequence[Any]:
    mean_us = call.total_us / max(1, call.calls)
    times = (mean_us, call.percentile_us(0.5), call.percentile_us(0.99))
    return (call.method, call.calls, call.failures, *times)


def print_sections(status: Status) -> None:
    """Print a section for each part of the status."""
    print_heading("View")
    print_record(Format.TABLE, {"view": record_of(status.view), "uptime_ms": status.uptime_ms})
    if status.writer is not None:
        print_heading("Writes")
        print_record(Format.TABLE, record_of(status.writer))
    print_heading("Manifest and memtable")
    print_record(
        Format.TABLE,
        {"manifest": record_of(status.manifest), "memtable": record_of(status.memtable)},
    )
    if status.memory.parts:
        print_heading("Memory")
        rows = [(part.name, part.bytes, part.bytes_max) for part in status.memory.parts]
        total = ("all", status.memory.bytes, status.memory.bytes_max)
        print_rows(Format.TABLE, ("part", "bytes", "bytes_max"), [*rows, total])
    if status.levels is not None:
        _print_levels(status.levels)
    if status.reads is not None:
        _print_reads(status.reads)
    print_process(status)
    if status.store_requests:
        print_heading("Requests to the object store since the start")
        columns = ("operation", "folder", "requests", "failures", "objects", "bytes")
        print_rows(Format.TABLE, columns, [_cells(each, columns) for each in status.store_requests])
    _print_snapshots(status)


def _print_levels(levels: LevelsStatus) -> None:
    print_heading("Levels")
    columns = ("level", "ssts", "bytes", "entries", "tombstones")
    if levels.levels:
        print_rows(Format.TABLE, columns, [_cells(each, columns) for each in levels.levels])
    print_line(
        f"{size(levels.bytes)}; not yet merged into the levels: "
        f"{counted(levels.wal_objects, 'WAL object')} with {size(levels.uncompacted_bytes)} in "
        f"memory; compactions have to read about {size(levels.debt_bytes)}"
    )
    if levels.levels:
        print_line(
            f"Space amplification: {levels.space_amplification:.2f}. Reading a key opens at most "
            f"{counted(levels.read_amplification, 'SST')}."
        )


def _print_reads(reads: ReadStatus) -> None:
    print_heading("Reads of the levels since the start")
    rows = [_cache_row("blocks", reads.blocks), _cache_row("metadata", reads.metadata)]
    if reads.disk is not None:
        rows.append(_cache_row("disk", reads.disk))
    columns = ("cache", "hit_rate", "hits", "misses", "requests", "fetched_bytes")
    print_rows(Format.TABLE, (*columns, "bytes", "bytes_max"), rows)
    print_line(
        f"Bloom filters: {counted(reads.filter_negatives, 'read')} avoided, "
        f"{counted(reads.filter_false_positives, 'false positive')}"
    )


def _cache_row(name: str, cache: CacheStatus) -> Sequence[Any]:
    return (
        name,
        f"{cache.hit_rate:.1%}" if cache.hits + cache.misses else None,
        cache.hits,
        cache.misses,
        cache.requests,
        cache.fetched_bytes,
        cache.bytes,
        cache.bytes_max,
    )


def _print_snapshots(status: Status) -> None:
    if not status.snapshots:
        return
    print_heading("Snapshots, and the bytes that are kept only for them")
    columns = ("snapshot", "manifest_id", "expire_time_s", "pinned_bytes", "alone_bytes")
    rows = [
        (
            each.name or each.id.hex(),
            each.manifest_id,
            each.expire_time_s,
            each.pinned_bytes,
            each.pinned_alone_bytes,
        )
        for each in status.snapshots
    ]
    print_rows(Format.TABLE, columns, rows)


def _cells(value: object, columns: Sequence[str]) -> Sequence[Any]:
    return [getattr(value, column) for column in columns]


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option("--verbose", "-v", is_flag=True, help="Print a section for each part, too.")
@format_option
@target_options
def status(*, verbose: bool, output_format: Format, target: Target) -> None:
    """Print the status."""

    async def call(client: Client) -> Status:
        return await client.status()

    found = talk(target, call)
    with printing():
        if output_format is not Format.TABLE:
            print_record(output_format, _record(found, output_format))
            return
        print_summary(found)
        if verbose:
            print_sections(found)


def _record(found: Status, output_format: Format) -> Record:
    record: dict[str, Any] = record_of(found)
    if output_format is Format.RAW:  # omit a line for each bucket of each method
        for call in record["calls"]:
            del call["histogram_us"]
        if not found.processes:
            del record["processes"]
    return record
