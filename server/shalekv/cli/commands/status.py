"""`shalekv status`: print the status of a server.

For people it has a section for each part, and remarks on unusual figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, talk, target_options
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
    record_of,
)
from shalekv.wording import counted, duration_text
from shalekv_client import (
    CacheStatus,
    CallStatus,
    Client,
    LevelsStatus,
    ProcessStatus,
    QuorumStatus,
    ReadStatus,
    Status,
)

# Figures from these on get a remark.
NEARLY_FULL = 0.75  # of a limit
LOW_HIT_RATE = 0.5
READS_MIN = 1_000  # fewer reads are not significant
DEEP_READS = 12  # SSTs for one key
WASTED_SPACE = 2.0

_US_PER_MS = 1_000.0
_IN_ROWS = ("members", "archiver_id")  # fields of a quorum that are printed as rows

_HELP = """Print the status of a server.

It includes the role, epoch, write path and memory; the levels and their amplification, caches,
filters, requests to the object store, and what snapshots pin. On a terminal it also remarks on
unusual figures: why reads are slow, writes wait, or the object store fills up.

\b
Examples:
  shalekv status
  shalekv status --addr 10.0.0.5:7654 --format json | jq .writer.commits
  shalekv status --format raw | grep memtable
"""


def troubles(status: Status) -> Iterator[str]:
    """Yield a sentence for each of reads and writes that fail."""
    found = {"reads": status.read_readiness, "writes": status.write_readiness}
    for calls, readiness in found.items():
        if readiness is not None and not readiness.is_ready:
            duration = duration_text(readiness.unready_ms)
            yield f"{calls} fail: {readiness.cause} for {duration}: {readiness.problem}"


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
        columns = ("method", "calls", "failures", "mean_ms", "p50_ms", "p99_ms")
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


def print_sections(status: Status) -> None:
    """Print the whole status for people."""
    view = status.view
    print_heading(f"{status.url}, served by version {status.version}")
    parts = {"view": record_of(view), "uptime_ms": status.uptime_ms}
    print_record(Format.TABLE, parts)
    for trouble in troubles(status):
        print_line(trouble)
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
    remarks = list(remarks_on(status))
    if remarks:
        print_heading("Remarks")
        for remark in remarks:
            print_line(f"- {remark}")


def remarks_on(status: Status) -> Iterator[str]:
    """Yield explanations of slow reads, waiting writes, and a full object store."""
    memtable = status.memtable
    if memtable.bytes > NEARLY_FULL * memtable.bytes_max:
        yield (
            f"{memtable.bytes:,} of {memtable.bytes_max:,} bytes are not compacted: at the limit "
            "writes are refused. Is a compactor running?"
        )
    writer = status.writer
    if writer is not None and writer.queued_bytes > NEARLY_FULL * writer.queued_bytes_max:
        yield (
            f"{writer.queued_bytes:,} of {writer.queued_bytes_max:,} bytes wait for the object "
            "store: at the limit writes wait, too"
        )
    if status.quorum is not None:
        yield from _quorum_remarks(status.quorum)
    if status.levels is not None:
        yield from _levels_remarks(status.levels)
    if status.reads is not None:
        yield from _cache_remarks("blocks", "block_cache_bytes", status.reads.blocks)
        yield from _cache_remarks(
            "filters and indexes", "metadata_cache_bytes", status.reads.metadata
        )
    pinned = max((each.pinned_alone_bytes or 0 for each in status.snapshots), default=0)
    if status.levels is not None and pinned > status.levels.bytes:
        yield f"one snapshot alone keeps {pinned:,} bytes, more than the levels have"


def _quorum_remarks(quorum: QuorumStatus) -> Iterator[str]:
    missing = [each.address for each in quorum.members if not each.is_connected]
    if missing:
        yield (
            f"{', '.join(missing)} do not follow: losing one more may stop writes. Start them "
            "again, or replace them by others (`shalekv safekeeper replace`)"
        )


def _levels_remarks(levels: LevelsStatus) -> Iterator[str]:
    if levels.read_amplification >= DEEP_READS:
        yield (
            f"a read may have to search {levels.read_amplification} SSTs: compaction is behind "
            f"by about {levels.debt_bytes:,} bytes"
        )
    if levels.space_amplification >= WASTED_SPACE:
        yield (
            f"the levels take {levels.space_amplification:.1f} times the size of the lowest one: "
            "compaction is behind, or most of the data was overwritten"
        )


def _cache_remarks(what: str, setting: str, cache: CacheStatus) -> Iterator[str]:
    if cache.hits + cache.misses >= READS_MIN and cache.hit_rate < LOW_HIT_RATE:
        yield (
            f"only {cache.hit_rate:.0%} of the reads of {what} are served from memory; the others "
            f"wait for the object store. {setting} is {cache.bytes_max:,}"
        )


def _print_levels(levels: LevelsStatus) -> None:
    print_heading("Levels")
    columns = ("level", "ssts", "bytes", "entries", "tombstones")
    if levels.levels:
        print_rows(Format.TABLE, columns, [_cells(each, columns) for each in levels.levels])
    print_line(
        f"{levels.bytes:,} bytes; not compacted: {counted(levels.wal_objects, 'WAL object')} with "
        f"{levels.uncompacted_bytes:,} bytes in memory; debt about {levels.debt_bytes:,} bytes"
    )
    if levels.levels:
        print_line(
            f"space amplification {levels.space_amplification:.2f}; a read searches at most "
            f"{counted(levels.read_amplification, 'SST')}"
        )


def _print_reads(reads: ReadStatus) -> None:
    print_heading("Reads of the levels since the start")
    rows = [_cache_row("blocks", reads.blocks), _cache_row("metadata", reads.metadata)]
    if reads.disk is not None:
        rows.append(_cache_row("disk", reads.disk))
    columns = ("cache", "hit_rate", "hits", "misses", "requests", "fetched", "bytes", "bytes_max")
    print_rows(Format.TABLE, columns, rows)
    print_line(
        f"filters saved {counted(reads.filter_negatives, 'lookup')} from reading a block, and let "
        f"{reads.filter_false_positives:,} read one in vain"
    )


def _cache_row(name: str, cache: CacheStatus) -> Sequence[Any]:
    return (
        name,
        f"{cache.hit_rate:.1%}",
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
    print_heading("Snapshots, and the bytes that they keep beyond the current manifest")
    columns = ("snapshot", "manifest_id", "expires_s", "pinned_bytes", "alone_bytes")
    rows = [
        (
            each.name or each.id.hex(),
            each.manifest_id,
            each.expire_time_s or None,
            each.pinned_bytes,
            each.pinned_alone_bytes,
        )
        for each in status.snapshots
    ]
    print_rows(Format.TABLE, columns, rows)


def _cells(value: object, columns: Sequence[str]) -> Sequence[Any]:
    return [getattr(value, column) for column in columns]


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@format_option
@target_options
def status(*, output_format: Format, target: Target) -> None:
    """Print the status."""

    async def call(client: Client) -> Status:
        return await client.status()

    found = talk(target, call)
    with printing():
        if output_format is Format.TABLE:
            print_sections(found)
        else:
            print_record(output_format, _record(found, output_format))


def _record(found: Status, output_format: Format) -> Record:
    record: dict[str, Any] = record_of(found)
    if output_format is Format.RAW:  # omit a line for each bucket of each method
        for call in record["calls"]:
            del call["histogram_us"]
        if not found.processes:
            del record["processes"]
    return record
