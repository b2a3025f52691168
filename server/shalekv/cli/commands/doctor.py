"""`shalekv doctor`: check this machine, a store, a database and servers; say what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from shalekv.cli.console.connection import Target, target_options
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import Format, format_option, print_line, print_rows, printing
from shalekv.cli.console.variables import CONFIG_VARIABLE, URL_VARIABLE
from shalekv.cli.doctor.bundle import (
    TARS,
    ZIP,
    Redaction,
    bundle_files,
    known_secrets,
    write_bundle,
)
from shalekv.cli.doctor.diagnosis import NEEDS_SERVER, Diagnosis, Severity, summary
from shalekv.cli.doctor.examination import Findings, Subject, examine
from shalekv.cli.doctor.machine_facts import settings_found
from shalekv.format.names import VERIFY_FOLDER

if TYPE_CHECKING:  # of shalekv[server]
    from shalekv.settings import AnyConfig

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

PROBLEMS_FOUND = 15  # an exit code of this command alone
COLUMNS = ("area", "check", "severity", "evidence", "fix")

_PROBLEM = f"{__name__}.problem"  # what is wrong with the file of the environment
_MARKS = {
    Severity.OK: "\N{CHECK MARK}",
    Severity.WARNING: "!",
    Severity.PROBLEM: "\N{BALLOT X}",
    Severity.UNCHECKED: "-",
}

_HELP = f"""Check this machine, and with --url a store and its database, with --addr servers.

Each finding has its evidence, and the command that helps. "Not checked" says why. With --url one
object is written into the folder {VERIFY_FOLDER} beside those of the database, read, and deleted
again, unless --read-only is given. No check waits longer than --timeout-ms. --url needs
`pip install 'shalekv[server]'`, the other checks do not.

--bundle writes a file for a bug report: the findings, versions, settings that are not the default,
and the state of the servers and of the manifest. Keys, values, tokens and credentials are not in
it; names of snapshots and consumers, and addresses, are.

\b
Examples:
  shalekv doctor
  shalekv doctor --url s3://bucket/folder --addr 10.0.0.5:7654
  shalekv doctor --url file:///var/lib/shalekv --read-only
  shalekv doctor --addr 10.0.0.5:7654 --bundle report.zip
  shalekv doctor --url s3://bucket/folder --format json | jq 'select(.severity == "problem")'
"""

_EXIT_CODES = f"""\b
Exit codes:
    {ExitCode.OK}  no problem was found; there may be warnings
    {ExitCode.USAGE}  an argument is wrong; nothing was checked
   {ExitCode.OUTPUT}  standard output, or the bundle, cannot be written
   {PROBLEMS_FOUND}  a problem was found
  {ExitCode.INTERRUPTED}  ended by Ctrl-C
"""


def _url_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, and the flags of a store where their code is installed."""
    try:
        from shalekv.cli.console.bucket import optional_url_option  # noqa: PLC0415 (as it says)
    except ModuleNotFoundError:
        return click.option(
            "--url", envvar=URL_VARIABLE, metavar="URL", help=f"A database: {NEEDS_SERVER}."
        )(command)
    return optional_url_option(command)


def _problem_of_file(file: Path) -> str:
    """Return what is wrong with a file of settings; empty: nothing."""
    try:
        from shalekv.cli.doctor.configured import problem_of_file  # noqa: PLC0415 (as it says)
    except ModuleNotFoundError:
        return f"{file} is not read: that {NEEDS_SERVER}"
    return problem_of_file(file)


class _DoctorCommand(click.Command):
    """A command that works even if the file of the settings cannot be used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse without the file of the environment if that is wrong, and remember why."""
        file = os.environ.get(CONFIG_VARIABLE)
        problem = _problem_of_file(Path(file)) if file else ""
        if file is None or not problem:
            return super().parse_args(ctx, args)
        ctx.meta[_PROBLEM] = problem
        del os.environ[CONFIG_VARIABLE]
        try:
            return super().parse_args(ctx, args)
        finally:
            os.environ[CONFIG_VARIABLE] = file


@click.command(cls=_DoctorCommand, help=_HELP, epilog=_EXIT_CODES)
@_url_option
@target_options
@click.option(
    "--read-only", is_flag=True, help="Write nothing: leave out what needs a write to be checked."
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a new file for a bug report, FILE.zip or FILE.tar.gz, without secrets.",
)
@format_option
def doctor(
    *,
    url: str | None,
    target: Target,
    read_only: bool,
    bundle: Path | None,
    output_format: Format,
) -> None:
    """Check, print the findings, and exit with a code that says whether there is a problem."""
    _check_bundle(bundle)
    subject = _subject(url, target, may_write=not read_only)
    if url is not None and not read_only and subject.config is not None:
        click.echo(
            f"Writing, reading and deleting one object in {url}/{VERIFY_FOLDER} (--read-only "
            "leaves that out).",
            err=True,
        )
    found = asyncio.run(examine(subject))
    with printing():
        _print(found.diagnoses, output_format)
    if output_format is not Format.TABLE:
        click.echo(summary(found.diagnoses), err=True)
    if bundle is not None:
        _write(bundle, subject, found)
    if any(each.severity is Severity.PROBLEM for each in found.diagnoses):
        raise SystemExit(PROBLEMS_FOUND)


def _check_bundle(bundle: Path | None) -> None:
    if bundle is None:
        return
    if not bundle.name.endswith((ZIP, *TARS)):
        raise click.BadParameter(f"{bundle} is neither .zip nor .tar.gz", param_hint="--bundle")
    if bundle.exists() or bundle.is_symlink():
        raise click.BadParameter(
            f"{bundle} exists: choose another name, or delete it", param_hint="--bundle"
        )


def _subject(url: str | None, target: Target, *, may_write: bool) -> Subject:
    context = click.get_current_context()
    problems = context.meta.get(_PROBLEM, "").splitlines()
    config: AnyConfig | None = None
    given: Path | None = None
    with suppress(ModuleNotFoundError):  # without shalekv[server]
        from shalekv.cli.doctor.configured import configuration  # noqa: PLC0415 (as it says)

        config, given, wrong = configuration()
        problems += wrong
    is_asked = context.get_parameter_source("addr") is not ParameterSource.DEFAULT
    file = os.environ.get(CONFIG_VARIABLE) or given
    return Subject(
        url=url,
        target=target if is_asked else None,
        config=None if problems else config,
        settings=settings_found(str(file or ""), os.environ, problems),
        may_write=may_write,
        timeout_ms=target.timeout_ms,
    )


def _print(diagnoses: Sequence[Diagnosis], output_format: Format) -> None:
    if output_format is not Format.TABLE:
        rows = [
            (each.area, each.check, each.severity.value, each.evidence, each.fix or None)
            for each in diagnoses
        ]
        print_rows(output_format, COLUMNS, rows)
        return
    width = max(len(each.check) for each in diagnoses)
    print_line(summary(diagnoses))
    for area, members in groupby(diagnoses, key=lambda each: each.area):
        print_line(f"\n{area[0].upper()}{area[1:]}")
        for each in members:
            reason = "not checked: " if each.severity is Severity.UNCHECKED else ""
            print_line(f"{_MARKS[each.severity]} {each.check:<{width}}  {reason}{each.evidence}")
            if each.fix:
                print_line(f"  {'':<{width}}  fix: {each.fix}")


def _write(bundle: Path, subject: Subject, found: Findings) -> None:
    files = [] if subject.target is None else [subject.target.token_file]
    secrets = known_secrets(os.environ, subject.config, [Path(each) for each in files if each])
    packed = bundle_files(
        found.diagnoses, subject.config, found.manifest, found.servers, Redaction(secrets)
    )
    try:
        write_bundle(bundle, packed)
    except OSError as error:
        click.echo(f"Error: {bundle}: {error.strerror}", err=True)
        raise SystemExit(ExitCode.OUTPUT) from None
    click.echo(
        f"{bundle} has {', '.join(sorted(packed))}: look through it before you attach it.", err=True
    )
