"""`shalekv bench`: how many operations a server does, and how long each takes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import click

from shalekv.cli.benchmark.options import shape_options
from shalekv.cli.benchmark.work import Bench, Measured, Shape, Through, Work
from shalekv.cli.console.connection import (
    Target,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv_client import Client, RetryPolicy, ShaleKVError

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}
COLUMNS = (
    "operation",
    "count",
    "per_s",
    *(f"{name}_ms" for name in PERCENTILES),
    "max_ms",
    "errors",
)

_HELP = """Ask a server for OPERATIONS (put, get, mixed, txn, scan; put and get if there are none).

Each client waits for its answer before it asks again. Keys are random; they have a prefix of their
own, and are deleted at the end. A txn reads and replaces a key that exists. Nothing is repeated:
what fails is counted under its reason.

\b
Examples:
  shalekv bench
  shalekv bench put --clients 200 --duration 30s --through unary
  shalekv bench mixed --read-percent 95 --value-bytes 1000 --keys 100000
  shalekv bench scan --scan-rows 1000 --count 500 --format json
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("operations", nargs=-1, type=click.Choice([work.value for work in Work]))
@shape_options
@click.option("--keep", is_flag=True, help="Leave the keys where they are, and say their prefix.")
@format_option
@target_options
def bench(
    *,
    operations: Sequence[str],
    shape: Shape,
    keep: bool,
    output_format: Format,
    target: Target,
) -> None:
    """Measure, clean up, and print a row for each kind of operation."""
    works = [Work(name) for name in operations] or [Work.PUT, Work.GET]
    prefix = f"shalekv-bench/{uuid.uuid4().hex}/"

    async def call(client: Client) -> list[Measured]:
        try:
            return await _measured(client, target, works, shape, prefix.encode())
        finally:
            if keep:
                click.echo(f"kept: all keys that begin with {prefix}", err=True)
            else:
                await _cleaned_up(client, prefix)

    click.echo(
        f"{', '.join(target.addresses)}: {shape.clients:,} clients, {shape.through.value}; "
        f"{shape.keys:,} keys, values of {shape.value_bytes:,} bytes",
        err=True,
    )
    found = talk(target, call)
    with printing():
        rows = [row for measured in found for row in _rows(measured, output_format)]
        print_rows(output_format, COLUMNS, rows)


async def _measured(
    client: Client, target: Target, works: Sequence[Work], shape: Shape, prefix: bytes
) -> list[Measured]:
    async with Client(
        target.addresses,
        timeout_ms=target.timeout_ms,
        retry=RetryPolicy(attempts_max=1),
        reads=target.reads,
        coalesce=shape.through is Through.COALESCED,
    ) as measured_client:
        run = Bench(measured_client, shape, prefix)
        if any(work.needs_keys for work in works):
            await run.fill(client)
        return [await run.run(work) for work in works]


async def _cleaned_up(client: Client, prefix: str) -> None:
    try:
        await client.delete_range(prefix=prefix.encode())
    except ShaleKVError as error:
        advice = f"`shalekv delete --prefix {prefix}` deletes what is left"
        click.echo(f"Error: {error}\n{advice}", err=True)


def _rows(measured: Measured, output_format: Format) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = []
    for label, latencies in measured.latencies.items():
        errors: Mapping[str, int] = measured.errors.get(label, {})
        listed = ", ".join(f"{reason}: {count:,}" for reason, count in errors.items())
        milliseconds = [latencies.percentile_ms(percent) for percent in PERCENTILES.values()]
        milliseconds.append(latencies.max_us / 1000.0 if latencies.count else None)
        rows.append(
            (
                label,
                latencies.count,
                round(latencies.count / max(measured.elapsed_s, 1e-9)),
                *milliseconds,
                dict(errors) if output_format is Format.JSON else listed or None,
            )
        )
    return rows
