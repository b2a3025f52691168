"""`shalekv store`: test whether a store gives the guarantees that a database needs."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from shalekv.cli.console.bucket import edited_url_option, store_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_codes_text
from shalekv.cli.console.output import (
    Format,
    format_option,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.process.logs import configure_logs
from shalekv.clock import MachineClock
from shalekv.format.names import VERIFY_FOLDER
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import LogFormat, LogLevel, StoreSettings
from shalekv.settings.model import GIB, MIB
from shalekv.store.opening import open_store
from shalekv.store.verify.scratch import Effort
from shalekv.store.verify.verdict import CheckFailed, CheckPassed, NotOffered, Unanswered, Verdict
from shalekv.store.verify.verify import CheckResult, verification
from shalekv.wording import counted

PARALLEL_MAX = 64
ROUNDS_MAX = 100_000
PART_BYTES_MIN = 5 * MIB  # of an upload in parts
COLUMNS = ("result", "check", "proves", "found", "lost")
_SHOWN = ("result", "check", "proves")  # columns of a table; findings are printed below it

_DEFAULT = Effort()
_MARKS = {
    "passed": "\N{CHECK MARK}",
    "not offered": "\N{CHECK MARK}",
    "failed": "\N{BALLOT X}",
    "unanswered": "?",
}
_NOT_NEEDED = (
    "not needed",
    "conditional-copy",
    "nothing: no object is ever copied on a condition",
    None,
    None,
)

_HELP = f"""Test whether a store can hold a database, by checking the guarantees that it needs.

A store that accepts conditional requests but ignores the conditions loses data without an error.
Each line is a passed check, or the finding and the guarantee that is lost. The result "not offered"
marks an optional guarantee that this store does not give, and that no database needs.

About 2,000 requests are sent. They use the folder {VERIFY_FOLDER} beside those of a database, which
may be in use meanwhile, and delete their objects at the end. With --cas two_phase the transactional
store is checked, too, and the object store need not honour conditions.

\b
Examples:
  shalekv store verify --url s3://bucket/folder --endpoint-url https://localhost:9000
  shalekv store verify --url file:///var/lib/shalekv --rounds 1000
  shalekv store verify --url s3://bucket/folder --format json | jq 'select(.result == "failed")'
"""


@click.group()
def store() -> None:
    """Test whether a store can hold a database."""


@store.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--parallel",
    type=click.IntRange(2, PARALLEL_MAX),
    default=_DEFAULT.racers,
    show_default=True,
    metavar="N",
    help="Number of creates of one name that race each other, on separate connections.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, ROUNDS_MAX),
    default=_DEFAULT.rounds,
    show_default=True,
    metavar="N",
    help="Number of races.",
)
@click.option(
    "--large-object-bytes",
    type=click.IntRange(1, GIB),
    default=_DEFAULT.large_object_bytes,
    show_default=True,
    metavar="BYTES",
    help="Size of the largest test object. Above 5 MiB it is uploaded in parts.",
)
@format_option
def verify(
    *, url: str, parallel: int, rounds: int, large_object_bytes: int, output_format: Format
) -> None:
    """Check, print the findings, and exit with a code that says whether the store is fit."""
    settings = _in_parts(store_settings(), large_object_bytes)
    effort = Effort(parallel, rounds, large_object_bytes)
    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    findings = asyncio.run(_verified(url, settings, effort))
    with printing():
        _print(findings, output_format)
    is_fit, summary = _judged(findings)
    click.echo(f"{url} {summary}", err=True)
    if not is_fit:
        raise SystemExit(ExitCode.STORE)


def _in_parts(settings: StoreSettings, large_object_bytes: int) -> StoreSettings:
    """Settings with which the large object is uploaded in parts, like the largest SSTs."""
    whole_bytes = max(PART_BYTES_MIN, min(settings.multipart_bytes, large_object_bytes - 1))
    return settings.model_copy(update={"multipart_bytes": whole_bytes})


async def _verified(url: str, settings: StoreSettings, effort: Effort) -> list[CheckResult]:
    workers = ThreadWorkers(max(settings.threads, effort.racers))
    runtime = Runtime(clock=MachineClock(), random=random.SystemRandom(), workers=workers)
    findings = []
    try:
        with _progress() as show:
            async with verification(
                lambda: open_store(url, runtime, settings), runtime, settings, effort, _print_left
            ) as verifying:
                show(verifying.checks[0].name)
                following = iter([check.name for check in verifying.checks[1:]])
                async for finding in verifying.findings():
                    findings.append(finding)
                    show(next(following, "deleting test objects"))
    finally:
        workers.close()
    return findings


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current check on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _what: None
        return
    from rich.console import Console  # noqa: PLC0415 - 60 ms, only for terminals

    with Console(stderr=True).status("") as line:
        yield lambda what: line.update(f"checking: {what}")


def _print_left(names: Sequence[str]) -> None:
    click.echo(
        f"{counted(len(names), 'object')} could not be deleted: delete all objects that begin with "
        f"{names[0].rpartition('-')[0]}",
        err=True,
    )


def _print(findings: Sequence[CheckResult], output_format: Format) -> None:
    rows = [*map(_row, findings), _NOT_NEEDED]
    match output_format:
        case Format.TABLE:
            marked = [(f"{_MARKS.get(row[0], '-')} {row[0]}", *row[1:3]) for row in rows]
            print_rows(output_format, _SHOWN, marked)
            for result, check, _, found, lost in rows:
                if result not in {"passed", "not needed"}:
                    print_line(f"\n{_MARKS[result]} {check}: {found}")
                if result == "failed":
                    print_line(f"  A database would lose: {lost}.")
        case Format.JSON:
            for row in rows:
                print_json(dict(zip(COLUMNS, row, strict=True)))
        case Format.RAW:
            print_rows(output_format, COLUMNS, rows)


def _row(finding: CheckResult) -> tuple[str, str, str, str | None, str | None]:
    result, found = _result(finding.verdict)
    lost = finding.check.lost if isinstance(finding.verdict, CheckFailed) else None
    return (result, finding.check.name, finding.check.proves, found or None, lost)


def _result(verdict: Verdict) -> tuple[str, str]:
    match verdict:
        case CheckPassed(seen):
            return "passed", seen
        case NotOffered(remark):
            return "not offered", remark
        case CheckFailed(problem):
            return "failed", problem
        case Unanswered(problem):
            return "unanswered", problem


def _judged(findings: Sequence[CheckResult]) -> tuple[bool, str]:
    """Return whether the store can hold a database, and why."""
    failed = [f.check.name for f in findings if isinstance(f.verdict, CheckFailed)]
    unanswered = [f.check.name for f in findings if isinstance(f.verdict, Unanswered)]
    if failed:
        return False, f"cannot hold a database: it fails {', '.join(failed)}"
    if unanswered:
        return False, f"was not tested to the end: it did not answer {', '.join(unanswered)}"
    return True, f"is fit for a database: it passed {counted(len(findings), 'check')}"
