"""Addresses of servers, and the failures of connections to them, for both kinds of client."""

from __future__ import annotations

import os
import socket

from shalekv_wire.status import CallFailed, StatusCode

UNIX_PREFIX = "unix:"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT or [IPV6]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def authority_of(address: str) -> str:
    """Return the name of the server in requests."""
    return "localhost" if address.startswith(UNIX_PREFIX) else address


def not_connected(reason: str) -> CallFailed:
    """Return the error of a call for which there is no connection."""
    text = f"no connection to the server: {reason}"
    return CallFailed(StatusCode.UNAVAILABLE, text, is_unsent=True)


def reason_of(error: Exception) -> str:
    """Return why there is no connection; the system's words, which do not repeat the address."""
    if isinstance(error, CallFailed):
        return error.message
    if not isinstance(error, OSError):
        return f"the address cannot be used: {error}"
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def lost(why: object) -> str:
    """Return what a call is told that was under way when its connection ended."""
    return f"the connection was lost: {why}"
