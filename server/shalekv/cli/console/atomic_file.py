"""Files that are replaced atomically: written to a temporary file beside, synced, then renamed."""

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

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file to write that replaces the one at `path` on exit without an error.

    The old file stays at `path` until then, and for good if there is an error. Links are followed
    and stay links. A device or a pipe is written directly. The new file has the permissions `mode`,
    less those that the umask of this process withholds.
    """
    target = path.resolve()
    if _is_special(target):
        with target.open("wb") as file:
            yield cast("BinaryIO", file)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _is_special(target: Path) -> bool:
    try:
        return not stat.S_ISREG(target.stat().st_mode)
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def output_option(command: CommandT) -> CommandT:
    """A decorator that adds --output, as the argument `output_path`."""
    return click.option(
        "--output",
        "output_path",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="Write into this file, which is replaced only if all goes well.  "
        "[default: standard output]",
    )(command)


@contextmanager
def printing_into(path: Path | None) -> Iterator[None]:
    """Send the prints of this context into the file at `path`, atomically; None: to stdout.

    Ends the process with `ExitCode.OUTPUT` when the file cannot be written.
    """
    if path is None:
        with printing():
            yield
        return
    try:
        with atomic_file(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            try:
                with redirect_stdout(text):
                    yield
            finally:
                text.detach()  # writes what is buffered
    except OSError as error:
        click.echo(f"Error: --output cannot be written: {error.strerror or error}", err=True)
        raise SystemExit(ExitCode.OUTPUT) from None
