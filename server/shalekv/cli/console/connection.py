"""Shared parts of the commands that talk to a server: options, the call, and its exit codes."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import click

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.option_groups import grouped_options
from shalekv_client import (
    Client,
    ConditionFailed,
    CounterOverflow,
    DeadlineExceeded,
    Durability,
    Fenced,
    InvalidRequest,
    KeyReused,
    NotACounter,
    NotApplied,
    NoWriter,
    RangeTooCostly,
    ReadLevel,
    RetryPolicy,
    ShaleKVError,
    SnapshotExists,
    SnapshotNotFound,
    Unimplemented,
    Unreachable,
    WalCollected,
    WrongDatabase,
)
from shalekv_client.policies import ReadPolicy
from shalekv_client.routing.servers import checked_address, chosen_wire

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ADDRESS_VARIABLE = "SHALEKV_ADDR"
DEFAULT_ADDRESS = "127.0.0.1:7654"
TIMEOUT_MS_MAX = 3_600_000

# For interactive commands: a server that is down is reported within a fraction of a second.
FAIL_FAST = RetryPolicy(attempts_max=4)
# For long jobs: retry until --timeout-ms, so that a load survives a restart of its server.
RETRY_UNTIL_TIMEOUT = RetryPolicy(attempts_max=10_000)


class ClientExit(enum.IntEnum):
    """Exit codes of the commands that talk to a server, in addition to those of `ExitCode`."""

    NOT_FOUND = 1
    UNREACHABLE = 9
    NOT_APPLIED = 10
    UNKNOWN = 11
    CONDITION = 13  # 12 is `ExitCode.OUTPUT`


_MEANING: Mapping[int, str] = MappingProxyType(
    {
        ExitCode.OK: "done",
        ClientExit.NOT_FOUND: "get: the key has no value",
        ExitCode.USAGE: "an argument, a row or a request is wrong; it changed nothing",
        ExitCode.FENCED: "this server was fenced by a newer writer; nothing was done",
        ClientExit.UNREACHABLE: "there is no connection to the server",
        ClientExit.NOT_APPLIED: "the server refused; nothing was done, try again later",
        ClientExit.UNKNOWN: "no answer, or a failure: a write may or may not have been applied",
        ExitCode.OUTPUT: "standard output, or a file, cannot be written",
        ClientExit.CONDITION: "the condition did not hold; of txn: the else branch was done",
        ExitCode.INTERRUPTED: "ended by Ctrl-C",
    }
)

# In addition, for commands that also talk to the object store.
_MEANING_OF_STORES: Mapping[int, str] = MappingProxyType(
    {
        ExitCode.DATABASE_NOT_FOUND: "there is no database at the URL",
        ExitCode.DAMAGED: "stored bytes are damaged, or newer than this version",
        ExitCode.STORE: "the object store does not answer, refuses, or cannot be written safely",
        ExitCode.CONFLICT: "it took too long, or others edited the manifest: try again",
    }
)

# Errors that a retry cannot fix: the request is invalid, or does not fit the stored state.
_WRONG_REQUEST = (
    InvalidRequest,
    Unimplemented,
    NotACounter,
    CounterOverflow,
    RangeTooCostly,
    KeyReused,
    SnapshotNotFound,
    SnapshotExists,
    WalCollected,
    WrongDatabase,
)


@dataclass(frozen=True, slots=True)
class Target:
    """The servers of a command, which of them reads go to, and the timeout of a call."""

    addresses: tuple[str, ...]  # at least one
    timeout_ms: int
    reads: ReadPolicy = ReadPolicy.ANY

    @property
    def address(self) -> str:
        """The first address, for calls to a single server."""
        return self.addresses[0]


def exit_code_of_call(error: ShaleKVError) -> int:
    """The exit code for a failed call."""
    match error:
        case Fenced():
            return ExitCode.FENCED
        case ConditionFailed():
            return ClientExit.CONDITION
        case _ if isinstance(error, _WRONG_REQUEST):
            return ExitCode.USAGE
        case NotApplied():
            return ClientExit.NOT_APPLIED
        case Unreachable():
            return ClientExit.UNREACHABLE
        case _:
            return ClientExit.UNKNOWN


def exit_codes_of_calls(*, until_interrupted: bool = False, reads_store: bool = False) -> str:
    """The table of exit codes as an epilog of a --help.

    `until_interrupted`: the command runs until Ctrl-C, which is then a success. `reads_store`: the
    command may also talk to the object store.
    """
    meanings = dict(sorted({**_MEANING, **(_MEANING_OF_STORES if reads_store else {})}.items()))
    if until_interrupted:
        meanings[ExitCode.OK] = "done, or ended by Ctrl-C"
        del meanings[ExitCode.INTERRUPTED]
    rows = [f"  {code:>3}  {meaning}" for code, meaning in meanings.items()]
    return "\n".join(["\b", "Exit codes:", *rows])


def target_options(command: CommandT) -> CommandT:
    """A decorator that adds --addr, --reads and --timeout-ms, as the argument `target`."""
    command = grouped_options("target", ("addr", "reads", "timeout_ms"), _target)(command)
    command = click.option(
        "--timeout-ms",
        type=click.IntRange(1, TIMEOUT_MS_MAX),
        default=10_000,
        show_default=True,
        metavar="MILLISECONDS",
        help="How long to wait for the server.",
    )(command)
    command = click.option(
        "--reads",
        type=click.Choice([policy.value for policy in ReadPolicy]),
        default=ReadPolicy.ANY.value,
        show_default=True,
        callback=lambda _context, _option, value: ReadPolicy(value),
        help="Which of several servers reads go to.",
    )(command)
    return click.option(
        "--addr",
        "--address",
        "addr",
        metavar="HOST:PORT",
        multiple=True,
        envvar=ADDRESS_VARIABLE,
        default=[DEFAULT_ADDRESS],
        show_default=True,
        show_envvar=True,
        callback=_addresses,
        help="A server. Give several with commas or by repeating the option: writes go to the "
        "writer among them.",
    )(command)


def durability_option(command: CommandT) -> CommandT:
    """A decorator that adds --durability, as the argument `durability`."""
    return click.option(
        "--durability",
        type=click.Choice([level.name.lower() for level in Durability]),
        default=Durability.DURABLE.name.lower(),
        show_default=True,
        callback=lambda _context, _option, value: Durability[value.upper()],
        help="When the write counts as done.",
    )(command)


def read_level_option(command: CommandT) -> CommandT:
    """A decorator that adds --read-level, as the argument `read_level`."""
    return click.option(
        "--read-level",
        type=click.Choice([level.name.lower() for level in ReadLevel]),
        default=ReadLevel.COMMITTED.name.lower(),
        show_default=True,
        callback=lambda _context, _option, value: ReadLevel[value.upper()],
        help="How current the state must be.",
    )(command)


def talk(
    target: Target,
    call: Callable[[Client], Awaitable[ResultT]],
    *,
    mutates: bool = False,
    retry: RetryPolicy = FAIL_FAST,
) -> ResultT:
    """Run `call` with a client of the target that retries by `retry`, and return its result.

    A failure is printed, with its effect as far as known if the call `mutates`, and ends the
    process with a code that `exit_codes_of_calls` lists.
    """

    async def connected() -> ResultT:
        async with Client(
            target.addresses,
            timeout_ms=target.timeout_ms,
            retry=retry,
            coalesce=False,
            reads=target.reads,
        ) as client:
            return await call(client)

    try:
        return asyncio.run(connected())
    except ShaleKVError as error:
        for line in (f"Error: {error_text(error)}", *_advice(error, target, mutates=mutates)):
            click.echo(line, err=True)
        raise SystemExit(exit_code_of_call(error)) from None


def error_text(error: ShaleKVError) -> str:
    """Describe a failed call in one line."""
    if isinstance(error, ConditionFailed):
        found = f"the key has seq {error.found_seq}" if error.found_seq else "the key has no value"
        return f"condition failed: {found}"
    return str(error)


def _advice(error: ShaleKVError, target: Target, *, mutates: bool) -> list[str]:
    if isinstance(error, Unreachable):
        return ["Is a server running there? See --addr, and `shalekv serve --help` to start one."]
    lines = []
    if isinstance(error, NoWriter):
        lines.append("Is one running? See --addr, and `shalekv serve --help` to start one.")
    if isinstance(error, DeadlineExceeded) and not error.reason:
        lines.append(
            f"The limit was {target.timeout_ms:,} ms (--timeout-ms); the log of the server may say "
            "why."
        )
    if not mutates or isinstance(error, _WRONG_REQUEST):
        return lines
    if isinstance(error, NotApplied):
        return [*lines, "Nothing was changed."]
    if error.reason == "WRITE_TIMED_OUT":  # its message has the advice
        return lines
    unknown = "It is not known whether it was applied: read the key to find out, or repeat it."
    return [*lines, unknown]


def _target(*, addr: tuple[str, ...], reads: ReadPolicy, timeout_ms: int) -> Target:
    try:
        chosen_wire(None)  # before a client is made
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return Target(addr, timeout_ms, reads)


def _addresses(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    words = [word.strip() for value in values for word in value.split(",")]
    try:
        return tuple(dict.fromkeys(map(checked_address, words)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
