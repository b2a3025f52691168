"""A client's transport without an event loop, for programs that make one call and end.

To import asyncio takes longer than a call. `BlockingChannel` makes each call on a connection of its
own; `WireChannel` is for everything else.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from shalekv_wire.client_connection import (
    NO_REPLY,
    USER_AGENT,
    ClientCall,
    ClientConnection,
    UnaryCall,
)
from shalekv_wire.connecting import (
    UNIX_PREFIX,
    authority_of,
    host_and_port,
    lost,
    not_connected,
    reason_of,
)
from shalekv_wire.sending import Sender
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import Limits, ReceivedBytes

RECEIVE_BYTES = 256 * 1024


class BlockingChannel:
    """Calls to one address, HOST:PORT, [IPV6]:PORT or unix:PATH, without TLS."""

    def __init__(self, address: str, limits: Limits | None = None) -> None:
        """Open a channel; nothing is sent yet."""
        self.address = address
        self._limits = limits or Limits()

    async def unary(
        self, path: str, request: bytes, *, timeout_s: float, metadata: Metadata = ()
    ) -> bytes:
        """Make a call with one request and one reply. Raises `CallFailed`.

        It never suspends: all waiting is done in the socket. A server that is silent is not asked
        for a sign of life.
        """
        call = _BlockingCall(path, request, metadata, time.monotonic() + timeout_s)
        try:
            with _connected(self.address, call) as connected:
                self._execute(call, connected)
        except TimeoutError:
            call.expire()
        except (OSError, ValueError) as error:  # ValueError: of a name that no host can have
            call.fail(error)
        return call.reply()

    def _execute(self, call: _BlockingCall, connected: socket.socket) -> None:
        """Send the call and receive its reply. Raises OSError, such as TimeoutError."""
        sender = Sender(lambda: None)  # it is asked after all that happens
        connection = ClientConnection(
            sender,
            authority=authority_of(self.address),
            user_agent=USER_AGENT,
            limits=self._limits,
            received=ReceivedBytes(),
            now_s=time.monotonic,
            on_change=lambda: None,
        )
        while not call.is_done:
            if not call.id and connection.can_open:
                connection.open(call)
            while data := sender.take():
                connected.settimeout(call.left_s())
                connected.sendall(data)
            if call.is_done:
                return
            if not call.id and (connection.is_over or connection.is_leaving):
                raise ConnectionError(connection.fault or "the server takes no calls")
            connected.settimeout(call.left_s())
            received = connected.recv(RECEIVE_BYTES)
            if not received:
                raise ConnectionError("the server has closed it")
            connection.receive(received)


class _BlockingCall(UnaryCall):
    """A call that is made with one connection, and by nobody else."""

    __slots__ = ()

    def __init__(self, path: str, request: bytes, metadata: Metadata, deadline_s: float) -> None:
        super().__init__(_ALONE, path, request, metadata=metadata, deadline_s=deadline_s)

    def left_s(self) -> float:
        """Return the time to the deadline. Raises TimeoutError when it has passed."""
        assert self.deadline_s is not None
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def fail(self, error: Exception) -> None:
        """End the call: there is no connection, or none any more."""
        if self.id:
            self.finish(CallFailed(StatusCode.UNAVAILABLE, lost(error)))
        else:
            self.finish(not_connected(reason_of(error)))

    def on_done(self) -> None:
        """Do nothing: whoever waits looks at `is_done`."""

    def reply(self) -> bytes:
        """Return the reply of a call that is done. Raises `CallFailed`."""
        if self.failure is not None:
            raise self.failure
        if self._reply is None:
            raise CallFailed(StatusCode.INTERNAL, NO_REPLY)
        return self._reply


class _Alone:
    """The channel of calls that wait for nothing else, and whose deadlines are kept by sockets."""

    @property
    def deadlines(self) -> _Alone:
        return self

    def add(self, call: ClientCall) -> None:
        pass

    def discard(self, call: ClientCall) -> None:
        pass

    def forget(self, call: ClientCall) -> None:
        pass

    def begin_again(self, _call: ClientCall) -> bool:
        return False


_ALONE = _Alone()


def _connected(address: str, call: _BlockingCall) -> socket.socket:
    """Connect to the first address that accepts. Raises OSError, such as TimeoutError."""
    if address.startswith(UNIX_PREFIX):
        return _connected_to(socket.AF_UNIX, address.removeprefix(UNIX_PREFIX), call)
    refused = OSError("the host has no address")
    host, port = host_and_port(address)
    name = host.encode() if host.isascii() else host  # the codec of other names is slow to import
    for family, _, _, _, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        try:
            return _connected_to(family, place, call)
        except TimeoutError:
            raise
        except OSError as error:
            refused = error
    raise refused


def _connected_to(family: int, place: Any, call: _BlockingCall) -> socket.socket:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.settimeout(call.left_s())
        connecting.connect(place)
        if family != socket.AF_UNIX:
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connecting.close()
        raise
    return connecting
