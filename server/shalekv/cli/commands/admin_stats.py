"""`shalekv admin stats`: requests to the object store per minute, and their estimated cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.cli.console.talking import talk
from shalekv.cli.console.units import US_PER_S, time
from shalekv.telemetry.prices import AS_OF, KINDS, OBJECTS, PriceList, price_list
from shalekv_client import (
    Client,
    CostDimension,
    OriginCost,
    ProcessRequests,
    RequestKind,
    Stats,
)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ALL = "all"  # the total of processes, or of kinds
COLUMNS = ("process", "kind", "requests", "per_minute", "usd_per_month")
ORIGIN_COLUMNS = ("calls", "requests", "usd", "usd_per_hour", "usd_per_1000_calls")
SERVING = ("writer", "reader")  # the roles whose calls have origins
INTERVAL_S_MAX = 86_400
SHORT_MS = 10 * 60_000  # up to this uptime the requests of the start outweigh the rest

_MINUTE_MS, _HOUR_MS = 60_000, 3_600_000
_HOURS_PER_MONTH = 30 * 24
_PRICE_FLAGS: Mapping[str, str] = {
    kind: f"--usd-per-1000-{kind.replace('_', '-')}s" for kind in KINDS
}

_HELP = f"""Print the number of requests to the object store per minute, and their estimated cost.

For each process of a server, and each kind of request that stores charge for: the average since the
start, or with --interval-s the rate from now on. A compactor or a collector that runs separately
logs its own requests, and is not included.

With --by: what the calls of each method, principal or prefix of keys have cost, in all, per hour
and per 1,000 calls. "background" is what no call has caused, "other" are those with little cost.
These are the requests of what answers calls, without compactor and collector: of a reader with
--processes, those of all of them, and of those before them. Of one that has crashed, the last
second, or its start, may be missing.
Commits that share a request are charged in turn, so the costs of a few are a matter of chance, and
so are the calls of a prefix.

The cost is an estimate: the rate for 30 days, at list prices as published in {AS_OF}, which
--prices and --usd-per-1000-... override. Storage, traffic, discounts and free monthly quotas are
not included.

\b
Examples:
  shalekv admin stats --interval-s 60
  shalekv admin stats --addr 10.0.0.5:7654 --format json | jq 'select(.process == "all")'
  shalekv admin stats --by principal --interval-s 3600
  shalekv admin stats --prices r2
  shalekv admin stats --usd-per-1000-writes 0.0054 --usd-per-1000-lists 0.0054
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """The requests of one kind by one process; either may be `ALL`."""

    process: str
    kind: str
    requests: int
    per_minute: Mapping[str, float]  # by kind


def since_start(stats: Stats) -> list[Rate]:
    """Averages since the start, by process and kind, and their totals."""
    return _with_totals(_rates(stats.processes))


def between(before: Stats, after: Stats) -> list[Rate]:
    """Rates between two reports; for a process that started in between, since its start."""
    begun = {process.role: process for process in before.processes}
    return _with_totals(
        _rates(_since(begun.get(process.role), process) for process in after.processes)
    )


def _since(before: ProcessRequests | None, after: ProcessRequests) -> ProcessRequests:
    if before is None or before.uptime_ms > after.uptime_ms:
        return after
    return ProcessRequests(
        after.role,
        after.uptime_ms - before.uptime_ms,
        {kind: max(0, sent - before.requests[kind]) for kind, sent in after.requests.items()},
    )


def _rates(processes: Iterable[ProcessRequests]) -> Iterator[Rate]:
    for process in processes:
        for kind, sent in process.requests.items():
            if sent:
                per_minute = sent * _MINUTE_MS / max(1, process.uptime_ms)
                yield Rate(process.role, _name(kind), sent, {_name(kind): per_minute})


def _with_totals(rates: Iterable[Rate]) -> list[Rate]:
    """The rates, then those of each kind over all processes, then the sum of everything."""
    found = list(rates)
    kinds = [_name(kind) for kind in RequestKind]
    totals = [
        _sum(kind, members)
        for kind in kinds
        if (members := [rate for rate in found if rate.kind == kind])
    ]
    return [*found, *totals, _sum(ALL, totals)]


def _sum(kind: str, rates: Iterable[Rate]) -> Rate:
    requests, per_minute = 0, dict[str, float]()
    for rate in rates:
        requests += rate.requests
        for each, value in rate.per_minute.items():
            per_minute[each] = per_minute.get(each, 0.0) + value
    return Rate(ALL, kind, requests, per_minute)


@dataclass(frozen=True, slots=True)
class Spent:
    """Calls and requests of one origin in some time, or of all of them."""

    name: str
    calls: int
    requests: Mapping[str, int]  # by kind

    def row(self, hours: float, prices: PriceList) -> Sequence[Any]:
        """The cells of its row; a cost is None if the price is not known."""
        usd = prices.dollars(self.requests)
        per_hour = None if usd is None else _rounded(usd / hours)
        per_call = None if usd is None or not self.calls else _rounded(usd / self.calls * 1_000)
        return (self.name, self.calls, sum(self.requests.values()), usd, per_hour, per_call)


def spent(dimension: CostDimension, before: Stats | None, after: Stats) -> list[Spent]:
    """Return calls and requests of each origin since `before` or the start, and then the sum.

    A server that has started in between counts since its start.
    """
    begun = dict[str, OriginCost]()
    if before is not None and _uptime_ms(before) <= _uptime_ms(after):
        begun = {each.name: each for each in before.origins if each.dimension is dimension}
    found = [
        _difference(begun.get(each.name), each)
        for each in after.origins
        if each.dimension is dimension
    ]
    found.sort(key=lambda each: -sum(each.requests.values()))
    total = Counter[str]()
    for each in found:
        total.update(each.requests)
    return [*found, Spent(ALL, sum(each.calls for each in found), total)]


def _difference(before: OriginCost | None, after: OriginCost) -> Spent:
    calls, requests = after.calls, {_name(kind): sent for kind, sent in after.requests.items()}
    if before is not None:  # an origin that has disappeared in between, and come back, has less
        calls = max(0, calls - before.calls)
        for kind, sent in before.requests.items():
            requests[_name(kind)] = max(0, requests[_name(kind)] - sent)
    return Spent(after.name, calls, requests)


def _uptime_ms(stats: Stats) -> int:
    """The uptime of the process whose calls have origins."""
    return max((each.uptime_ms for each in stats.processes if each.role in SERVING), default=1)


def _rounded(usd: float) -> float:
    return float(f"{usd:.4g}")


def _name(kind: RequestKind) -> str:
    return kind.name.lower()


def _prices(*, chosen: str | None, **usd_per_1000: float | None) -> Callable[[Stats], PriceList]:
    given = {kind: Decimal(str(usd)) for kind, usd in usd_per_1000.items() if usd is not None}

    def prices(found: Stats) -> PriceList:
        listed = price_list(found.url, found.endpoint, found.records, chosen=chosen)
        if chosen is None and found.usd_per_1000:
            told = {_name(kind): Decimal(str(usd)) for kind, usd in found.usd_per_1000.items()}
            of_server = PriceList.of("the prices of the server", told)
            if of_server.pico_dollars != listed.pico_dollars:
                listed = of_server
        return listed.with_prices(given)

    return prices


def _price_options(command: CommandT) -> CommandT:
    """A decorator that adds the flags of prices, as `prices`: a function from stats to a list."""
    command = grouped_options("prices", ("chosen", *_PRICE_FLAGS), _prices)(command)
    for kind, flag in reversed([*_PRICE_FLAGS.items()]):
        command = click.option(
            flag,
            kind,
            type=click.FloatRange(min=0),
            metavar="DOLLARS",
            help=f"Price of 1,000 {kind.replace('_', ' ')}s.",
        )(command)
    return click.option(
        "--prices",
        "chosen",
        type=click.Choice(list(OBJECTS)),
        help="The provider whose prices to use.  [default: those of the server]",
    )(command)


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option(
    "--interval-s",
    type=click.IntRange(1, INTERVAL_S_MAX),
    metavar="SECONDS",
    help="Measure for this many seconds, and print the requests sent in that time.",
)
@click.option(
    "--by",
    "dimension",
    type=click.Choice([each.name.lower() for each in CostDimension]),
    help="Print what calls have cost, by this.",
)
@_price_options
@format_option
@target_options
def stats(
    *,
    interval_s: int | None,
    dimension: str | None,
    prices: Callable[[Stats], PriceList],
    output_format: Format,
    target: Target,
) -> None:
    """Print rates and prices."""

    async def ask(client: Client) -> tuple[Stats | None, Stats]:
        if interval_s is None:
            return None, await client.stats()
        before = await client.stats()
        await asyncio.sleep(interval_s)
        return before, await client.stats()

    before, found = talk(target, ask)
    if dimension is not None:
        _print_spent(CostDimension[dimension.upper()], before, found, prices(found), output_format)
        return
    rates = since_start(found) if before is None else between(before, found)
    listed = prices(found)
    rows = [_row(rate, listed) for rate in rates]
    with printing():
        print_rows(output_format, COLUMNS, rows)
    click.echo(_cost_line(rows[-1][-1], listed), err=True)
    uptime_ms = min((process.uptime_ms for process in found.processes), default=SHORT_MS)
    if before is None:
        _warn_of_start(uptime_ms)


def _warn_of_start(uptime_ms: int) -> None:
    """Say so if a rate since the start is that of the start."""
    if uptime_ms < SHORT_MS:
        measured = time(uptime_ms // 1_000 * US_PER_S)
        click.echo(
            f"Only {measured} of data, mostly start-up. Use --interval-s 60 for the current rate.",
            err=True,
        )


def _print_spent(
    dimension: CostDimension,
    before: Stats | None,
    found: Stats,
    listed: PriceList,
    output_format: Format,
) -> None:
    uptime_ms = _uptime_ms(found)
    begun_ms = 0 if before is None else _uptime_ms(before)
    hours = max(1, uptime_ms - begun_ms if begun_ms <= uptime_ms else uptime_ms) / _HOUR_MS
    rows = [each.row(hours, listed) for each in spent(dimension, before, found)]
    with printing():
        print_rows(output_format, (dimension.name.lower(), *ORIGIN_COLUMNS), rows)
    per_hour = rows[-1][4]
    per_month = None if per_hour is None else per_hour * _HOURS_PER_MONTH
    serving = sum(1 for each in found.processes if each.role in SERVING)
    whose = "process that serves" if serving == 1 else "processes that serve"
    line = _cost_line(per_month, listed, f" for the {whose} alone")
    click.echo(line, err=True)
    if before is None:
        _warn_of_start(uptime_ms)


def _cost_line(usd_per_month: float | None, prices: PriceList, whose: str = "") -> str:
    if usd_per_month is None:
        cost = "unknown; see --prices"
    else:
        cost = f"{usd_per_month:,.2f} USD in 30 days" if usd_per_month else "0 USD"
    return f"Cost{whose}: {cost} ({prices.title}). Storage and traffic are not counted."


def _row(rate: Rate, prices: PriceList) -> Sequence[Any]:
    costs = [prices.usd_per_month(kind, per_minute) for kind, per_minute in rate.per_minute.items()]
    known = [cost for cost in costs if cost is not None]
    # A partial sum would be mistaken for the total.
    cost = round(sum(known), 4) if len(known) == len(costs) else None
    return (rate.process, rate.kind, rate.requests, round(sum(rate.per_minute.values()), 3), cost)
