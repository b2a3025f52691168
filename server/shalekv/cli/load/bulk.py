"""One run of `shalekv load --bulk`, from its options to its exit code.

The rows are read and sorted, written into the object store as SSTs, and published by one commit:
of the server, or with `--open` of this process as a writer.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from shalekv.cli.console.bucket import checked_url, opened_store
from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.connection import Target
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.console.failures import RETRY_UNTIL_TIMEOUT, exit_code_of_call
from shalekv.cli.console.output import Format, print_line, print_record, printing
from shalekv.cli.console.units import size
from shalekv.cli.load.batches import BatchLimits, RowBatch
from shalekv.cli.load.ledger import Account, BadRowFile, BulkProgress
from shalekv.cli.load.lines import BadInput
from shalekv.cli.load.options import BulkFlags
from shalekv.cli.load.run import status_of_first, totals, totals_record
from shalekv.cli.load.sort import ExternalSort, Frame
from shalekv.cli.load.source import InputOptions, InputSource, read_batches
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.peers import open_links
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED
from shalekv.format.sst_message import info_message
from shalekv.jobs.bulk_load import LoadFiles, LoadJob, commit_by_opening
from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv.protocol.loads import check_single_load_id
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import (
    LevelSettings,
    LimitSettings,
    LogFormat,
    LogLevel,
    Settings,
    StoreSettings,
    TlsSettings,
    WriterSettings,
)
from shalekv.store.cas import CasStore
from shalekv.wording import counted
from shalekv_client import NotApplied, Put, ShaleKVError, TlsOptions, Unreachable

BATCH = BatchLimits(count_max=10_000, bytes_max=4 * 1024 * 1024)  # rows read at once

T = TypeVar("T")


class SpillFailed(Exception):
    """The disk refuses the rows that do not fit in memory, or the file of bad rows."""


class BulkInput:
    """Reads all rows of an input, and yields them sorted by key; works in threads."""

    def __init__(
        self,
        source: InputSource,
        reading: InputOptions,
        *,
        now_ms: int,
        value_bytes_max: int,
        memory_bytes: int,
        folder: Path | None,
        bad_rows: BadRowFile | None,
        progress: BulkProgress,
    ) -> None:
        """Times to live are counted from `now_ms`. Without `bad_rows`, a bad row is an error."""
        self._now_ms = now_ms
        self._value_bytes_max = value_bytes_max
        self._bad_rows = bad_rows
        self._progress = progress
        self._sort = ExternalSort(folder, memory_bytes=memory_bytes)
        self._batches = read_batches(
            source,
            reading,
            BATCH,
            now_ms=lambda: now_ms,
            stop_at_bad_row=bad_rows is None,
        )

    async def read(self) -> None:
        """Read the whole input. Raises `BadInput` and `SpillFailed`."""
        while rows := await asyncio.to_thread(next, self._batches, None):
            await _on_disk(self._take, rows)
        self._progress.is_sorted = True

    async def sorted(self) -> AsyncIterator[Columns]:
        """Yield the rows sorted by key, only the last row of each key. Raises `SpillFailed`."""
        frames: Iterator[Frame] = self._sort.sorted()
        while frame := await _on_disk(next, frames, None):
            count = len(frame.keys)
            yield Columns(
                frame.keys,
                (UNNUMBERED,) * count,
                bytes((Kind.PUT,)) * count,
                frame.values,
                frame.expire_at_ms,
            )

    def close(self) -> None:
        """Delete the temporary files."""
        self._sort.close()

    def _take(self, rows: RowBatch) -> None:
        rows = self._without_large(rows)
        if self._bad_rows is not None:
            self._bad_rows.add(rows.bad)
        self._sort.add((put.key, put.value, self._expiry_ms(put)) for put in rows.puts)
        progress = self._progress
        progress.source_bytes += rows.source_bytes
        progress.rows += len(rows.puts)
        progress.bytes += rows.size_bytes

    def _without_large(self, rows: RowBatch) -> RowBatch:
        large = [at for at, put in enumerate(rows.puts) if len(put.value) > self._value_bytes_max]
        if large and self._bad_rows is None:
            raise BadInput(rows.lines[large[0]], self._too_large(rows.puts[large[0]]))
        for at in reversed(large):
            rows = rows.without(at, self._too_large(rows.puts[at]))
        return rows

    def _too_large(self, put: Put) -> str:
        bytes_max = self._value_bytes_max
        return (
            f"the value has {len(put.value):,} bytes, and limits.value_bytes_max is {bytes_max:,}"
        )

    def _expiry_ms(self, put: Put) -> int:
        return self._now_ms + put.ttl_ms if put.ttl_ms else NO_EXPIRY


async def _on_disk(work: Callable[..., T], *arguments: object) -> T:
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise SpillFailed(
            f"the rows cannot be kept on the disk: {error.strerror or error}"
        ) from error


class _BulkSettings(Settings):
    store: StoreSettings = StoreSettings()
    levels: LevelSettings = LevelSettings()
    limits: LimitSettings = LimitSettings()
    writer: WriterSettings = WriterSettings()


@dataclass(frozen=True, slots=True)
class BulkPlan:
    """The input of a bulk load, and its options."""

    source: InputSource
    reading: InputOptions
    flags: BulkFlags
    bad_rows_path: Path | None
    shows_progress: bool | None  # None: on a terminal


@dataclass(slots=True)
class _LoadOutcome:
    """The outcome of a load so far."""

    seq: int = 0
    is_repeated: bool = False  # the load with this id was committed before this run
    files: int = 0
    bad_rows: int = 0
    is_commit_requested: bool = False  # from here on the commit decides the outcome
    progress: BulkProgress = field(default_factory=BulkProgress)


def run_bulk(plan: BulkPlan, target: Target, output_format: Format | None) -> None:
    """Load, and print the totals. A failure ends the process with its exit code."""
    flags = plan.flags
    url = checked_url(flags.url)
    try:
        settings = load_settings(flags.store, flags.config, _BulkSettings)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    load_id = flags.load_id
    if load_id is None:
        load_id = f"load:{uuid.uuid4().hex}"
        click.echo(f"--load-id {load_id}", err=True)
    done = _LoadOutcome()
    began_s = time.monotonic()
    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    try:
        check_single_load_id(load_id)
        with _bar(plan, done.progress):
            asyncio.run(_Bulk(plan, target, settings, load_id, done).run(url))
    except KeyboardInterrupt:
        _fail("Interrupted.", ExitCode.INTERRUPTED, load_id, done)
    except ShaleKVError as error:
        is_known = isinstance(error, NotApplied)
        _fail(
            f"Error: {error}",
            exit_code_of_call(error),
            load_id,
            done,
            is_known=is_known,
        )
    except ShaleError as error:
        # The error is not the server's answer: a requested commit may or may not have been applied.
        _fail(f"Error: {error}", exit_code_of(error), load_id, done)
    except BadInput as error:
        _fail(f"Error: {error}", ExitCode.USAGE, load_id, done)
    except SpillFailed as error:
        _fail(f"Error: {error}", ExitCode.OUTPUT, load_id, done)
    _print_totals(plan, load_id, done, time.monotonic() - began_s, output_format)


def _print_totals(
    plan: BulkPlan,
    load_id: str,
    done: _LoadOutcome,
    elapsed_s: float,
    output_format: Format | None,
) -> None:
    progress = done.progress
    account = Account(rows=progress.rows, bytes=progress.bytes)
    with printing():
        if output_format is not None:
            record = {
                **totals_record(account, elapsed_s, bad_rows=done.bad_rows),
                "loaded_before": done.is_repeated,
                "load_id": load_id,
                "seq": done.seq,
                "keys": progress.keys,
                "files": done.files,
                "file_bytes": progress.file_bytes,
            }
            print_record(output_format, record)
            return
        if done.is_repeated:
            print_line(f"loaded before: load {load_id} is seq {done.seq}; nothing was done")
            return
        print_line(totals(account, elapsed_s))
        if progress.keys:
            print_line(
                f"load {load_id} is seq {done.seq}: {counted(progress.keys, 'key')} in "
                f"{counted(done.files, 'file')} of {size(progress.file_bytes)}"
            )
        if done.bad_rows:
            print_line(f"{counted(done.bad_rows, 'bad row')} in {plan.bad_rows_path}")


def _fail(
    message: str, code: int, load_id: str, done: _LoadOutcome, *, is_known: bool = False
) -> NoReturn:
    click.echo(message, err=True)
    if done.is_commit_requested and not is_known:
        advice = f"It is not known whether it was committed: repeat it with --load-id {load_id}, "
        click.echo(f"{advice}which commits it at most once.", err=True)
    else:
        click.echo("Nothing was loaded.", err=True)
    raise SystemExit(code)


class _Bulk:
    """A running bulk load."""

    def __init__(
        self,
        plan: BulkPlan,
        target: Target,
        settings: _BulkSettings,
        load_id: str,
        done: _LoadOutcome,
    ) -> None:
        self._plan = plan
        self._target = target
        self._settings = settings
        self._load_id = load_id
        self._done = done

    async def run(self, url: str) -> None:
        """Load into the database at `url`."""
        try:
            async with opened_store(url, self._settings.store) as (_, store):
                await self._run(store)
        finally:
            self._plan.source.close()  # ends a thread that waits for input

    async def _run(self, store: CasStore) -> None:
        served_id = None if self._plan.flags.opens else await self._served_database()
        settings, done = self._settings, self._done
        job = await LoadJob.begin(
            store, self._load_id, levels=settings.levels, limits=settings.limits
        )
        try:
            self._check_same(job, served_id)
            if job.committed_seq is not None:
                done.seq, done.is_repeated = job.committed_seq, True
                return
            await job.guard(partial(self._load, store, job))
        except BaseException:
            if not done.is_commit_requested:
                await job.end()
            raise  # after a request the commit may still come, and needs the files
        await job.end()

    async def _served_database(self) -> bytes:
        """The id of the database of the server that is to commit."""
        try:
            return (await status_of_first(self._target)).view.database_id
        except Unreachable:
            click.echo(
                "No server answers: see --addr, or --open to load without a server.", err=True
            )
            raise

    def _check_same(self, job: LoadJob, served_id: bytes | None) -> None:
        own_id = job.ticket.database_id
        if served_id not in (None, own_id):
            raise click.UsageError(
                f"the database at {self._plan.flags.url} is {own_id.hex()}, and the server at "
                f"{self._target.address} has {served_id.hex() if served_id else 'none'}"
            )

    async def _load(self, store: CasStore, job: LoadJob) -> None:
        plan, progress = self._plan, self._done.progress
        with self._bad_row_file() as bad_rows:
            rows = BulkInput(
                plan.source,
                plan.reading,
                now_ms=job.ticket.logical_time_ms,
                value_bytes_max=job.ticket.value_bytes_max,
                memory_bytes=plan.flags.sort_memory_bytes,
                folder=plan.flags.temp_dir,
                bad_rows=bad_rows,
                progress=progress,
            )
            try:
                await rows.read()
                files = LoadFiles(store, job.ticket)
                async for columns in rows.sorted():
                    await files.add(columns)
                    progress.keys, progress.file_bytes = files.row_count, files.size_bytes
                infos = await files.finish()
            finally:
                rows.close()
            progress.file_bytes = files.size_bytes
            self._done.files = len(infos)
            self._done.bad_rows = bad_rows.count if bad_rows is not None else 0
        if infos:
            self._done.is_commit_requested = True
            await self._commit(store, infos)

    async def _commit(self, store: CasStore, infos: list[SstInfo]) -> None:
        done = self._done
        if self._plan.flags.opens:
            async with open_links(_tls_of_peers(self._target)) as links:
                loaded = await commit_by_opening(
                    store, self._load_id, infos, self._settings.writer, links=links
                )
            done.seq, done.is_repeated = loaded.seq, loaded.already_applied
            return
        async with self._target.client(retry=RETRY_UNTIL_TIMEOUT) as client:
            ingested = await client.ingest(self._load_id, map(info_message, infos))
            done.seq, done.is_repeated = ingested.seq, ingested.already_applied

    @contextmanager
    def _bad_row_file(self) -> Iterator[BadRowFile | None]:
        path = self._plan.bad_rows_path
        if path is None:
            yield None
            return
        try:
            file = BadRowFile(path, size_bytes=0)
        except OSError as error:
            raise click.UsageError(f"--bad-rows: {error.filename}: {error.strerror}") from None
        try:
            yield file
        finally:
            file.close()


def _tls_of_peers(target: Target) -> TlsSettings:
    """Return the settings of connections to safekeepers: the flags of those to servers."""
    tls = target.tls or TlsOptions()
    return TlsSettings(
        tls_cert=str(tls.certificate), tls_key=str(tls.key), tls_server_ca=str(tls.ca)
    )


@contextmanager
def _bar(plan: BulkPlan, progress: BulkProgress) -> Iterator[None]:
    progress.source_bytes_max = plan.source.size_bytes
    if sys.stderr.isatty() if plan.shows_progress is None else plan.shows_progress:
        from shalekv.cli.load.progress import bulk_bar  # noqa: PLC0415 (slow to import)

        with bulk_bar(progress):
            yield
    else:
        yield
