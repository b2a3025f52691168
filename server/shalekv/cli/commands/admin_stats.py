"""`shalekv admin stats`: requests to the object store per minute, and their estimated cost."""

from __future__ import annotations

import asyncio
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
from shalekv_client import Client, ProcessRequests, RequestKind, Stats

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ALL = "all"  # the total of processes, or of kinds
COLUMNS = ("process", "kind", "requests", "per_minute", "usd_per_month")
INTERVAL_S_MAX = 86_400
SHORT_MS = 10 * 60_000  # up to this uptime the requests of the start outweigh the rest

_MINUTE_MS = 60_000
_PRICE_FLAGS: Mapping[str, str] = {
    kind: f"--usd-per-1000-{kind.replace('_', '-')}s" for kind in KINDS
}

_HELP = f"""Print the number of requests to the object store per minute, and their estimated cost.

For each process of a server, and each kind of request that stores charge for: the average since the
start, or with --interval-s the rate from now on. A compactor or a collector that runs separately
logs its own requests, and is not included.

The cost is an estimate: the rate for 30 days, at list prices as published in {AS_OF}, which
--prices and --usd-per-1000-... override. Storage, traffic, discounts and free monthly quotas are
not included.

\b
Examples:
  shalekv admin stats --interval-s 60
  shalekv admin stats --addr 10.0.0.5:7654 --format json | jq 'select(.process == "all")'
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


def _name(kind: RequestKind) -> str:
    return kind.name.lower()


def _prices(*, chosen: str | None, **usd_per_1000: float | None) -> Callable[[Stats], PriceList]:
    given = {kind: Decimal(str(usd)) for kind, usd in usd_per_1000.items() if usd is not None}

    def prices(found: Stats) -> PriceList:
        listed = price_list(found.url, found.endpoint, found.records, chosen=chosen)
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
        help="The provider whose prices to use.  [default: by the URL and the endpoint of the "
        "database]",
    )(command)


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option(
    "--interval-s",
    type=click.IntRange(1, INTERVAL_S_MAX),
    metavar="SECONDS",
    help="Measure for this many seconds, and print the requests sent in that time.",
)
@_price_options
@format_option
@target_options
def stats(
    *,
    interval_s: int | None,
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
    rates = since_start(found) if before is None else between(before, found)
    listed = prices(found)
    rows = [_row(rate, listed) for rate in rates]
    with printing():
        print_rows(output_format, COLUMNS, rows)
    click.echo(_cost_line(rows[-1][-1], listed), err=True)
    uptime_ms = min((process.uptime_ms for process in found.processes), default=SHORT_MS)
    if before is None and uptime_ms < SHORT_MS:
        measured = time(uptime_ms // 1_000 * US_PER_S)
        click.echo(
            f"Only {measured} of data, mostly start-up. Use --interval-s 60 for the current rate.",
            err=True,
        )


def _cost_line(usd_per_month: float | None, prices: PriceList) -> str:
    if usd_per_month is None:
        cost = "unknown; see --prices"
    else:
        cost = f"{usd_per_month:,.2f} USD in 30 days" if usd_per_month else "0 USD"
    return f"Cost: {cost} ({prices.title}). Storage and traffic are not counted."


def _row(rate: Rate, prices: PriceList) -> Sequence[Any]:
    costs = [prices.usd_per_month(kind, per_minute) for kind, per_minute in rate.per_minute.items()]
    known = [cost for cost in costs if cost is not None]
    # A partial sum would be mistaken for the total.
    cost = round(sum(known), 4) if len(known) == len(costs) else None
    return (rate.process, rate.kind, rate.requests, round(sum(rate.per_minute.values()), 3), cost)
