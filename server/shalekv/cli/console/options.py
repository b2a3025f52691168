"""Option groups shared by commands: the state to read, a range of keys, conditions of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import click

from shalekv.cli.console.connection import read_level_option
from shalekv.cli.console.keys import Encoding, argument_bytes
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.units import duration
from shalekv_client.policies import ReadLevel

if TYPE_CHECKING:
    from shalekv_client import Client, Condition, SessionToken
    from shalekv_client.calls import DataCalls
    from shalekv_client.one_call import OneCallClient

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

SEQ_MAX = 2**64 - 1

_READ_OPTIONS = ("read_level", "snapshot", "max_staleness_ms", "min_seq", "token")


class ReadOptions(NamedTuple):
    """The state that a read returns: its level, snapshot, and minimum freshness."""

    read_level: ReadLevel = ReadLevel.COMMITTED
    snapshot: str = ""  # a name, or an id in hexadecimal; empty: the newest state
    max_staleness_ms: int = 0
    min_seq: int = 0
    token: SessionToken | None = None

    async def arguments(self, client: Client) -> dict[str, Any]:
        """The keyword arguments for reads of `client`; also hands the token to `client`.

        Raises `SnapshotNotFound`.
        """
        if self.token is not None:
            client.advance(self.token)
        if self.min_seq:
            client.fleet.freshness.seen(self.min_seq)
        if self.snapshot:
            return {**self._given(), "at": await _snapshot_id(client, self.snapshot)}
        return self._given()

    async def for_call(self, client: OneCallClient) -> tuple[DataCalls, dict[str, Any]]:
        """The client that can read this state, and the keyword arguments for its read.

        Raises `SnapshotNotFound`.
        """
        if self.token is None and not self.min_seq and not self.snapshot:
            return client, self._given()
        full = await client.client()
        return full, await self.arguments(full)

    def _given(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"read_level": self.read_level}
        if self.max_staleness_ms:
            arguments["max_staleness_ms"] = self.max_staleness_ms
        return arguments


def read_options(command: CommandT) -> CommandT:
    """A decorator that adds --read-level and the options of freshness, as `reading`."""
    command = grouped_options("reading", _READ_OPTIONS, _read_options)(command)
    command = click.option(
        "--token",
        metavar="TOKEN",
        callback=_token,
        help="Read a state at least as new as this session token of a client.",
    )(command)
    command = click.option(
        "--min-seq",
        type=click.IntRange(min=1),
        metavar="SEQ",
        help="Read a state that includes this commit: the server waits for it.",
    )(command)
    command = click.option(
        "--max-staleness",
        "max_staleness_ms",
        callback=duration,
        metavar="TIME",
        help="Read a state no older than this, such as 500ms or 5s.",
    )(command)
    command = click.option(
        "--snapshot",
        default="",
        metavar="ID|NAME",
        help="Read this snapshot instead of the newest state.",
    )(command)
    return read_level_option(command)


def _read_options(
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
    from shalekv_client import InvalidToken, SessionToken  # noqa: PLC0415 (slow)

    try:
        return SessionToken.parse(text)
    except InvalidToken as error:
        raise click.BadParameter(str(error)) from None


async def _snapshot_id(client: Client, name_or_id: str) -> bytes:
    """Find a snapshot by name, else by id; names come first, since one may look like an id."""
    from shalekv_client import SnapshotNotFound  # noqa: PLC0415 (slow)
    from shalekv_client.admin import ID_BYTES  # noqa: PLC0415
    from shalekv_client.errors import ErrorDetails  # noqa: PLC0415

    for each in await client.list_snapshots():
        if each.name == name_or_id:
            return each.id
    try:
        snapshot_id = bytes.fromhex(name_or_id)
    except ValueError:
        snapshot_id = b""
    if len(snapshot_id) != ID_BYTES:
        message = f"there is no snapshot {name_or_id}: it has expired, was deleted, or never was"
        raise SnapshotNotFound(ErrorDetails(client.address, "NOT_FOUND", message))
    return snapshot_id


class RangeArguments(TypedDict):
    """The keyword arguments of client calls that name a range of keys."""

    start: bytes
    end: bytes
    prefix: bytes


class RangeFlags(NamedTuple):
    """A range of keys as typed by the user; a bound that is not given is empty."""

    start: str
    end: str
    prefix: str
    prefix_name: str = "--prefix"  # how the user gave the prefix, for errors

    @property
    def is_given(self) -> bool:
        """Return whether any bound is given."""
        return bool(self.start or self.end or self.prefix)

    def decoded(self, encoding: Encoding) -> RangeArguments:
        """Decode the bounds for calls of the client; a usage error if one is misspelt."""
        return {
            "start": argument_bytes(encoding, self.start, "--start"),
            "end": argument_bytes(encoding, self.end, "--end"),
            "prefix": argument_bytes(encoding, self.prefix, self.prefix_name),
        }


def range_options(command: CommandT) -> CommandT:
    """A decorator that adds --start, --end and --prefix, as the argument `key_range`."""
    command = grouped_options("key_range", ("start", "end", "prefix"), _range)(command)
    return _range_flags(command)


def prefix_and_range_options(command: CommandT) -> CommandT:
    """A decorator that adds `range_options` and the argument PREFIX, which stands for --prefix."""
    names = ("prefix_word", "start", "end", "prefix")
    command = grouped_options("key_range", names, _prefix_or_range)(command)
    command = _range_flags(command)
    return click.argument("prefix_word", metavar="[PREFIX]", required=False, default="")(command)


def _range_flags(command: CommandT) -> CommandT:
    texts = {
        "prefix": "All keys that begin with this.",
        "end": "The end of the range; this key is excluded.",
        "start": "The start of the range; this key is included.",
    }
    for name, text in texts.items():
        command = click.option(f"--{name}", metavar="KEY", default="", help=text)(command)
    return command


def _range(*, start: str, end: str, prefix: str) -> RangeFlags:
    if prefix and (start or end):
        raise click.UsageError("--prefix excludes --start and --end")
    return RangeFlags(start, end, prefix)


def _prefix_or_range(*, prefix_word: str, start: str, end: str, prefix: str) -> RangeFlags:
    if prefix_word and (start or end or prefix):
        raise click.UsageError("PREFIX excludes --prefix, --start and --end")
    if prefix_word:
        return RangeFlags("", "", prefix_word, "PREFIX")
    return _range(start=start, end=end, prefix=prefix)


cost_option = click.option(
    "--cost",
    "tells_cost",
    is_flag=True,
    help="Say on stderr which requests to the object store the call has caused, and their cost.",
)


def condition_options(command: CommandT) -> CommandT:
    """A decorator that adds --if-absent, --if-present and --if-seq, as the argument `condition`."""
    names = ("if_absent", "if_present", "if_seq")
    command = grouped_options("condition", names, _condition)(command)
    command = click.option(
        "--if-seq",
        type=click.IntRange(1, SEQ_MAX),
        metavar="SEQ",
        help="Write only if the value is from this commit, as printed by get and scan.",
    )(command)
    command = click.option("--if-present", is_flag=True, help="Write only if the key has a value.")(
        command
    )
    return click.option("--if-absent", is_flag=True, help="Write only if the key has no value.")(
        command
    )


def _condition(*, if_absent: bool, if_present: bool, if_seq: int | None) -> Condition | None:
    if not if_absent and not if_present and if_seq is None:
        return None
    from shalekv_client import Exists, Missing, SeqIs  # noqa: PLC0415 (slow)

    given: list[Condition] = []
    if if_absent:
        given.append(Missing())
    if if_present:
        given.append(Exists())
    if if_seq is not None:
        given.append(SeqIs(seq=if_seq))
    if len(given) > 1:
        raise click.UsageError("--if-absent, --if-present and --if-seq exclude each other")
    return given[0]
