"""`shalekv shell`: a prompt on one connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator

import click

from shalekv.cli.console.connection import ClientExit, Target, exit_codes_of_calls, target_options
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.failures import FAIL_FAST
from shalekv.cli.console.output import printing
from shalekv.cli.shell.verbs import Shell
from shalekv_client import Client

_HELP = """Open a prompt with history and completion, on one connection.

The verbs are get, set, del, keys, scan, exists, incr, ttl, expire, persist, count, watch, status
and help. Words are separated by blanks; "a key" and 'a key' preserve them, and outside of single
quotes there are the escapes of --escaped. Ctrl-C ends what runs, and Ctrl-D the shell. After a
restart of the server, the next line connects again.

The history is in the folder of $XDG_STATE_HOME, by default ~/.local/state/shalekv. Lines that begin
with a blank, and those with a token, are not kept.

If standard input is no terminal, its lines are run without a prompt, also those behind one that
fails, until the server cannot be reached. The exit code is that of the first line that failed.

\b
Examples:
  shalekv shell
  shalekv shell --addr 10.0.0.6:7654,10.0.0.7:7654
  echo 'count session/' | shalekv shell
  shalekv shell < lines.txt
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.option("--no-history", is_flag=True, help="Keep no history, and do not read it.")
@target_options
def shell(*, no_history: bool, target: Target) -> None:
    """Run lines of the terminal, or of standard input."""
    code: int = ExitCode.OK
    with printing(), asyncio.Runner() as runner:
        client = runner.run(_opened(target))
        running = Shell(client, target)
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                from shalekv.cli.shell.prompt import converse, history_path  # noqa: PLC0415 (slow)

                converse(running, runner, None if no_history else history_path())
            else:
                code = run_lines(running, runner, _lines())
        finally:
            runner.run(client.aclose())
    if code:
        raise SystemExit(code)


async def _opened(target: Target) -> Client:
    return target.client(retry=FAIL_FAST, reads=target.reads)


def run_lines(running: Shell, runner: asyncio.Runner, lines: Iterable[str]) -> int:
    """Run lines until the server cannot be reached; return the exit code of the first failure."""
    first: int = ExitCode.OK
    for line in lines:
        code = runner.run(running.run(line))
        first = first or code
        if running.is_over or code == ClientExit.UNREACHABLE:
            break
    return first


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
