"""Draws what `shalekv top` shows: a line for each server, and one of them in detail.

Nothing here asks or waits: the same statuses make the same picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shalekv.cli.measures import US_PER_MS, moment, rate, share, size, time
from shalekv.cli.status_process import troubles
from shalekv.cli.top_rates import Between
from shalekv.cli.top_servers import Seen, ServerLines, alarming, plain_table, role_of
from shalekv_client import (
    CacheStatus,
    ReaderStatus,
    ReadStatus,
    SnapshotStatus,
    Status,
    WriterStatus,
)

ROWS_MAX = 8  # of calls, requests and snapshots


def picture(servers: Sequence[Seen]) -> RenderableType:
    """All servers, and the first that answers in detail."""
    shown = next((each for each in servers if each.after is not None), None)
    parts: list[RenderableType] = [ServerLines(servers)]
    parts += [
        Text(f"{each.address}: {each.problem}; trying again", style="red")
        for each in servers
        if each.problem
    ]
    parts += [
        Text(f"{each.address}: {trouble}", style="red")
        for each in servers
        if each.after is not None
        for trouble in troubles(each.after)
    ]
    if shown is not None and shown.after is not None:
        parts += [
            Text(),
            _title(shown.address, shown.after),
            *_details(Between(shown.before, shown.after), shown.after),
        ]
    return Group(*parts)


def _details(between: Between, after: Status) -> Iterable[RenderableType]:
    left = [_writing(between, after), _levels(after), _snapshots(after.snapshots)]
    right = [_calls(between), _caches(between, after), _store(between), _watches(after)]
    return [Columns([_below(left), _below(right)], padding=(0, 4))]


def _below(tables: Iterable[Table | None]) -> Group:
    """One below the other, with a line between two."""
    found = [table for table in tables if table is not None]
    return Group(*(part for table in found for part in (table, Text())))


def _title(address: str, status: Status) -> Text:
    role = role_of(status)
    up = time(status.uptime_ms * US_PER_MS)
    text = f"{address}, {role} of {status.url}, version {status.version}, up {up}"
    return Text(text, style="bold")


def _writing(between: Between, after: Status) -> Table:
    """How the process writes, or follows, and what of it is not in the levels yet."""
    before = between.before
    table = plain_table("writes" if after.writer is not None else "follows", "")
    if after.writer is not None:
        _add_writer(table, between, before.writer if before else None, after.writer)
    if after.reader is not None:
        _add_reader(table, between, before.reader if before else None, after.reader)
    table.add_row("memtable", share(after.memtable.bytes, after.memtable.bytes_max))
    table.add_row("manifest", f"{after.manifest.manifest_id:,}")
    if after.levels is not None:
        table.add_row("WAL to compact", f"{after.levels.wal_objects:,} objects")
        table.add_row("compaction debt", size(after.levels.debt_bytes))
    return table


def _add_writer(
    table: Table, between: Between, before: WriterStatus | None, after: WriterStatus
) -> None:
    commits = between.rate(after.commits, before.commits if before else 0)
    written = before.wal_objects_written if before else 0
    table.add_row("commits/s", rate(commits))
    table.add_row("WAL objects/s", rate(between.rate(after.wal_objects_written, written)))
    table.add_row("next WAL object", f"{after.next_wal_id:,}")
    in_flight = f"{after.wal_objects_in_flight} / {after.max_parallel_writes}"
    table.add_row("uploads in flight", in_flight)
    table.add_row("queued", share(after.queued_bytes, after.queued_bytes_max))


def _add_reader(
    table: Table, between: Between, before: ReaderStatus | None, after: ReaderStatus
) -> None:
    applied = before.wal_objects_applied if before else 0
    table.add_row("WAL objects/s", rate(between.rate(after.wal_objects_applied, applied)))
    table.add_row("next WAL object", f"{after.next_wal_id:,}")
    table.add_row("asks again in", time(after.poll_interval_ms * US_PER_MS))
    table.add_row("gaps", f"{after.gaps:,}, {time(after.gap_ms * US_PER_MS)} in all")
    table.add_row("snapshots lost", f"{after.snapshots_lost:,}")
    table.add_row("writer", Text(after.writer_address or "-"))
    if after.tails:
        tail = f"{after.tail_address or '-'}, {after.tails:,} begun"
        table.add_row("tail of safekeeper", Text(tail))


def _levels(status: Status) -> Table | None:
    levels = status.levels
    if levels is None or not levels.levels:
        return None
    table = plain_table("level", "SSTs", "bytes", "entries", "tombstones")
    for each in levels.levels:
        row = (each.ssts, size(each.bytes), each.entries, each.tombstones)
        table.add_row(str(each.level), *(x if isinstance(x, str) else f"{x:,}" for x in row))
    total = f"space x{levels.space_amplification:.2f}, reads up to {levels.read_amplification}"
    table.add_row("all", "", size(levels.bytes), "", "")
    table.caption = Text(total)
    return table


def _snapshots(snapshots: Sequence[SnapshotStatus]) -> Table | None:
    if not snapshots:
        return None
    table = plain_table(
        "snapshot", "manifest", "pins", "alone", "expires", texts=("snapshot", "expires")
    )
    ordered = sorted(snapshots, key=lambda each: -(each.pinned_alone_bytes or 0))
    for each in ordered[:ROWS_MAX]:
        table.add_row(
            Text(each.name or each.id.hex()),
            f"{each.manifest_id:,}",
            size(each.pinned_bytes),
            size(each.pinned_alone_bytes),
            moment(each.expire_time_s),
        )
    _tell_rest(table, len(snapshots))
    return table


def _calls(between: Between) -> Table:
    table = plain_table("call", "calls/s", "failed/s", "p50", "p99")
    calls = between.calls()
    for each in calls[:ROWS_MAX]:
        table.add_row(
            Text(each.method),
            rate(each.calls),
            alarming(each.failures),
            time(each.p50_us),
            time(each.p99_us),
        )
    _tell_rest(table, len(calls))
    return table


def _caches(between: Between, after: Status) -> Table | None:
    if after.reads is None:
        return None
    table = plain_table("cache", "hits", "fetched/s", "holds")
    before = between.before
    old = _caches_of(before.reads) if before and before.reads else {}
    for name, cache in _caches_of(after.reads).items():
        used = between.cache(cache, old.get(name))
        hits = "-" if used.hit_rate is None else f"{used.hit_rate:.1%}"
        held = share(cache.bytes, cache.bytes_max)
        table.add_row(name, hits, size(used.fetched_bytes), held)
    return table


def _caches_of(reads: ReadStatus) -> dict[str, CacheStatus]:
    found = {"blocks": reads.blocks, "metadata": reads.metadata}
    return found if reads.disk is None else {**found, "disk": reads.disk}


def _store(between: Between) -> Table | None:
    requests = between.requests()
    if not requests:
        return None
    table = plain_table(
        "store", "folder", "requests/s", "failed/s", "bytes/s", texts=("store", "folder")
    )
    for each in requests[:ROWS_MAX]:
        folder, failed = each.folder or "-", alarming(each.failures)
        table.add_row(each.operation, folder, rate(each.requests), failed, size(each.bytes))
    _tell_rest(table, len(requests))
    return table


def _watches(status: Status) -> Table | None:
    watches = status.watches
    if watches is None or not (watches.watches or watches.cut):
        return None
    table = plain_table("watches", "streams", "buffered", "catching up", "cut", texts=())
    table.add_row(
        f"{watches.watches:,}",
        f"{watches.streams:,}",
        size(watches.buffered_bytes),
        f"{watches.catching_up:,}",
        f"{watches.cut:,}",
    )
    return table


def _tell_rest(table: Table, count: int) -> None:
    if count > ROWS_MAX:
        table.caption = Text(f"and {count - ROWS_MAX:,} more")
