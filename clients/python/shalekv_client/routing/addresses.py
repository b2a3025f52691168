"""Checks of the addresses of servers, and of the wire by which to talk to them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shalekv_client.policies import Wire

PORT_MAX = 65_535
UNIX = "unix:"  # before the path of a socket
WIRE_VARIABLE = "SHALEKV_CLIENT_WIRE"


def checked_address(address: str) -> str:
    """Return `address` unchanged if it is HOST:PORT or unix:PATH. Raises ValueError otherwise."""
    if address.startswith(UNIX) and address != UNIX:
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= PORT_MAX:
        raise ValueError(
            f"an address is HOST:PORT, with a port of 1 to {PORT_MAX}, not {address!r}"
        )
    if "/" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"an address is HOST:PORT or [IPV6]:PORT, not {address!r}")
    return address


def is_address(address: str) -> bool:
    """Return whether `address` is HOST:PORT, which means the same on every machine."""
    try:
        return not checked_address(address).startswith(UNIX)
    except ValueError:
        return False


def checked_addresses(addresses: str | Iterable[str]) -> tuple[str, ...]:
    """Return the addresses without repetitions, from text separated by commas or many texts.

    Raises ValueError as `checked_address`, and when there is none.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = tuple(dict.fromkeys(checked_address(part.strip()) for part in parts))
    if not found:
        raise ValueError("a client needs the address of a server, HOST:PORT")
    return found


def chosen_wire(wire: Wire | str | None) -> Wire:
    """Return the implementation of gRPC that is used when `wire` was asked for.

    None: that of the environment, or the default. Logs the fallback. Raises ValueError for another
    text.
    """
    asked = wire if wire is not None else os.environ.get(WIRE_VARIABLE, Wire.NATIVE)
    try:
        chosen = Wire(asked)
    except ValueError:
        source = "wire" if wire is not None else WIRE_VARIABLE
        raise ValueError(f"{source} must be one of {', '.join(Wire)}, not {asked!r}") from None
    if chosen is Wire.GRPCIO:
        import logging

        logging.getLogger("shalekv_client").info("the client uses grpcio in place of its own wire")
    return chosen
