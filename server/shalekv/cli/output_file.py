"""Printing into a file that appears whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import click

from shalekv.cli.console.atomic_file import whole_file
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import printing

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def output_option(command: CommandT) -> CommandT:
    """A decorator that adds --output, as the argument `output_path`."""
    return click.option(
        "--output",
        "output_path",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="The file to write, whole or not at all.  [default: standard output]",
    )(command)


@contextmanager
def printing_into(path: Path | None) -> Iterator[None]:
    """What is printed within this goes into the file at `path`; None: to standard output."""
    if path is None:
        with printing():
            yield
        return
    try:
        with whole_file(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            try:
                with redirect_stdout(text):
                    yield
            finally:
                text.detach()  # which writes what is left
    except OSError as error:
        click.echo(f"Error: --output cannot be written: {error}", err=True)
        raise SystemExit(ExitCode.OUTPUT) from None
