"""`shalekv collector`: delete the objects of databases that are no longer needed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import structlog

from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of, exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.console.units import size
from shalekv.cli.process.databases import (
    bill_of,
    chosen_urls,
    open_databases,
    run_to_end,
    urls_option,
)
from shalekv.cli.process.endpoint import refuse_exposed_metrics, serving_alone, sources_of
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.process_reports import reporting_to_parent
from shalekv.cli.process.shutdown import StopRequest, parent_pipe
from shalekv.cli.process.traces import add_spans, open_tracer
from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.jobs.collect import CollectionPlan, CollectJob, CollectReport
from shalekv.server.collector import Collector
from shalekv.settings import CollectorConfig
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.telemetry.metrics import Metrics

DRY_COLUMNS = ("name", "size_bytes", "modified_at_ms", "fate", "reason", "detail")
Row = tuple[str | int, ...]
_ROLE = "collector"

_HELP = """Delete the objects of databases that no reader, no snapshot and no job needs any more.

Several collectors of one database are safe. A collection keeps objects that are younger than
--collect-age-s, that were published, leased or pinned by a snapshot when it began, or that were
created later.

If a database fails, or does not exist yet, its URL is logged and it is retried after
--collect-interval-ms; the others continue. A database is given up when a sync of its disk fails.
When all are given up, the process ends.

\b
Examples:
  shalekv collector --url file:///var/lib/shalekv --dry-run
  shalekv collector --url file:///var/lib/shalekv --once
  shalekv collector --url file:///srv/one --url file:///srv/two --log-format json

Settings are found as for `shalekv serve`.
"""


class _CollectCommand(SettingsCommand):
    model = CollectorConfig


@click.command(cls=_CollectCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(CollectorConfig)
@urls_option
@click.option("--once", is_flag=True, help="Collect each database once, and end.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Delete nothing: print for each object whether it would be deleted, and why.",
)
@format_option
@click.option(
    "--parent-pipe",
    "with_parent",
    is_flag=True,
    help="End at the end of standard input, a pipe from the parent process. Report requests to the "
    "store on standard output.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def collector(
    *,
    urls: tuple[str, ...],
    once: bool,
    dry_run: bool,
    output_format: Format,
    with_parent: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Read the settings, collect, and exit with a documented code."""
    try:
        settings = load_settings(flags, config, CollectorConfig)
        database_urls = chosen_urls(urls, config)
        refuse_exposed_metrics(settings.telemetry, settings.server, settings.tls)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    configure_logs(settings.server.log_format, settings.server.log_level, role=_ROLE)
    if dry_run:
        _print_plans(database_urls, asyncio.run(_plans(database_urls, settings)), output_format)
    elif once:
        outcomes = asyncio.run(_collect_once(database_urls, settings))
        sys.exit(_exit_code(each for each in outcomes if isinstance(each, Exception)))
    else:
        collecting = _run(database_urls, settings, with_parent=with_parent)
        sys.exit(run_to_end(collecting, settings.server.log_format))


async def _run(
    database_urls: Sequence[str], settings: CollectorConfig, *, with_parent: bool
) -> None:
    """Collect until a signal requests a stop, or the parent ends."""
    log = structlog.get_logger(__name__)
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if with_parent:
            await stack.enter_async_context(parent_pipe(stop))
        counts = StoreCallCounts(settings.telemetry.slow_ms)
        opened = _databases(database_urls, settings, counts)
        databases, clock = await stack.enter_async_context(opened)
        tracing = open_tracer(settings.telemetry, _ROLE, *database_urls)
        tracer = await stack.enter_async_context(tracing)
        interval_ms = settings.collector.collect_interval_ms
        role = Collector(databases, clock, interval_ms=interval_ms, tracer=tracer)

        def fill(metrics: Metrics) -> None:
            counts.add_to(metrics, _ROLE)
            add_spans(metrics, tracer)
            metrics.merge(role.done)

        bills = [
            bill_of(_ROLE, database.url, database.sent, settings, clock).collect
            for database in databases
        ]
        sources = sources_of(_ROLE, fill, *bills)
        await stack.enter_async_context(serving_alone(settings, sources))
        if with_parent:
            sent = [database.sent for database in databases]
            stack.enter_context(reporting_to_parent(_ROLE, sent, fill))
        log.info("collecting", urls=[database.url for database in databases])
        with stop.interruptible():
            await role.run()
    log.info("stopped")


async def _collect_once(
    database_urls: Sequence[str], settings: CollectorConfig
) -> Sequence[CollectReport | Exception]:
    async with _databases(database_urls, settings) as (databases, clock):
        role = Collector(databases, clock, interval_ms=settings.collector.collect_interval_ms)
        return await role.run_once()


async def _plans(
    database_urls: Sequence[str], settings: CollectorConfig
) -> list[CollectionPlan | ShaleError]:
    plans: list[CollectionPlan | ShaleError] = []
    async with _databases(database_urls, settings) as (databases, _):
        for database in databases:
            try:
                plans.append(await database.plan())
            except ShaleError as error:
                plans.append(error)
    return plans


@asynccontextmanager
async def _databases(
    database_urls: Sequence[str], settings: CollectorConfig, counts: StoreCallCounts | None = None
) -> AsyncIterator[tuple[list[CollectJob], MachineClock]]:
    async with open_databases(database_urls, settings.store) as opened:
        stores = [
            CasStore(store, runtime, settings.store, counts=counts) for store, runtime in opened
        ]
        yield [CollectJob(store, settings.collector) for store in stores], MachineClock()


def _print_plans(
    database_urls: Sequence[str],
    plans: Sequence[CollectionPlan | ShaleError],
    output_format: Format,
) -> None:
    with printing():
        columns = DRY_COLUMNS if len(database_urls) == 1 else ("url", *DRY_COLUMNS)
        print_rows(output_format, columns, _rows(database_urls, plans))
    for url, plan in zip(database_urls, plans, strict=True):
        click.echo(f"{url}: {_summary(plan)}", err=True)
    code = _exit_code(each for each in plans if isinstance(each, ShaleError))
    if code is not ExitCode.OK:
        raise SystemExit(code)


def _rows(
    database_urls: Sequence[str], plans: Sequence[CollectionPlan | ShaleError]
) -> Iterable[Row]:
    for url, plan in zip(database_urls, plans, strict=True):
        if isinstance(plan, ShaleError):
            continue
        for judged in plan.objects:
            listed, verdict = judged.listed, judged.verdict
            row: Row = (
                listed.name,
                listed.size_bytes,
                listed.modified_ms,
                "deleted" if verdict.may_delete else "kept",
                verdict.reason.value,
                verdict.detail,
            )
            yield row if len(database_urls) == 1 else (url, *row)


def _summary(plan: CollectionPlan | ShaleError) -> str:
    if isinstance(plan, ShaleError):
        return f"Error: {plan}"
    report = CollectReport.of(plan)
    return (
        f"{report.deleted_objects} of {len(plan.objects)} objects would be deleted "
        f"({size(report.deleted_bytes)}); expired: {report.dropped_snapshots} snapshots, "
        f"{report.dropped_leases} leases"
    )


def _exit_code(errors: Iterable[Exception]) -> ExitCode:
    return next(map(exit_code_of, errors), ExitCode.OK)
