"""What the commands have in common that serve gRPC: their settings, and how their process ends."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
import uvloop

from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.process.logs import configure_logs
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.settings import (
    EndpointSettings,
    LogFormat,
    ReadSettings,
    SafekeepSettings,
    ServeSettings,
)
from shalekv.settings.budget import with_memory_shares

ServingT = TypeVar("ServingT", ServeSettings, ReadSettings)
ListeningT = TypeVar("ListeningT", ServeSettings, ReadSettings, SafekeepSettings)
Serve = Callable[[ListeningT, Callable[[str], None]], Coroutine[Any, Any, None]]


def serving_settings(flags: dict[str, Any], config: Path | None, model: type[ServingT]) -> ServingT:
    """The settings of a server, its memory divided. Raises `InvalidSetting`."""
    settings = load_settings(flags, config, model)
    try:
        settings = with_memory_shares(settings)
    except ValueError as error:
        message = f"--{error}".replace("memory_bytes", "memory-bytes", 1)
        raise InvalidSetting(message) from None
    refuse_exposure(settings.server)
    return settings


def run_server(
    settings: ListeningT, serve: Serve[ListeningT], greet: Callable[[str], None]
) -> ExitCode:
    """Run `serve` to its end, however it ends; `greet` is told the HOST:PORT on a terminal."""
    configure_logs(settings.server.log_format, settings.server.log_level)
    log = structlog.get_logger(__name__)

    def announce(listen: str) -> None:
        log.info("serving", listen=listen, url=settings.database.url)
        if settings.server.log_format is LogFormat.CONSOLE:
            greet(listen)

    try:
        uvloop.run(serve(settings, announce))
    except Exception as error:  # noqa: BLE001 - logged, in the format that was asked for
        code = exit_code_of(error)
        ended = log.bind(exit_code=code.value)
        if isinstance(error, ShaleError):
            # It says all there is to know: a traceback would only hide it.
            ended.error("ended by an error", reason=error.reason, problem=str(error))
        elif code is ExitCode.ADDRESS_IN_USE and isinstance(error, OSError):
            problem = f"{error.strerror}: stop what listens there, or give another --listen"
            ended.error("ended by an error", reason=code.name, problem=problem)
        else:
            ended.exception("ended by an unexpected error")
        return code
    return ExitCode.OK


def refuse_exposure(settings: EndpointSettings) -> None:
    """Raise `InvalidSetting` when the network could reach the port and nobody has allowed it."""
    host = settings.listen.rpartition(":")[0].strip("[]")
    if settings.insecure or _is_loopback(host):
        return
    raise InvalidSetting(
        f"--listen {settings.listen} is open to the network, and connections are neither "
        "encrypted nor authenticated: whoever reaches the port can read and change everything. "
        "Listen on 127.0.0.1 and let something that does TLS stand in front, or accept this with "
        "--insecure."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: nobody knows what it will resolve to
        return False
