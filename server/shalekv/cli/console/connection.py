"""Shared parts of the commands that talk to a server: options, the client, and exit codes."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.variables import (
    ADDRESS_VARIABLE,
    CLIENT_KEYS,
    CONFIG_VARIABLE,
    TOKEN_VARIABLE,
    variable_of_client,
)
from shalekv.errors import InvalidSetting
from shalekv_client.policies import Durability, ReadLevel, ReadPolicy, Wire
from shalekv_client.routing.addresses import checked_address, chosen_wire

if TYPE_CHECKING:  # slow to import, and not needed by every command
    from shalekv_client.client import Client
    from shalekv_client.routing.retry import RetryPolicy
    from shalekv_client.routing.security import Security, TlsOptions

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

DEFAULT_ADDRESS = "127.0.0.1:7654"
TIMEOUT_MS_MAX = 3_600_000


class ClientExit(enum.IntEnum):
    """Exit codes of the commands that talk to a server, in addition to those of `ExitCode`."""

    NOT_FOUND = 1
    UNREACHABLE = 9
    NOT_APPLIED = 10
    UNKNOWN = 11
    CONDITION = 13  # 12 is `ExitCode.OUTPUT`
    DENIED = 14


_MEANING: Mapping[int, str] = MappingProxyType(
    {
        ExitCode.OK: "done",
        ClientExit.NOT_FOUND: "get, exists, ttl, touch: a key has no value",
        ExitCode.USAGE: "an argument, a row or a request is wrong; it changed nothing",
        ExitCode.FENCED: "this server was fenced by a newer writer; nothing was done",
        ClientExit.UNREACHABLE: "there is no connection to the server",
        ClientExit.NOT_APPLIED: "the server refused; nothing was done, try again later",
        ClientExit.UNKNOWN: "no answer, or a failure: a write may or may not have been applied",
        ExitCode.OUTPUT: "standard output, or a file, cannot be written",
        ClientExit.DENIED: "the server does not know the caller, or does not allow it to do this",
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

SYSTEM = "system"  # in place of a file: the authorities of the system


@dataclass(frozen=True, slots=True)
class Target:
    """The servers of a command, which of them reads go to, and the timeout of a call."""

    addresses: tuple[str, ...]  # at least one
    timeout_ms: int
    reads: ReadPolicy = ReadPolicy.ANY
    tls: TlsOptions | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    insecure_token: bool = False

    @property
    def address(self) -> str:
        """The first address, for calls to a single server."""
        return self.addresses[0]

    @property
    def has_credentials(self) -> bool:
        """Return whether the command shows who calls."""
        has_certificate = self.tls is not None and bool(self.tls.certificate)
        return has_certificate or self.token is not None or self.token_file is not None

    @property
    def plain_address(self) -> str | None:
        """The address of the only server, if a call needs nothing but a connection to it.

        None: there are several servers, TLS, a token, or another wire; or reads go to the writer,
        which a server must be asked for first.
        """
        is_plain = (
            len(self.addresses) == 1
            and not self.has_security
            and self.reads is not ReadPolicy.WRITER
            and chosen_wire(None) is Wire.NATIVE
        )
        return self.address if is_plain else None

    @property
    def has_security(self) -> bool:
        """Return whether there is TLS or a token."""
        return self.tls is not None or self.token is not None or self.token_file is not None

    def client(
        self,
        address: str | None = None,
        *,
        retry: RetryPolicy,
        coalesce: bool = False,
        reads: ReadPolicy = ReadPolicy.ANY,
    ) -> Client:
        """Return a client of all servers, or of that at `address`."""
        from shalekv_client.client import Client  # noqa: PLC0415 (slow)

        return Client(
            self.addresses if address is None else address,
            timeout_ms=self.timeout_ms,
            retry=retry,
            coalesce=coalesce,
            reads=reads,
            tls=self.tls or False,
            access_token=self.token,
            access_token_file=self.token_file,
            insecure_token=self.insecure_token,
        )

    def security(self) -> Security:
        """Return TLS and token. Raises ValueError and OSError for those that cannot be used."""
        from shalekv_client.routing.security import Security  # noqa: PLC0415 (slow)

        security = Security.of(
            self.addresses,
            self.tls or False,
            self.token,
            self.token_file,
            is_insecure=self.insecure_token,
        )
        security.metadata()
        return security


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


def _of_client(key: str) -> Callable[[], Any]:
    """Return what finds the value of a key of [client] in the file of the settings."""

    def value() -> Any:
        file = click.get_current_context().params.get("config")  # of commands that have the flag
        if not isinstance(file, os.PathLike):
            file = os.environ.get(CONFIG_VARIABLE)
        if not file:
            return None
        from pathlib import Path  # noqa: PLC0415 (slow)

        from shalekv.cli.console.configuration import client_settings  # noqa: PLC0415 (slow)

        try:
            return client_settings(Path(file)).get(key)
        except InvalidSetting as error:
            raise click.UsageError(str(error)) from None

    return value


def _security_option(key: str, kind: Any, metavar: str | None, text: str) -> Any:
    return click.option(
        "--" + key.replace("_", "-"),
        type=kind,
        metavar=metavar,
        envvar=variable_of_client(key),
        show_envvar=True,
        default=_of_client(key),
        is_flag=kind is bool,
        help=text,
    )


_FILE = click.Path(exists=True, dir_okay=False)  # str: `pathlib` is slow
_SECURITY_OPTIONS = (
    _security_option(
        "tls_ca",
        str,
        "FILE",
        "Use TLS. The PEM file has the authorities of servers; `system`: those of the system.",
    ),
    _security_option("tls_cert", _FILE, "FILE", "PEM file with the certificate of the caller."),
    _security_option("tls_key", _FILE, "FILE", "PEM file with the key of that certificate."),
    _security_option(
        "tls_server_name",
        str,
        "NAME",
        "The name in the certificate of the server, if it is not the host of --addr.",
    ),
    _security_option(
        "token_file",
        _FILE,
        "FILE",
        f"File with the access token of the caller. Without it, {TOKEN_VARIABLE} has the token.",
    ),
    _security_option(
        "insecure_token", bool, None, "Send the token also without TLS: the network can read it."
    ),
)


def target_options(command: CommandT) -> CommandT:
    """A decorator that adds --addr, --reads, --timeout-ms and those of security, as `target`."""
    names = ("addr", "reads", "timeout_ms", *CLIENT_KEYS)
    command = grouped_options("target", names, _target)(command)
    for option in reversed(_SECURITY_OPTIONS):
        command = option(command)
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


def _target(  # noqa: PLR0913 (an argument for each option)
    *,
    addr: tuple[str, ...],
    reads: ReadPolicy,
    timeout_ms: int,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_server_name: str | None,
    token_file: str | None,
    insecure_token: bool,
) -> Target:
    tls = None
    if tls_ca or tls_cert or tls_key or tls_server_name:
        from shalekv_client.routing.security import TlsOptions  # noqa: PLC0415 (slow)

        authorities = "" if tls_ca in (None, SYSTEM) else tls_ca
        tls = TlsOptions(authorities, tls_cert or "", tls_key or "", tls_server_name or "")
    token = _token_beside("token_file")
    target = Target(
        addr,
        timeout_ms,
        reads,
        tls,
        token,
        token_file if token is None else None,
        insecure_token,
    )
    try:  # before a client is made
        chosen_wire(None)
        if target.has_security:
            target.security()
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    return target


def _token_beside(option: str) -> str | None:
    """Return the token of the environment, unless the option is on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    if source is ParameterSource.COMMANDLINE:
        return None
    return os.environ.get(TOKEN_VARIABLE) or None


def _addresses(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    words = [word.strip() for value in values for word in value.split(",")]
    try:
        return tuple(dict.fromkeys(map(checked_address, words)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
