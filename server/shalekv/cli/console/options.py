"""The options that say which state a read is to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import click

from shalekv.cli.console.connection import read_level_option
from shalekv.cli.console.keys import Encoding, argument_bytes
from shalekv.cli.console.option_groups import gathered
from shalekv.cli.console.units import duration
from shalekv_client import (
    Absent,
    Client,
    Condition,
    Present,
    ReadLevel,
    SeqEquals,
    Snapshot,
    SnapshotNotFound,
)
from shalekv_client.errors import ErrorDetails
from shalekv_client.snapshots import ID_BYTES
from shalekv_client.tokens import InvalidToken, SessionToken

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_OPTIONS = ("read_level", "snapshot", "max_staleness_ms", "min_seq", "token")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Which state is to be read."""

    read_level: ReadLevel = ReadLevel.COMMITTED
    snapshot: str = ""  # its name, or its id in hexadecimal; empty: the newest state
    max_staleness_ms: int = 0
    min_seq: int = 0
    token: SessionToken | None = None

    async def arguments(self, client: Client) -> dict[str, Any]:
        """The arguments of the reads of `client`, which has been given the token."""
        if self.token is not None:
            client.advance(self.token)
        arguments: dict[str, Any] = {"read_level": self.read_level}
        if self.max_staleness_ms:
            arguments["max_staleness_ms"] = self.max_staleness_ms
        if self.min_seq:
            client.fleet.freshness.seen(self.min_seq)
        if self.snapshot:
            arguments["at"] = await _snapshot_id(client, self.snapshot)
        return arguments


def read_options(command: CommandT) -> CommandT:
    """A decorator that adds --read-level and the options of freshness, as `reading`."""
    command = gathered("reading", _OPTIONS, _reading)(command)
    command = click.option(
        "--token",
        metavar="TOKEN",
        callback=_token,
        help="The state must be the one of this session token of a client, or newer.",
    )(command)
    command = click.option(
        "--min-seq",
        type=click.IntRange(min=1),
        metavar="SEQ",
        help="The state must contain this commit: the server waits for it.",
    )(command)
    command = click.option(
        "--max-staleness",
        "max_staleness_ms",
        callback=duration,
        metavar="TIME",
        help="The state must not be older than this, such as 500ms or 5s.",
    )(command)
    command = click.option(
        "--snapshot",
        default="",
        metavar="ID|NAME",
        help="Read at this snapshot, not the newest state.",
    )(command)
    return read_level_option(command)


def _reading(
    *,
    read_level: ReadLevel,
    snapshot: str,
    max_staleness_ms: int | None,
    min_seq: int | None,
    token: SessionToken | None,
) -> ReadOptions:
    if snapshot and (max_staleness_ms or min_seq):
        raise click.UsageError("--snapshot excludes --max-staleness and --min-seq")
    return ReadOptions(read_level, snapshot, max_staleness_ms or 0, min_seq or 0, token)


def _token(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> SessionToken | None:
    if text is None:
        return None
    try:
        return SessionToken.parse(text)
    except InvalidToken as error:
        raise click.BadParameter(str(error)) from None


async def _snapshot_id(client: Client, called: str) -> bytes:
    """The id of the snapshot that is called so: by name first, since a name may look like an id."""
    found: list[Snapshot] = await client.list_snapshots()
    for each in found:
        if each.name == called:
            return each.id
    try:
        snapshot_id = bytes.fromhex(called)
    except ValueError:
        snapshot_id = b""
    if len(snapshot_id) != ID_BYTES:
        message = f"there is no snapshot {called}: it has expired, was deleted, or never was"
        raise SnapshotNotFound(ErrorDetails(client.address, "NOT_FOUND", message))
    return snapshot_id


# --- ranges
# The options that name a range of keys.


class RangeArguments(TypedDict):
    """The arguments of the client that say which keys."""

    start: bytes
    end: bytes
    prefix: bytes


@dataclass(frozen=True, slots=True)
class RangeWords:
    """A range as it was typed; an end that was left out is empty."""

    start: str
    end: str
    prefix: str

    @property
    def is_given(self) -> bool:
        """Whether it is anything but all keys."""
        return bool(self.start or self.end or self.prefix)

    def decoded(self, encoding: Encoding) -> RangeArguments:
        """The arguments of the calls of the client."""
        return {
            "start": argument_bytes(encoding, self.start, "--start"),
            "end": argument_bytes(encoding, self.end, "--end"),
            "prefix": argument_bytes(encoding, self.prefix, "--prefix"),
        }


def range_options(command: CommandT) -> CommandT:
    """A decorator that adds --start, --end and --prefix, as the argument `key_range`."""
    command = gathered("key_range", ("start", "end", "prefix"), _range)(command)
    texts = {
        "prefix": "The keys that begin with this.",
        "end": "The first key that is left out.",
        "start": "The first key.",
    }
    for name, text in texts.items():
        command = click.option(f"--{name}", metavar="KEY", default="", help=text)(command)
    return command


def _range(*, start: str, end: str, prefix: str) -> RangeWords:
    if prefix and (start or end):
        raise click.UsageError("--prefix excludes --start and --end")
    return RangeWords(start, end, prefix)


# --- conditions
# The options of a write that must hold for it to be done.


SEQ_MAX = 2**64 - 1


def condition_options(command: CommandT) -> CommandT:
    """A decorator that adds --if-absent, --if-present and --if-seq, as the argument `condition`."""
    names = ("if_absent", "if_present", "if_seq")
    command = gathered("condition", names, _condition)(command)
    command = click.option(
        "--if-seq",
        type=click.IntRange(1, SEQ_MAX),
        metavar="SEQ",
        help="Only if its value was written by this commit, as get and scan tell it.",
    )(command)
    command = click.option("--if-present", is_flag=True, help="Only if it has a value.")(command)
    return click.option("--if-absent", is_flag=True, help="Only if it has no value.")(command)


def _condition(*, if_absent: bool, if_present: bool, if_seq: int | None) -> Condition | None:
    given: list[Condition] = []
    if if_absent:
        given.append(Absent())
    if if_present:
        given.append(Present())
    if if_seq is not None:
        given.append(SeqEquals(if_seq))
    if len(given) > 1:
        raise click.UsageError("--if-absent, --if-present and --if-seq exclude each other")
    return given[0] if given else None
