"""`shalekv admin stats`: requests to the object store per minute, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, talk, target_options
from shalekv.cli.console.option_groups import gathered
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.cli.request_rates import Rate, between, since_start
from shalekv.core.prices import AS_OF, OBJECT_KINDS, OBJECTS, RECORD_KINDS, PriceList, price_list
from shalekv.wording import counted
from shalekv_client import Client, Stats

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

COLUMNS = ("process", "kind", "requests", "per_minute", "usd_per_month")
INTERVAL_S_MAX = 86_400
SHORT_MS = 10 * 60_000  # what was sent at the start still outweighs the rest
_PRICE_FLAGS: Mapping[str, str] = {
    kind: f"--usd-per-1000-{kind.replace('_', '-')}s" for kind in (*OBJECT_KINDS, *RECORD_KINDS)
}

_HELP = f"""Print how many requests go to the object store per minute, and what they would cost.

Of each process of a server, by the kinds that stores charge for: the average since the start, or
with --interval-s the rate from now on. A compactor or a collector that runs elsewhere logs its own
requests, and is not in here.

The dollars are an estimate: that rate for 30 days, at list prices as published in {AS_OF}, which
--prices and --usd-per-1000-... override. Storage, traffic, discounts and what is free each month
are not in it.

\b
Examples:
  shalekv admin stats --interval-s 60
  shalekv admin stats --addr 10.0.0.5:7654 --format json | jq 'select(.process == "all")'
  shalekv admin stats --prices r2
  shalekv admin stats --usd-per-1000-writes 0.0054 --usd-per-1000-lists 0.0054
"""


def _prices(*, chosen: str | None, **usd_per_1000: float | None) -> Callable[[Stats], PriceList]:
    given = {kind: price for kind, price in usd_per_1000.items() if price is not None}

    def prices(found: Stats) -> PriceList:
        listed = price_list(found.url, found.endpoint, found.records, chosen=chosen)
        return listed.with_prices(given)

    return prices


def _price_options(command: CommandT) -> CommandT:
    """A decorator that adds the flags of prices, as the argument `prices`: from stats to a list."""
    command = gathered("prices", ("chosen", *_PRICE_FLAGS), _prices)(command)
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
        help="Whose prices to take.  [default: by the URL and the endpoint of the database]",
    )(command)


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option(
    "--interval-s",
    type=click.IntRange(1, INTERVAL_S_MAX),
    metavar="SECONDS",
    help="Ask twice, so many seconds apart, and print what was sent in between.",
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
        print_rows(output_format, COLUMNS, [_shown(row, output_format) for row in rows])
    click.echo(f"Prices: {listed.title}. Not in it: storage and traffic.", err=True)
    uptime_ms = min((process.uptime_ms for process in found.processes), default=SHORT_MS)
    if before is None and uptime_ms < SHORT_MS:
        click.echo(
            f"It runs for {counted(uptime_ms // 1_000, 'second')}: much of this was sent at its "
            "start. --interval-s 60 measures what it sends now.",
            err=True,
        )


def _row(rate: Rate, prices: PriceList) -> Sequence[Any]:
    costs = [prices.usd_per_month(kind, per_minute) for kind, per_minute in rate.per_minute.items()]
    known = [cost for cost in costs if cost is not None]
    # A sum without all of its parts would be taken for the whole.
    cost = round(sum(known), 4) if len(known) == len(costs) else None
    return (rate.process, rate.kind, rate.requests, round(sum(rate.per_minute.values()), 3), cost)


def _shown(row: Sequence[Any], output_format: Format) -> Sequence[Any]:
    if output_format is not Format.TABLE:
        return row
    *told, per_minute, cost = row
    return (*told, f"{per_minute:,.2f}", None if cost is None else f"{cost:,.2f}")
