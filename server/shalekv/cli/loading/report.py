"""What a load says at its end: totals, and how far it got when something failed."""

from __future__ import annotations

import click

from shalekv.cli.console.connection import exit_code_of_call
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.load.batches import Rows
from shalekv.cli.loading.account import Account
from shalekv.cli.loading.loader import refused_row
from shalekv.wording import counted
from shalekv_client import ShaleKVError


def totals(account: Account, elapsed_s: float) -> str:
    """What was stored, and how fast."""
    rate = account.rows / max(elapsed_s, 1e-9)
    return (
        f"loaded {counted(account.rows, 'row')}, {account.bytes:,} bytes of keys and values, "
        f"in {elapsed_s:.1f} s ({rate:,.0f} rows/s)"
    )


def certain(account: Account) -> str:
    """Up to where everything is stored, and what else is known."""
    match account.position.line:
        case 0:
            parts = ["No line is stored for certain"]
        case 1:
            parts = ["Line 1 is stored for certain"]
        case line:
            parts = [f"Lines 1 to {line:,} are stored for certain"]
    if account.rows_beyond:
        parts.append(f"and {counted(account.rows_beyond, 'row')} after them")
    if account.unknown_rows:
        parts.append(f"of {counted(account.unknown_rows, 'row')} it is not known")
    return ", ".join(parts) + ". Loading again is safe."


def report_failure(account: Account) -> None:
    """Say on stderr what went wrong, and end with its exit code; or return."""
    if account.is_good:
        return
    code: int = ExitCode.USAGE
    for rows, error in account.failures():
        code = exit_code_of_call(error)
        click.echo(f"Error: {_lines(rows, error)}: {error}", err=True)
    if account.bad_input is not None:
        click.echo(f"Error: {account.bad_input}", err=True)
    if account.file_trouble is not None:
        code = ExitCode.OUTPUT
        click.echo(f"Error: a file cannot be written: {account.file_trouble}", err=True)
    click.echo(certain(account), err=True)
    raise SystemExit(code)


def _lines(rows: Rows, error: ShaleKVError) -> str:
    """The line that the server complains about, or all lines of the batch."""
    index = refused_row(error, rows)
    if index is not None:
        return f"line {rows.lines[index]:,}"
    return f"lines {rows.first_line:,} to {rows.last_line:,}"
