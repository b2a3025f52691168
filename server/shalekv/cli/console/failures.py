"""Failures of calls: how often one is repeated, what is said in the end, and the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import click

from shalekv.cli.console.connection import ClientExit, Target
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.variables import TOKEN_VARIABLE
from shalekv_client import (
    ConditionFailed,
    CounterOverflow,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    KeyReused,
    NotACounter,
    NotApplied,
    NoWriter,
    PermissionDenied,
    RangeTooCostly,
    RetryPolicy,
    ShaleKVError,
    SnapshotExists,
    SnapshotNotFound,
    Unauthenticated,
    Unimplemented,
    Unreachable,
    WalCollected,
    WrongDatabase,
)

# For interactive commands: a server that is down is reported within a fraction of a second.
FAIL_FAST = RetryPolicy(attempts_max=4)
# For long jobs: retry until --timeout-ms, so that a load survives a restart of its server.
RETRY_UNTIL_TIMEOUT = RetryPolicy(attempts_max=10_000)

# What to do about a connection that could not be made, by a part of the reason.
_CONNECTION_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "speaks TLS": "Give --tls-ca: a file with the authority of the server, or `system`.",
        "speaks no TLS": "Leave out --tls-ca and the other flags of TLS, or correct --addr.",
        "verify failed": "Give the file with the authority of the server by --tls-ca; "
        "--tls-server-name if its certificate has another name than --addr.",
        "certificate": "Give a certificate and its key that the server accepts: --tls-cert and "
        "--tls-key.",
        "not HTTP/2": "What listens there is no server of ShaleKV: correct --addr.",
        "Name or service not known": "There is no host of this name: correct --addr.",
        "No such file or directory": "There is no such socket: correct --addr, or start a server "
        "with --listen unix:PATH.",
    }
)
_UNKNOWN_ADVICE = (
    f"Give a token by --token-file or {TOKEN_VARIABLE}, or a certificate by --tls-cert and "
    "--tls-key."
)
_KNOWN_ADVICE = "The server knows no such token or certificate, or it has expired: get a new one."

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


def exit_code_of_call(error: ShaleKVError) -> int:
    """The exit code for a failed call."""
    match error:
        case Fenced():
            return ExitCode.FENCED
        case ConditionFailed():
            return ClientExit.CONDITION
        case Unauthenticated() | PermissionDenied():
            return ClientExit.DENIED
        case _ if isinstance(error, _WRONG_REQUEST):
            return ExitCode.USAGE
        case NotApplied():
            return ClientExit.NOT_APPLIED
        case Unreachable():
            return ClientExit.UNREACHABLE
        case _:
            return ClientExit.UNKNOWN


def end_process(
    error: ShaleKVError, target: Target, *, mutates: bool, refused: str = "Not written"
) -> NoReturn:
    """Print `failure_lines` and end the process with the exit code of the failure."""
    for line in failure_lines(error, target, mutates=mutates, refused=refused):
        click.echo(line, err=True)
    raise SystemExit(exit_code_of_call(error)) from None


def failure_lines(
    error: ShaleKVError, target: Target, *, mutates: bool, refused: str = "Not written"
) -> list[str]:
    """Describe a failed call, what is known of its effect if it `mutates`, and what to do.

    `refused` is said of a write whose condition does not hold.
    """
    if isinstance(error, ConditionFailed):
        has = f"exists, with seq {error.found_seq}" if error.found_seq else "does not exist"
        return [f"{refused}: the key {has}."]
    return [f"Error: {error}", *_advice(error, target, mutates=mutates)]


def _advice(error: ShaleKVError, target: Target, *, mutates: bool) -> list[str]:
    if isinstance(error, Unreachable):
        return [_connection_advice(error.details.message)]
    if isinstance(error, Unauthenticated):
        return [_KNOWN_ADVICE if target.has_credentials else _UNKNOWN_ADVICE]
    lines = []
    if isinstance(error, PermissionDenied):
        lines.append("Roles are granted with `shalekv grant set`: see its --help.")
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


def _connection_advice(problem: str) -> str:
    """Say what to do about a connection that could not be made."""
    for text, advice in _CONNECTION_ADVICE.items():
        if text in problem:
            return advice
    return "Is a server running there? See --addr, and `shalekv serve --help` to start one."
