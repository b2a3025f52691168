"""`shalekv compactor`: merge the WAL and the levels of databases.

Merges that are divided into parts run in child processes, one for each part, which end with this
process however it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import structlog

from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.process.databases import (
    bill_of,
    chosen_urls,
    open_databases,
    run_to_end,
    urls_option,
)
from shalekv.cli.process.endpoint import refuse_exposed_metrics, serving_alone, sources_of
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.merge_part import LIFT, LINE_BYTES_MAX, ROLE, PartReply, PartTask
from shalekv.cli.process.process_reports import reporting_to_parent
from shalekv.cli.process.shutdown import StopRequest, parent_pipe
from shalekv.cli.process.supervisor import child_environment
from shalekv.cli.process.traces import add_spans, open_tracer
from shalekv.errors import InvalidSetting, PartFailed, ShaleError, StoreUnavailable
from shalekv.jobs.compact.parts import MergePart, OwnProcessParts, PartResult
from shalekv.server.compactor import CompactionTarget, Compactors
from shalekv.settings import CompactorConfig
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.telemetry.metrics import Metrics, decode_metrics

COMMAND = (sys.executable, "-m", "shalekv.cli.process.merge_part")
LIFT_POLL_S = 0.1

_TRANSIENT = frozenset((StoreUnavailable.reason,))  # reasons of parts whose merge is retried
_log = structlog.get_logger(__name__)

_HELP = """Compact databases: merge their WAL into the levels, and levels into each other.

`shalekv serve` starts a compactor by itself. Another one, on this machine or elsewhere, takes over:
the older one ends with exit code 4, and nothing is lost or done twice.

A failure ends the compactor of a single database. With several databases, if one fails or does not
exist yet, its URL is logged and it is retried after a second, then with delays that double up to a
minute; the others continue. A database is given up when another compactor takes it over, or when a
sync of its disk fails. When all are given up, the process ends, with exit code 4 if all were taken
over. For any number of databases, at most two merges of the WAL and two merges of levels run at a
time, and the databases take turns.

\b
Examples:
  shalekv compactor --url file:///var/lib/shalekv
  shalekv compactor --url file:///var/lib/shalekv --once
  shalekv compactor --url file:///srv/one --url file:///srv/two --log-format json

Settings are found as for `shalekv serve`.
"""


class ProcessParts:
    """Runs each part of a divided merge in its own process, and an undivided merge in this one."""

    is_parallel = True

    def __init__(
        self, store: CasStore, settings: CompactorConfig, command: Sequence[str] = COMMAND
    ) -> None:
        """`command` starts a process with the interface of `shalekv.cli.process.merge_part`."""
        self._store = store
        self._settings = settings
        self._command = command
        self._here = OwnProcessParts(store)
        self.done = Metrics()  # by processes of parts that have ended

    async def run(
        self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Run all parts, and return the results in their order.

        `is_lifted` returns whether the limit on the rate is removed. Raises `PartFailed` when a
        process ends without a result, or its part fails, and `StoreUnavailable` when the store did
        not answer; the other processes are then killed.
        """
        if len(parts) < 2:  # noqa: PLR2004 - the merge is not divided
            return await self._here.run(parts, is_lifted)
        results: dict[int, PartResult] = {}
        failures: list[ShaleError] = []
        started: list[Process] = []

        async def run(number: int, part: MergePart) -> None:
            try:
                process = await self._start()
                started.append(process)
                if failures:
                    _kill(process)
                results[number] = await self._run(process, part, is_lifted)
            except ShaleError as error:  # raised below, because the group would wrap it
                failures.append(error)
                # Not by cancelling the tasks: a process that is just being started would be leaked.
                for each in started:
                    _kill(each)

        async with asyncio.TaskGroup() as tasks:
            for numbered in enumerate(parts):
                tasks.create_task(run(*numbered))
        if failures:
            raise failures[0]
        return [results[number] for number in range(len(parts))]

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_BYTES_MAX,
            env=child_environment(os.environ),
        )
        _log.debug("part started", pid=process.pid)
        return process

    async def _run(
        self, process: Process, part: MergePart, is_lifted: Callable[[], bool]
    ) -> PartResult:
        settings = self._settings
        task = PartTask(
            url=self._store.url,
            part=part,
            store=settings.store,
            process=settings.server,
            telemetry=settings.telemetry,
        )
        try:
            line = await _converse(process, task, is_lifted)
        finally:
            _kill(process)
            code = await process.wait()
        if not line.endswith(b"\n"):
            raise PartFailed(f"the process of a part of a merge ended with {code}, and no result")
        reply = PartReply.model_validate_json(line)
        for kind, requests in reply.sent.items():
            self._store.sent.add(kind, requests)
        self.done.merge(decode_metrics(reply.metrics).cumulative())
        if reply.result is not None:
            return reply.result
        if reply.reason in _TRANSIENT:
            raise StoreUnavailable(self._store.url, "compact", "levels/", reply.problem)
        raise PartFailed(f"a part of a merge failed: {reply.reason}: {reply.problem}")


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


async def _converse(process: Process, task: PartTask, is_lifted: Callable[[], bool]) -> bytes:
    """Send the task, and return the line of the reply; empty or partial if the process ends."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    async def lift() -> None:
        while not is_lifted():  # noqa: ASYNC110 - depends on the manifest, which sets no event
            await asyncio.sleep(LIFT_POLL_S)
        stdin.write(LIFT)

    stdin.write(task.model_dump_json().encode() + b"\n")
    async with asyncio.TaskGroup() as tasks:
        lifting = tasks.create_task(lift())
        try:
            return await stdout.readline()
        finally:
            lifting.cancel()


class _CompactorCommand(SettingsCommand):
    model = CompactorConfig


@click.command(cls=_CompactorCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(CompactorConfig)
@urls_option
@click.option("--once", is_flag=True, help="Run the merges that are due now, and end.")
@click.option(
    "--parent-pipe",
    "has_parent_pipe",
    is_flag=True,
    help="End at the end of standard input, a pipe from the parent process. A line `hurry` in it "
    "means that writes wait. Report requests to the store on standard output. For one database "
    "only.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def compactor(
    *, urls: tuple[str, ...], once: bool, has_parent_pipe: bool, config: Path | None, **flags: Any
) -> None:
    """Read the settings, compact, and exit with a documented code."""
    try:
        settings = load_settings(flags, config, CompactorConfig)
        database_urls = chosen_urls(urls, config)
        refuse_exposed_metrics(settings.telemetry, settings.server, settings.tls)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    if has_parent_pipe and len(database_urls) > 1:
        raise click.UsageError("--parent-pipe is for one database: give --url once")
    configure_logs(settings.server.log_format, settings.server.log_level, role=ROLE)
    compacting = _compact(database_urls, settings, is_once=once, has_parent_pipe=has_parent_pipe)
    sys.exit(run_to_end(compacting, settings.server.log_format))


async def _compact(
    urls: Sequence[str], settings: CompactorConfig, *, is_once: bool, has_parent_pipe: bool
) -> None:
    """Compact until a signal or the parent requests a stop, or once if `is_once`.

    Raises the error that ends the process.
    """
    hurry = asyncio.Event()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if has_parent_pipe:
            await stack.enter_async_context(parent_pipe(stop, hurry))
        opened = await stack.enter_async_context(open_databases(urls, settings.store))
        counts = StoreCallCounts(settings.telemetry.slow_ms)
        parts = [
            ProcessParts(CasStore(store, runtime, settings.store, counts=counts), settings)
            for store, runtime in opened
        ]
        targets = [
            CompactionTarget(store, runtime, each, counts)
            for (store, runtime), each in zip(opened, parts, strict=True)
        ]
        holder = f"compactor {os.getpid()} on {socket.gethostname()}"
        tracer = await stack.enter_async_context(open_tracer(settings.telemetry, ROLE, *urls))
        role = Compactors(targets, settings, hurry=hurry, holder=holder, tracer=tracer)

        def fill(metrics: Metrics) -> None:
            add_spans(metrics, tracer)
            counts.add_to(metrics, ROLE)
            metrics.merge(role.done)
            for each in parts:
                metrics.merge(each.done)

        bills = [
            bill_of(ROLE, store.url, store.sent, settings, runtime.clock).collect
            for store, runtime in opened
        ]
        sources = sources_of(ROLE, fill, *bills)
        await stack.enter_async_context(serving_alone(settings, sources))
        if has_parent_pipe:
            sent = [store.sent for store, _ in opened]
            stack.enter_context(reporting_to_parent(ROLE, sent, fill))
        with stop.interruptible():
            await (_once(role) if is_once else role.run())
    _log.info("stopped", requests=sum(store.sent.total for store, _ in opened))


async def _once(role: Compactors) -> None:
    """Run what is due. Raises the failure of the first database that has failed."""
    for failure in await role.run_once():
        if failure is not None:
            raise failure
