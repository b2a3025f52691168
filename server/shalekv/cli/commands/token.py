"""`shalekv token`: create, list and remove static tokens in the file that servers read."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from shalekv.cli.console.atomic_file import atomic_file
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
)
from shalekv.cli.console.units import cell_format
from shalekv.server.access.identity import NEVER_MS
from shalekv.server.access.tokens import (
    HEADING,
    NAME,
    StaticToken,
    new_token,
    parse_tokens,
    read_token_file,
    token_lines,
)
from shalekv.wording import MS_PER_S, counted

FILE_MODE = 0o600  # of a new file
MS_PER_DAY = 86_400_000
DAYS_MAX = 36_500
TOKENS_OF_A_NAME_MAX = 2  # the old one, until all clients have the new one
COLUMNS = ("id", "name", "created_at_ms", "expires_at_ms")

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_HELP = """Create, list and remove static tokens.

A server that is started with --tokens-file reads the file again within a second when it has
changed. The file has no tokens, only their hashes; it is replaced atomically, and its owner and
mode stay.

\b
Examples:
  shalekv token create alice --file tokens > alice.token
  shalekv token create alice --file tokens --expires-days 90 > alice.token
  shalekv token list --file tokens
  shalekv token remove alice --file tokens
"""

_HELP_CREATE = """Create a token of the principal token:NAME, and print it.

This is the only time that it is shown. A name may have two tokens at once: to replace one, create
another, give it to all clients, and remove the first by its id.
"""

_HELP_REMOVE = """Remove a token by its id, or all tokens of a name.

Servers that read the file refuse them within two seconds, and end the streams that they have
opened.
"""


def _file_option(command: CommandT) -> CommandT:
    return click.option(
        "--file",
        "path",
        type=click.Path(dir_okay=False, path_type=Path),
        required=True,
        metavar="PATH",
        help="The file with the hashes of the tokens: the --tokens-file of servers.",
    )(command)


def _name(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise click.BadParameter(
            "a name has 1 to 100 letters, digits, '.', '_', '@', '/' and '-', and begins with a "
            "letter or digit"
        )
    return value


@click.group(help=_HELP, epilog=exit_codes_text())
def token() -> None:
    """Hold the commands about tokens."""


@token.command(help=_HELP_CREATE)
@click.argument("name", callback=_name)
@_file_option
@click.option(
    "--expires-days",
    type=click.IntRange(1, DAYS_MAX),
    metavar="DAYS",
    help="Refuse the token after this time.  [default: never]",
)
@brief_format_option("the token alone")
def create(
    *, name: str, path: Path, expires_days: int | None, output_format: Format | None
) -> None:
    """Add a token to the file, and print it."""
    now_ms = time.time_ns() // 1_000_000 // MS_PER_S * MS_PER_S
    lifetime_ms = NEVER_MS if expires_days is None else expires_days * MS_PER_DAY
    with _locked(path):
        text, tokens = _read(path)
        count = sum(each.name == name and each.expires_at_ms > now_ms for each in tokens.values())
        if count >= TOKENS_OF_A_NAME_MAX:
            raise click.UsageError(
                f"{name} has {counted(count, 'token')} already; remove one first, by its id"
            )
        secret, made = new_token(name, now_ms=now_ms, lifetime_ms=lifetime_ms)
        with _replaced(path, f"{text or HEADING}\n{made.line()}\n"), printing():
            # Before it counts: one that nobody has seen is of no use.
            if output_format is None:
                print_line(secret)
            else:
                row = dict(zip(COLUMNS, _row(made), strict=True))
                print_record(output_format, {"token": secret, **row})
    *_, expires_at_ms = _row(made)
    expires = cell_format("expires_at_ms")(expires_at_ms)
    click.echo(
        f"Added token {made.token_id} of token:{name} to {path}; expires: {expires}. "
        "It is not shown again.",
        err=True,
    )


@token.command("list")
@_file_option
@format_option
def list_(*, path: Path, output_format: Format) -> None:
    """List the tokens of the file, those that have expired as well."""
    _, tokens = _read(path, is_needed=True)
    with printing():
        print_rows(output_format, COLUMNS, map(_row, tokens.values()))


@token.command(help=_HELP_REMOVE)
@click.argument("token_or_name", metavar="ID|NAME")
@_file_option
@brief_format_option("the ids")
def remove(*, token_or_name: str, path: Path, output_format: Format | None) -> None:
    """Remove tokens from the file, and print their ids."""
    with _locked(path):
        text, tokens = _read(path, is_needed=True)
        named = [each for each in tokens.values() if each.name == token_or_name]
        if token_or_name in tokens and named:
            raise click.UsageError(f"{token_or_name} is an id, and a name: edit {path} yourself")
        removed = {each.token_id for each in named} | ({token_or_name} & tokens.keys())
        if not removed:
            raise click.UsageError(f"{path} has no token with this id or name")
        with _replaced(path, _without(text, removed)):
            pass
    with printing():
        print_rows(output_format or Format.RAW, ("id",), [(each,) for each in sorted(removed)])


def _row(found: StaticToken) -> Sequence[Any]:
    is_forever = found.expires_at_ms == NEVER_MS
    expires_at_ms = None if is_forever else int(found.expires_at_ms)
    return (found.token_id, found.name, int(found.created_ms), expires_at_ms)


def _without(text: str, removed: Collection[str]) -> str:
    numbers = {number for number, line in token_lines(text) if line.split()[0] in removed}
    lines = enumerate(text.split("\n"), 1)
    return "\n".join(line for number, line in lines if number not in numbers) + "\n"


def _read(path: Path, *, is_needed: bool = False) -> tuple[str, Mapping[str, StaticToken]]:
    """Return the text of the file without its last end of a line, and the tokens in it.

    A file that is missing is empty, unless it is needed.
    """
    try:
        text = read_token_file(path).rstrip("\n")
        return text, parse_tokens(text)
    except FileNotFoundError:
        if is_needed:
            raise click.UsageError(f"there is no file {path}") from None
        return "", {}
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path} cannot be used: {error}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other command changes files of the same folder."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise click.UsageError(f"{path} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _replaced(path: Path, text: str) -> Iterator[None]:
    """Replace the file at the end of the block, unless that raises."""
    try:
        with atomic_file(path, FILE_MODE) as file:
            _take_over(file.fileno(), path)
            file.write(text.encode())
            yield
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None


def _take_over(descriptor: int, replaced: Path) -> None:
    """Give a file the owner and mode of the one that it replaces, so that its server reads it."""
    try:
        status = replaced.stat()
    except FileNotFoundError:
        return
    os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
