"""One run of `shalekv load`, from its options to its exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from shalekv.cli.console.connection import AT_ONCE, PATIENT, Target, talk
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import print_line, printing
from shalekv.cli.load.batches import BatchLimits
from shalekv.cli.load.ledger import Ledger
from shalekv.cli.load.options import SendingWords
from shalekv.cli.load.source import Source
from shalekv.cli.loading.account import Account
from shalekv.cli.loading.bad_row_file import BadRowFile
from shalekv.cli.loading.loader import Loader, Sending
from shalekv.cli.loading.pace import Pace
from shalekv.cli.loading.report import certain, report_failure, totals
from shalekv.cli.loading.state import (
    BEGINNING,
    LoadState,
    Origin,
    StateMismatch,
    bound_to,
    read_state,
)
from shalekv.cli.pairs.reading import Reading, read_batches
from shalekv.wording import counted
from shalekv_client import Client, Durability, Status, Unreachable


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be loaded, and how."""

    source: Source
    reading: Reading
    sending: SendingWords
    durability: Durability
    state_path: Path | None
    bad_rows_path: Path | None
    shows_progress: bool | None  # None: on a terminal

    def state(self) -> LoadState | None:
        """Where the load goes on; None: nothing is kept. Raises `click.UsageError`."""
        if self.state_path is None:
            return None
        if self.durability is Durability.MEMORY:
            raise click.UsageError(
                "--resume goes on where everything is stored, and with --durability memory a crash "
                "of the server may take that back"
            )
        identity = self.source.identity()
        if identity is None:
            raise click.UsageError("--resume needs a file that can be read again, not a pipe")
        columns = self.reading.columns
        file_format = self.reading.file_format
        origin: Origin = {
            "size_bytes": identity.size_bytes,
            BEGINNING: identity.beginning_sha256,
            "input_format": file_format.value if file_format else None,
            "encoding": columns.encoding.value,
            "key_column": columns.key,
            "value_column": columns.value,
            "header": columns.header,
            "ttl_ms": self.reading.ttl_ms,
        }
        try:
            return read_state(self.state_path, origin)
        except StateMismatch as mismatch:
            raise click.UsageError(f"--resume: {mismatch}") from None

    def bad_row_file(self, state: LoadState | None) -> BadRowFile | None:
        """The file of --bad-rows, as it was at `state`."""
        if self.bad_rows_path is None:
            return None
        try:
            return BadRowFile(self.bad_rows_path, size_bytes=state.bad_rows_bytes if state else 0)
        except OSError as error:
            raise click.UsageError(f"--bad-rows: {error}") from None


def run_load(plan: Plan, target: Target) -> None:
    """Load, and print the totals; what fails ends the process with its exit code."""
    state = plan.state()
    if state is not None and state.complete:
        with printing():
            print_line(f"loaded before: {counted(state.rows, 'row')}, as {plan.state_path} says")
        return
    account = Account(position=state.position) if state else Account()
    began_s = time.monotonic()
    is_interrupted = False
    with ExitStack() as stack:
        bad_rows = plan.bad_row_file(state)
        if bad_rows is not None:
            stack.callback(bad_rows.close)
        ledger = Ledger(account, state=state, state_path=plan.state_path, bad_rows=bad_rows)
        is_whole = False
        try:
            with _progress(plan) as update:
                _talk(plan, target, account, ledger, update)
            is_whole = account.is_good
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            ledger.finish(is_whole=is_whole)
    if is_interrupted:
        click.echo(f"Interrupted. {certain(account)}", err=True)
        raise SystemExit(ExitCode.INTERRUPTED)
    with printing():
        print_line(totals(account, time.monotonic() - began_s))
        if plan.bad_rows_path is not None and ledger.bad_rows_count:
            print_line(f"{counted(ledger.bad_rows_count, 'bad row')} in {plan.bad_rows_path}")
    report_failure(account)


def _talk(
    plan: Plan,
    target: Target,
    account: Account,
    ledger: Ledger,
    update: Callable[[Account], None],
) -> None:
    pace = Pace(plan.sending.rate) if plan.sending.rate else None
    count_max = plan.sending.batch_count
    collects = plan.bad_rows_path is not None
    batches = read_batches(
        plan.source,
        plan.reading,
        BatchLimits(
            pace.batch_count_max(count_max) if pace else count_max, plan.sending.batch_bytes
        ),
        now_ms=lambda: time.time_ns() // 1_000_000,
        begin=account.position,
        bad_rows_end_it=not collects,
    )

    async def call(client: Client) -> None:
        try:
            await _meet(target, ledger, plan)
            sending = Sending(plan.durability, plan.sending.in_flight, collects)
            loader = Loader(client, account, sending, ledger=ledger, pace=pace, progress=update)
            await loader.load(batches)
        finally:
            plan.source.close()

    talk(target, call, retry=PATIENT)


async def _meet(target: Target, ledger: Ledger, plan: Plan) -> None:
    """Make sure that there is a server, without patience, and of the database of the state."""
    database_id = (await status_of_first(target)).view.database_id.hex()
    if ledger.state is not None and plan.state_path is not None:
        try:
            ledger.state = bound_to(ledger.state, plan.state_path, database_id)
        except StateMismatch as mismatch:
            raise click.UsageError(f"--resume: {mismatch}") from None
        if ledger.state.line:
            click.echo(f"going on after line {ledger.state.line:,}", err=True)


async def status_of_first(target: Target) -> Status:
    """That of the first of the servers that can be reached."""
    for address in target.addresses:
        async with Client(
            address, timeout_ms=target.timeout_ms, retry=AT_ONCE, coalesce=False
        ) as client:
            try:
                return await client.status()
            except Unreachable:
                if address == target.addresses[-1]:
                    raise
    raise AssertionError


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Account], None]]:
    """What is called with news: a bar if one is to be shown."""
    if sys.stderr.isatty() if plan.shows_progress is None else plan.shows_progress:
        from shalekv.cli.load.progress import progress_bar  # noqa: PLC0415 (scripts don't wait for it)

        with progress_bar(plan.source.size_bytes) as update:
            yield update
    else:
        yield lambda _account: None
