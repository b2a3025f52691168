"""`shalekv top`: show the load of servers, refreshed periodically.

A picture has a line for each server, and details of the first one that answers. Rates are computed
from two statuses of a process, over the time by its own clock; for a process that was restarted in
between, or was seen only once, they are averages since its start.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import click
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shalekv.cli.commands.status import role_of
from shalekv.cli.commands.status_problems import problems
from shalekv.cli.console.connection import ClientExit, Target, exit_codes_of_calls, target_options
from shalekv.cli.console.output import printing
from shalekv.cli.console.units import (
    NEVER,
    US_PER_MS,
    duration,
    rate,
    share,
    size,
    time,
)
from shalekv.wording import MS_PER_S, moment
from shalekv_client import (
    CacheStatus,
    CallStatus,
    Client,
    ProcessState,
    ReaderStatus,
    ReadStatus,
    RetryPolicy,
    ShaleKVError,
    SnapshotStatus,
    Status,
    WriterStatus,
)
from shalekv_client.status import percentile

WIDE_COLUMNS = 110  # of a terminal, for all columns of a server
ROWS_MAX = 8  # of calls, requests and snapshots
INTERVAL_MS_MIN = 100
FILE_COLUMNS = 160  # the width without a terminal
ONCE = RetryPolicy(attempts_max=1)  # the next picture is the retry

_COLUMNS = (
    *("server", "role", "epoch", "seq", "behind", "stale", "state"),
    *("calls/s", "failed/s", "p50", "p99", "memory", "watches"),
)
_LESS_IMPORTANT = frozenset({"epoch", "failed/s", "p50", "memory", "watches"})
# Streams are counted at their end, with their whole duration, which is no latency.
_STREAMS = frozenset({"KV.Session", "KV.Watch"})
_OWN = "Admin.Status"  # the call of this command

_HELP = """Show the load of servers, refreshed periodically, until Ctrl-C.

There is a line for each --addr: role, epoch, the last sequence number, how far it is behind the
most advanced of them, how old its state may be, calls per second and their latency. Below are
details of the first server that answers: writes or how it follows, levels, snapshots and what each
of them pins, calls, caches, requests to the object store, watches. Rates are those since the
previous picture.

A server that does not answer is shown with the error, and asked again. With --once, or if standard
output is no terminal, one picture is printed after one interval; if no server answers, the exit
code is 9.

\b
Examples:
  shalekv top
  shalekv top --addr 10.0.0.5:7654 --addr 10.0.0.6:7654,10.0.0.7:7654
  shalekv top --interval 5s
  shalekv top --once | head -3
"""


@dataclass(frozen=True, slots=True)
class CallRate:
    """The rate and the latencies of one method, or of several together."""

    method: str
    calls: float  # a second
    failures: float  # a second
    p50_us: float | None  # None: there was no call
    p99_us: float | None


@dataclass(frozen=True, slots=True)
class StoreRate:
    """The rate of one kind of requests to the object store."""

    operation: str
    folder: str
    requests: float  # a second
    failures: float  # a second
    bytes: float  # a second


@dataclass(frozen=True, slots=True)
class CacheRate:
    """The use of a cache."""

    hit_rate: float | None  # None: there was no read
    fetched_bytes: float  # a second


class Between:
    """The differences of two statuses of one process."""

    def __init__(self, before: Status | None, after: Status) -> None:
        """Rates count from the start if `before` is None, or of an earlier process."""
        if before is not None and before.uptime_ms >= after.uptime_ms:
            before = None
        self.before = before
        self._after = after
        begin_ms = 0 if before is None else before.uptime_ms
        self.seconds = max(1, after.uptime_ms - begin_ms) / 1000.0

    def rate(self, after: int, before: int | None) -> float:
        """The rate of a counter, per second."""
        return max(0, after - (before or 0)) / self.seconds

    def calls(self) -> list[CallRate]:
        """The rates of the methods that were called, the most frequent first."""
        found = [self._call_rate(each.method, [each]) for each in self._calls() if each.calls]
        return sorted(found, key=lambda each: (-each.calls, each.method))

    def all_calls(self) -> CallRate:
        """The rate of all methods together, without streams and requests of statuses."""
        ignored = _STREAMS | {_OWN}
        return self._call_rate("all", [c for c in self._calls() if c.method not in ignored])

    def requests(self) -> list[StoreRate]:
        """The rates of the requests that were sent, the most frequent first."""
        earlier = self.before.store_requests if self.before else ()
        begun = {(each.operation, each.folder): each for each in earlier}
        found = []
        for each in self._after.store_requests:
            old = begun.get((each.operation, each.folder))
            rate = StoreRate(
                each.operation,
                each.folder,
                self.rate(each.requests, old.requests if old else None),
                self.rate(each.failures, old.failures if old else None),
                self.rate(each.bytes, old.bytes if old else None),
            )
            if rate.requests:
                found.append(rate)
        return sorted(found, key=lambda each: (-each.requests, each.operation, each.folder))

    def cache(self, after: CacheStatus, before: CacheStatus | None) -> CacheRate:
        """The use of one cache."""
        known = before if self.before is not None else None
        hits = after.hits - (known.hits if known else 0)
        misses = after.misses - (known.misses if known else 0)
        asked = hits + misses
        fetched = self.rate(after.fetched_bytes, known.fetched_bytes if known else None)
        return CacheRate(hits / asked if asked > 0 else None, fetched)

    def _calls(self) -> Iterator[CallStatus]:
        begun = {each.method: each for each in (self.before.calls if self.before else ())}
        for each in self._after.calls:
            yield each.since(begun.get(each.method))

    def _call_rate(self, method: str, calls: Sequence[CallStatus]) -> CallRate:
        longest = max((len(each.histogram_us) for each in calls), default=0)
        histogram = [
            sum(each.histogram_us[number] for each in calls if number < len(each.histogram_us))
            for number in range(longest)
        ]
        return CallRate(
            method,
            sum(each.calls for each in calls) / self.seconds,
            sum(each.failures for each in calls) / self.seconds,
            None if method in _STREAMS else percentile(histogram, 0.5),
            None if method in _STREAMS else percentile(histogram, 0.99),
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Two statuses of a server; `after` is None when it does not answer."""

    address: str
    before: Status | None
    after: Status | None
    problem: str = ""  # why it does not answer


class ServerLines:
    """A line for each server, with as many columns as fit on the terminal."""

    def __init__(self, servers: Sequence[Observed]) -> None:
        self._servers = servers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table."""
        del console
        columns = [
            name
            for name in _COLUMNS
            if options.max_width >= WIDE_COLUMNS or name not in _LESS_IMPORTANT
        ]
        table = plain_table(*columns, texts=("server", "role", "state"))
        answering = [each.after for each in self._servers if each.after is not None]
        newest = max((status.view.seq for status in answering), default=0)
        for each in self._servers:
            cells = _server_cells(each, newest)
            table.add_row(*(cells.get(name, "-") for name in columns))
        yield table


def _server_cells(server: Observed, newest_seq: int) -> dict[str, str | Text]:
    status = server.after
    if status is None:
        return {"server": Text(server.address), "state": Text("no answer", style="red")}
    calls = Between(server.before, status).all_calls()
    return {
        "server": Text(server.address),
        "role": role_of(status),
        "epoch": str(status.view.epoch),
        "seq": str(status.view.seq),
        "behind": f"{newest_seq - status.view.seq:,}",
        "stale": time(status.view.staleness_ms * US_PER_MS),
        "state": _state(status),
        "calls/s": rate(calls.calls),
        "failed/s": alarming(calls.failures),
        "p50": time(calls.p50_us),
        "p99": time(calls.p99_us),
        "memory": size(status.memory.bytes),
        "watches": f"{status.watches.watches:,}" if status.watches else "-",
    }


def _state(status: Status) -> Text:
    reader = status.reader
    failing = {
        calls
        for calls, each in (("reads", status.read_readiness), ("writes", status.write_readiness))
        if each is not None and not each.is_ready
    }
    if failing:
        return Text("fails" if len(failing) > 1 else f"{failing.pop()} fail", style="red")
    if reader is None:
        return Text("serves" if status.writer else "-")
    state = reader.state.name.lower().replace("_", " ") if reader.state else "?"
    serving = sum(each.state is ProcessState.SERVING for each in status.processes)
    if serving < len(status.processes):
        return Text(f"{serving} of {len(status.processes)} serve", style="yellow")
    return Text(state, style="" if state == "following" else "yellow")


def plain_table(*columns: str, texts: Sequence[str] | None = None) -> Table:
    """Create an empty table. Columns hold numbers, except `texts` (default: the first one)."""
    table = Table(box=None, header_style="bold cyan", pad_edge=False)
    table.caption_justify = "left"
    for name in columns:
        is_text = name in (columns[:1] if texts is None else texts)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def alarming(value: float) -> Text:
    """Format a rate that should be 0, in red if it is not."""
    return Text(rate(value), style="red" if value else "")


def picture(servers: Sequence[Observed]) -> RenderableType:
    """Draw all servers, and details of the first that answers. Pure: it makes no calls."""
    shown = next((each for each in servers if each.after is not None), None)
    parts: list[RenderableType] = [ServerLines(servers)]
    parts += [
        Text(f"{each.address}: {each.problem}; trying again", style="red")
        for each in servers
        if each.problem
    ]
    parts += [
        Text(f"{each.address}: {problem.text}", style="red")
        for each in servers
        if each.after is not None
        for problem in problems(each.after)
    ]
    if shown is not None and shown.after is not None:
        parts += [
            Text(),
            _title(shown.address, shown.after),
            *_details(Between(shown.before, shown.after), shown.after),
        ]
    return Group(*parts)


def _details(between: Between, after: Status) -> Iterable[RenderableType]:
    left = [_writing(between, after), _processes(between, after), _levels(after)]
    left.append(_snapshots(after.snapshots))
    right = [_calls(between), _caches(between, after), _store(between), _watches(after)]
    return [Columns([_stacked(left), _stacked(right)], padding=(0, 4))]


def _stacked(tables: Iterable[Table | None]) -> Group:
    """Tables one below the other, with an empty line in between."""
    found = [table for table in tables if table is not None]
    return Group(*(part for table in found for part in (table, Text())))


def _title(address: str, status: Status) -> Text:
    role = role_of(status)
    up = time(status.uptime_ms * US_PER_MS)
    text = f"{address}, {role} of {status.url}, version {status.version}, up {up}"
    return Text(text, style="bold")


def _writing(between: Between, after: Status) -> Table:
    """Table of writes, or of following the writer, and of data that is not yet in the levels."""
    before = between.before
    table = plain_table("writes" if after.writer is not None else "follows", "")
    if after.writer is not None:
        _add_writer(table, between, before.writer if before else None, after.writer)
    if after.reader is not None:
        _add_reader(table, between, before.reader if before else None, after.reader)
    table.add_row("memtable", share(after.memtable.bytes, after.memtable.bytes_max))
    table.add_row("manifest", str(after.manifest.manifest_id))
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
    table.add_row("next WAL object", str(after.next_wal_id))
    in_flight = f"{after.wal_objects_in_flight} / {after.max_parallel_writes}"
    table.add_row("uploads in flight", in_flight)
    table.add_row("queued", share(after.queued_bytes, after.queued_bytes_max))


def _add_reader(
    table: Table, between: Between, before: ReaderStatus | None, after: ReaderStatus
) -> None:
    applied = before.wal_objects_applied if before else 0
    table.add_row("WAL objects/s", rate(between.rate(after.wal_objects_applied, applied)))
    table.add_row("next WAL object", str(after.next_wal_id))
    table.add_row("asks again in", time(after.poll_interval_ms * US_PER_MS))
    table.add_row("gaps", f"{after.gaps:,}, {time(after.gap_ms * US_PER_MS)} in all")
    table.add_row("snapshots lost", f"{after.snapshots_lost:,}")
    table.add_row("writer", Text(after.writer_address or "-"))
    if after.tails:
        tail = f"{after.tail_address or '-'}, {after.tails:,} begun"
        table.add_row("tail of safekeeper", Text(tail))


def _processes(between: Between, after: Status) -> Table | None:
    """Table of the processes that share the port."""
    if not after.processes:
        return None
    table = plain_table("process", "state", "calls/s", "seq", "stale", "up", "replaced")
    earlier = {
        each.pid: each.calls for each in (between.before.processes if between.before else ())
    }
    for each in after.processes:
        table.add_row(
            str(each.number),
            each.state.name.lower() if each.state else "?",
            rate(between.rate(each.calls, earlier.get(each.pid))),
            str(each.seq) if each.seq else "-",
            time(each.staleness_ms * US_PER_MS if each.seq else None),
            time(each.uptime_ms * US_PER_MS),
            f"{each.replacements:,}",
        )
    return table


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
            str(each.manifest_id),
            size(each.pinned_bytes),
            size(each.pinned_alone_bytes),
            moment(each.expire_time_s * MS_PER_S) if each.expire_time_s else NEVER,
        )
    _note_rest(table, len(snapshots))
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
    _note_rest(table, len(calls))
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
    _note_rest(table, len(requests))
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


def _note_rest(table: Table, count: int) -> None:
    if count > ROWS_MAX:
        table.caption = Text(f"and {count - ROWS_MAX:,} more")


@click.command(help=_HELP, epilog=exit_codes_of_calls(until_interrupted=True))
@click.option(
    "--interval",
    "interval_ms",
    callback=duration,
    default="1s",
    show_default=True,
    metavar="TIME",
    help="The time between two pictures, such as 500ms or 5s.",
)
@click.option("--once", is_flag=True, help="Print one picture, and end.")
@target_options
def top(*, interval_ms: int, once: bool, target: Target) -> None:
    """Show pictures, or print one."""
    if interval_ms < INTERVAL_MS_MIN:
        raise click.BadParameter(f"at least {INTERVAL_MS_MIN}ms", param_hint="--interval")
    if once or not sys.stdout.isatty():
        with printing():
            is_answered = asyncio.run(_print_once(target, interval_ms))
        if not is_answered:
            raise SystemExit(ClientExit.UNREACHABLE)
        return
    try:
        asyncio.run(_show(target, interval_ms))
    except KeyboardInterrupt:
        return  # the usual end


async def _print_once(target: Target, interval_ms: int) -> bool:
    """Print one picture after one interval. Returns whether any server has answered."""
    is_file = not sys.stdout.isatty()
    console = Console(width=FILE_COLUMNS if is_file and "COLUMNS" not in os.environ else None)
    async with _Servers(target) as servers:
        await servers.poll()
        await asyncio.sleep(interval_ms / 1000.0)
        observed = await servers.poll()
    console.print(picture(observed))
    return any(each.after is not None for each in observed)


async def _show(target: Target, interval_ms: int) -> None:
    console = Console()
    async with _Servers(target) as servers:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(await servers.poll()), refresh=True)
                await asyncio.sleep(interval_ms / 1000.0)


class _Servers:
    """A client for each address, and the last status of its server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._clients: dict[str, Client] = {}
        self._last: dict[str, Status] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for address in self._target.addresses:
            client = self._target.client(address, retry=ONCE)
            self._clients[address] = await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def poll(self) -> Sequence[Observed]:
        """Request the status of all servers concurrently."""
        return await asyncio.gather(*map(self._poll_one, self._clients))

    async def _poll_one(self, address: str) -> Observed:
        before = self._last.pop(address, None)
        try:
            status = self._last[address] = await self._clients[address].status()
        except ShaleKVError as error:
            return Observed(address, before, None, str(error).removeprefix(f"{address}: "))
        return Observed(address, before, status)
