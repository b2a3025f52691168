"""Files that appear whole or not at all: written beside their place, synced, then renamed."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import click

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import printing


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which is at `path` when this is left without an error.

    What was at `path` is there until then, and stays if there is an error. A device or a pipe is
    written directly.
    """
    place = path.resolve()  # through links, which stay what they are
    if _is_special(place):
        with place.open("wb") as file:
            yield cast("BinaryIO", file)
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(place.parent)


def _is_special(place: Path) -> bool:
    try:
        return not stat.S_ISREG(place.stat().st_mode)
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- output_file
# Printing into a file that appears whole or not at all.


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
