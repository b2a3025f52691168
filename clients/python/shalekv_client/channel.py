"""The connection to a server: addresses and the options of a channel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

MESSAGE_BYTES_MAX = 68 * 1024 * 1024  # as the server's default
PORT_MAX = 65_535

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Calls are repeated by `shalekv_client.fleet`, and by nobody else.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),  # not from DNS
    # Channels to one address would otherwise share a connection, its limits and its failures.
    ("grpc.use_local_subchannel_pool", 1),
    # A database is spoken to directly, whatever the environment says about the web.
    ("grpc.enable_http_proxy", 0),
    # Servers send clients away that ping more often than every 20 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that was started again should be found again soon; the default goes up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def checked_address(address: str) -> str:
    """`address` as it is, if it is HOST:PORT; raises ValueError otherwise.

    gRPC would take a port of 70000 for 4464, and a missing one for 443.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= PORT_MAX:
        raise ValueError(
            f"an address is HOST:PORT, with a port of 1 to {PORT_MAX}, not {address!r}"
        )
    if "/" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"an address is HOST:PORT or [IPV6]:PORT, not {address!r}")
    return address


def is_address(address: str) -> bool:
    """Whether it is HOST:PORT."""
    try:
        checked_address(address)
    except ValueError:
        return False
    return True


def checked_addresses(addresses: str | Iterable[str]) -> tuple[str, ...]:
    """One address or several, without repetitions: text separated by commas, or many texts.

    Raises ValueError as `checked_address`, and when there is none.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = tuple(dict.fromkeys(checked_address(part.strip()) for part in parts))
    if not found:
        raise ValueError("a client needs the address of a server, HOST:PORT")
    return found


def open_channel(address: str, *, message_bytes_max: int) -> grpc.aio.Channel:
    """A channel to `address`, which connects at its first call.

    Raises RuntimeError when no event loop runs, and ValueError as `checked_address`.
    """
    limits = (
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.max_receive_message_length", message_bytes_max),
    )
    asyncio.get_running_loop()  # a channel that is made outside would belong to another one
    return grpc.aio.insecure_channel(checked_address(address), options=_OPTIONS + limits)
