"""One run of `shalekv load`, from its options to its exit code."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from shalekv.cli.console.connection import Target
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.failures import FAIL_FAST, RETRY_UNTIL_TIMEOUT, exit_code_of_call
from shalekv.cli.console.output import Format, print_line, print_record, printing
from shalekv.cli.console.talking import talk
from shalekv.cli.console.units import size
from shalekv.cli.load.batches import BatchLimits, RowBatch
from shalekv.cli.load.ledger import (
    BEGINNING,
    Account,
    BadRowFile,
    LoadLedger,
    LoadState,
    Origin,
    StateMismatch,
    bind_to_database,
    idempotency_key_of,
    read_state,
)
from shalekv.cli.load.lines import BadInput
from shalekv.cli.load.options import SendFlags
from shalekv.cli.load.source import InputOptions, InputSource, read_batches
from shalekv.wording import counted
from shalekv_client import (
    Client,
    Durability,
    InvalidRequest,
    NotApplied,
    ShaleKVError,
    Status,
    Unreachable,
)

STEPS_PER_S = 10  # with a rate limit, batches are small enough for this many in a second
BATCHES_AHEAD_MAX = 1_000  # stored batches to remember while an earlier one is not stored

_CHANGE = re.compile(r"changes\[(\d+)\]")


class RateLimit:
    """Schedules batches so that at most `rows_per_s` are sent on average."""

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s
        self._next_s: float | None = None

    def batch_count_max(self, wished: int) -> int:
        """The number of rows in a batch, at most `wished`."""
        return max(1, min(wished, int(self._rows_per_s / STEPS_PER_S)))

    def wait_s(self, now_s: float, rows: int) -> float:
        """Schedule a batch of `rows`, and return how long it has to wait at `now_s`.

        Lost time, for example by a slow server, is not made up for by a burst.
        """
        begin_s = now_s if self._next_s is None else max(now_s, self._next_s)
        self._next_s = begin_s + rows / self._rows_per_s
        return begin_s - now_s


@dataclass(frozen=True, slots=True)
class Sending:
    """Options for sending batches."""

    durability: Durability
    in_flight_max: int
    collects_bad_rows: bool = False  # a row that the server refuses is a bad row, not a failure


class Loader:
    """Sends batches in order, several concurrently, until one fails; records what is stored."""

    def __init__(
        self,
        client: Client,
        account: Account,
        sending: Sending,
        *,
        ledger: LoadLedger,
        pace: RateLimit | None,
        progress: Callable[[Account], None],
    ) -> None:
        """`progress` is called after every acknowledgement."""
        self._client = client
        self._account = account
        self._sending = sending
        self._ledger = ledger
        self._pace = pace
        self._progress = progress
        self._in_flight: dict[asyncio.Task[None], frozenset[bytes]] = {}

    async def load(self, batches: Iterator[RowBatch]) -> None:
        """Send all batches; after a failure send no more, and wait for those in flight."""
        async with asyncio.TaskGroup() as tasks:
            while rows := await self._next(batches):
                keys = rows.keys()
                await self._keep_pace(len(rows.puts))
                await self._wait_for_slot(keys)
                if not self._account.is_good:
                    break
                task = tasks.create_task(self._send(rows))
                self._in_flight[task] = keys
                task.add_done_callback(self._in_flight.pop)

    async def _next(self, batches: Iterator[RowBatch]) -> RowBatch | None:
        try:
            # In a thread: reading standard input may block, and replies must still be processed.
            return await asyncio.to_thread(next, batches, None)
        except BadInput as bad:
            self._account.bad_input = bad
            return None

    async def _keep_pace(self, rows: int) -> None:
        if self._pace is not None:
            wait_s = self._pace.wait_s(asyncio.get_running_loop().time(), rows)
            await asyncio.sleep(wait_s)

    async def _wait_for_slot(self, keys: frozenset[bytes]) -> None:
        """Wait until another batch may be sent.

        A batch that sets a key of a batch in flight waits for that batch, so that the last row of a
        key always wins.
        """
        while self._in_flight and self._is_full():
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        overlapping = [
            task for task, other in self._in_flight.items() if not keys.isdisjoint(other)
        ]
        if overlapping:
            await asyncio.wait(overlapping)

    def _is_full(self) -> bool:
        if self._account.batches_ahead >= BATCHES_AHEAD_MAX and self._account.is_good:
            return True  # an earlier batch is late
        return len(self._in_flight) >= self._sending.in_flight_max

    async def _send(self, rows: RowBatch) -> None:
        try:
            written = await self._written(rows)
        except NotApplied as error:
            self._account.refused.append((rows, error))
        except ShaleKVError as error:
            self._account.unknown.append((rows, error))
        except asyncio.CancelledError:
            self._account.cancelled_rows += len(rows.puts)
            raise
        else:
            self._account.acknowledge(written)
            self._progress(self._account)
            await self._ledger.note()

    async def _written(self, rows: RowBatch) -> RowBatch:
        """Write the rows; drop those that the server refuses, if bad rows are collected."""
        state, durability = self._ledger.state, self._sending.durability
        while rows.puts:
            key = idempotency_key_of(state, rows, durability) if state else None
            try:
                await self._client.write(rows.puts, durability=durability, idempotency_key=key)
                break
            except InvalidRequest as error:
                index = refused_row(error, rows)
                if index is None or not self._sending.collects_bad_rows:
                    raise
                rows = rows.without(index, error.details.message)
        return rows


def refused_row(error: ShaleKVError, rows: RowBatch) -> int | None:
    """The index of the row of a batch that the server refuses, if the error names one."""
    found = _CHANGE.match(error.field) if isinstance(error, InvalidRequest) else None
    index = int(found.group(1)) if found else len(rows.puts)
    return index if index < len(rows.puts) else None


def totals(account: Account, elapsed_s: float) -> str:
    """Format the stored rows, their bytes and the rate."""
    rate = account.rows / max(elapsed_s, 1e-9)
    return (
        f"loaded {counted(account.rows, 'row')}, {size(account.bytes)} of keys and values, "
        f"in {elapsed_s:.1f} s ({rate:,.0f} rows/s)"
    )


def totals_record(account: Account, elapsed_s: float, *, bad_rows: int) -> dict[str, int | float]:
    """The same as `totals`, as a record."""
    return {
        "rows": account.rows,
        "bytes": account.bytes,
        "elapsed_s": round(elapsed_s, 3),
        "bad_rows": bad_rows,
        "loaded_before": False,
    }


def certain(account: Account) -> str:
    """Format the position up to which everything is stored, and what is known beyond it."""
    unknown, ahead = account.unknown_rows, counted(account.rows_ahead, "row")
    match account.position.line:
        case 0 if account.rows_ahead:
            stored = f"{ahead} are stored, but not the first ones"
        case 0:
            stored = "Possibly nothing was stored" if unknown else "Nothing was stored"
        case line:
            lines = "Line 1 is" if line == 1 else f"Lines 1 to {line:,} are"
            stored = f"{lines} stored" + (f", and {ahead} after them" if account.rows_ahead else "")
    if unknown:
        stored += f"; for {counted(unknown, 'row')} it is not known"
    return f"{stored}. Loading again is safe."


def report_failure(account: Account) -> None:
    """Print failures on stderr and exit with their code; return if there are none."""
    if account.is_good:
        return
    code: int = ExitCode.USAGE
    for rows, error in account.failures():
        code = exit_code_of_call(error)
        click.echo(f"Error: {_lines(rows, error)}: {error}", err=True)
    if account.bad_input is not None:
        click.echo(f"Error: {account.bad_input}", err=True)
    if account.file_error is not None:
        code = ExitCode.OUTPUT
        reason = account.file_error.strerror or account.file_error
        click.echo(f"Error: a file cannot be written: {reason}", err=True)
    click.echo(certain(account), err=True)
    raise SystemExit(code)


def _lines(rows: RowBatch, error: ShaleKVError) -> str:
    """Format the line that the server refuses, or all lines of the batch."""
    index = refused_row(error, rows)
    if index is not None:
        return f"line {rows.lines[index]:,}"
    return f"lines {rows.first_line:,} to {rows.last_line:,}"


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The input of a load, and its options."""

    source: InputSource
    reading: InputOptions
    sending: SendFlags
    durability: Durability
    state_path: Path | None
    bad_rows_path: Path | None
    shows_progress: bool | None  # None: on a terminal

    def state(self) -> LoadState | None:
        """Read where the load continues; None without --resume. Raises `click.UsageError`."""
        if self.state_path is None:
            return None
        if self.durability is Durability.MEMORY:
            raise click.UsageError(
                "--resume excludes --durability memory: a crash of the server may lose rows that "
                "the state file counts as stored"
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
        """Open the file of --bad-rows, truncated to its length at `state`."""
        if self.bad_rows_path is None:
            return None
        try:
            return BadRowFile(self.bad_rows_path, size_bytes=state.bad_rows_bytes if state else 0)
        except OSError as error:
            raise click.UsageError(f"--bad-rows: {error.filename}: {error.strerror}") from None


def run_load(plan: LoadRun, target: Target, output_format: Format | None) -> None:
    """Load, and print the totals. A failure ends the process with its exit code."""
    state = plan.state()
    if state is not None and state.complete:
        with printing():
            if output_format is not None:
                print_record(output_format, {"rows": state.rows, "loaded_before": True})
            else:
                before = f"loaded before: {counted(state.rows, 'row')}"
                print_line(f"{before}, as {plan.state_path} says")
        return
    account = Account(position=state.position) if state else Account()
    began_s = time.monotonic()
    is_interrupted = False
    with ExitStack() as stack:
        bad_rows = plan.bad_row_file(state)
        if bad_rows is not None:
            stack.callback(bad_rows.close)
        ledger = LoadLedger(account, state=state, state_path=plan.state_path, bad_rows=bad_rows)
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
    elapsed_s = time.monotonic() - began_s
    with printing():
        if output_format is not None:
            record = totals_record(account, elapsed_s, bad_rows=ledger.bad_rows_count)
            print_record(output_format, record)
        else:
            print_line(totals(account, elapsed_s))
            if plan.bad_rows_path is not None and ledger.bad_rows_count:
                print_line(f"{counted(ledger.bad_rows_count, 'bad row')} in {plan.bad_rows_path}")
    report_failure(account)


def _talk(
    plan: LoadRun,
    target: Target,
    account: Account,
    ledger: LoadLedger,
    update: Callable[[Account], None],
) -> None:
    pace = RateLimit(plan.sending.rate) if plan.sending.rate else None
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
        stop_at_bad_row=not collects,
    )

    async def call(client: Client) -> None:
        try:
            await _check_server(target, ledger, plan)
            sending = Sending(plan.durability, plan.sending.in_flight, collects)
            loader = Loader(client, account, sending, ledger=ledger, pace=pace, progress=update)
            await loader.load(batches)
        finally:
            plan.source.close()

    talk(target, call, retry=RETRY_UNTIL_TIMEOUT)


async def _check_server(target: Target, ledger: LoadLedger, plan: LoadRun) -> None:
    """Check, without retries, that a server answers, with the database of the state file."""
    database_id = (await status_of_first(target)).view.database_id.hex()
    if ledger.state is not None and plan.state_path is not None:
        try:
            ledger.state = bind_to_database(ledger.state, plan.state_path, database_id)
        except StateMismatch as mismatch:
            raise click.UsageError(f"--resume: {mismatch}") from None
        if ledger.state.line:
            click.echo(f"continuing after line {ledger.state.line:,}", err=True)


async def status_of_first(target: Target) -> Status:
    """The status of the first server that can be reached."""
    for address in target.addresses:
        async with target.client(address, retry=FAIL_FAST) as client:
            try:
                return await client.status()
            except Unreachable:
                if address == target.addresses[-1]:
                    raise
    raise AssertionError


@contextmanager
def _progress(plan: LoadRun) -> Iterator[Callable[[Account], None]]:
    """Show a bar if one is wanted; yields the function to call with the account."""
    if sys.stderr.isatty() if plan.shows_progress is None else plan.shows_progress:
        from shalekv.cli.load.progress import progress_bar  # noqa: PLC0415 (slow to import)

        with progress_bar(plan.source.size_bytes) as update:
            yield update
    else:
        yield lambda _account: None
