"""`shalekv admin profile`: in which functions a server spends its processor time."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shalekv.cli.console.atomic_file import output_option, printing_into
from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.talking import talk
from shalekv.wording import MS_PER_S, counted
from shalekv_client import Client, Profile, ProfileFormat

SECONDS_MIN, SECONDS_MAX = 0.1, 60.0
FORMATS = {each.name.lower(): each for each in ProfileFormat}
_BY_ENDING = {".html": ProfileFormat.HTML, ".json": ProfileFormat.SPEEDSCOPE}

_HELP = """Observe a server for some seconds, and print in which functions it spends its time.

\b
text        a tree for a terminal: seconds of processor time, function, and file
html        a page for a browser
speedscope  JSON for https://www.speedscope.app

The default is text; for a PATH that ends in .html or .json, it is html or speedscope.

It observes the thread that answers calls. Of several reader processes (--processes) all are
observed at the same time, and each is a root of the tree. Compactor and collector are other
processes. It shows names of functions and files, and no keys or values. The server needs an extra:
pip install 'shalekv[profile]'. Needs the verb admin.

\b
Examples:
  shalekv admin profile
  shalekv admin profile --seconds 30 --output profile.html --addr 10.0.0.5:7654
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option(
    "--seconds",
    type=click.FloatRange(SECONDS_MIN, SECONDS_MAX),
    default=10.0,
    show_default=True,
    help="How long to observe.",
)
@click.option(
    "--output-format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    help="The format.  [default: by the ending of PATH, or text]",
)
@output_option
@target_options
def profile(
    *, seconds: float, format_name: str | None, output_path: Path | None, target: Target
) -> None:
    """Print a profile."""
    ending = "" if output_path is None else output_path.suffix
    form = _BY_ENDING.get(ending, ProfileFormat.TEXT)
    if format_name is not None:
        form = FORMATS[format_name]
    if form is not ProfileFormat.TEXT and output_path is None and sys.stdout.isatty():
        raise click.UsageError(f"{form.name.lower()} is not for a terminal: add --output PATH")

    async def ask(client: Client) -> Profile:
        return await client.profile(round(seconds * MS_PER_S), profile_format=form)

    with printing_into(output_path):
        found = talk(target, ask)
        sys.stdout.write(found.text)
    click.echo(f"{counted(found.samples, 'sample')} in {seconds:g} s", err=True)
    for number in found.missing_processes:
        click.echo(f"Process {number} has given no samples: it is missing.", err=True)
