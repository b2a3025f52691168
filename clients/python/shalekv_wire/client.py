"""The client's transport: `WireChannel`, the connection to one address."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from shalekv_wire.client_calls import StreamClientCall, UnaryClientCall
from shalekv_wire.client_connection import USER_AGENT, ClientCall, ClientConnection
from shalekv_wire.connecting import (
    UNIX_PREFIX,
    authority_of,
    host_and_port,
    lost,
    not_connected,
    reason_of,
)
from shalekv_wire.deadlines import Deadlines
from shalekv_wire.fields import Fields
from shalekv_wire.headers import plain_fields
from shalekv_wire.sending import Sender
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import Limits, ReceivedBytes

if TYPE_CHECKING:  # imported by channels that use TLS
    from shalekv_wire.tls import TlsContexts

WRITE_BUFFER_BYTES_MAX = 256 * 1024  # of a connection, beyond which streams wait
BACKOFF_FACTOR = 1.6
BACKOFF_JITTER = 0.2
CHECK_INTERVAL_S = 1.0  # between two looks at a connection with calls
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Limits and time-outs of a channel."""

    limits: Limits = field(default_factory=Limits)
    user_agent: str = USER_AGENT
    connect_timeout_s: float = 20.0  # for a connection whose server speaks HTTP/2
    # After a failed attempt to connect, calls fail at once for this time, which grows up to the
    # second number.
    backoff_s: float = 0.1
    backoff_max_s: float = 2.0
    # While calls are in progress, a server that is silent for so long is asked for a sign of life,
    # and has the second time to give it.
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    tls: TlsContexts | None = None  # of TCP; None: none. Connections to unix:PATH have none.
    # Name or IP address that the certificate of the server must have; empty: that of the address.
    server_name: str = ""


class WireChannel:
    """The connection to one address: HOST:PORT, [IPV6]:PORT, or unix:PATH.

    It connects at its first call, and again when the connection was lost. Calls wait while it
    connects, and fail when that fails. Needs a running event loop, and belongs to it.
    """

    def __init__(self, address: str, options: ChannelOptions | None = None) -> None:
        """Open a channel; nothing is sent yet."""
        self.address = address
        self.options = options or ChannelOptions()
        self.received = ReceivedBytes()
        self.loop = asyncio.get_running_loop()
        self.deadlines: Deadlines[ClientCall] = Deadlines(self.loop)
        self._waiting: deque[ClientCall] = deque()  # for a stream
        self._current: _ClientTransport | None = None
        self._transports: set[_ClientTransport] = set()  # the current one, and those that leave
        self._connecting: asyncio.Task[None] | None = None
        self._backoff = _Backoff(self.options)
        self._is_closed = False
        self._fields: Fields = ()  # of every call

    def set_metadata(self, metadata: Metadata) -> None:
        """Send `metadata` with every call that begins from now on, beside that of the call.

        It is encoded once for each connection. Raises ValueError as `plain_fields`.
        """
        self._fields = plain_fields(metadata)
        for transport in self._transports:
            transport.connection.set_fields(self._fields)

    def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> asyncio.Future[bytes]:
        """Make a call with one request and one reply.

        Raises `CallFailed` when awaited. Cancelling the future cancels the call.
        """
        call = UnaryClientCall(
            self, path, request, metadata=metadata, deadline_s=_deadline_s(timeout_s)
        )
        self._begin(call)
        return call.future

    def stream(
        self, path: str, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> StreamClientCall:
        """Begin a call in which either side may send any number of messages."""
        call = StreamClientCall(self, path, metadata=metadata, deadline_s=_deadline_s(timeout_s))
        self._begin(call)
        return call

    async def wait_ready(self, timeout_s: float) -> None:
        """Connect, unless there is a connection.

        Raises `CallFailed` (UNAVAILABLE) when that fails, or takes longer than `timeout_s`.
        """
        if self._usable() is not None:
            return
        self._check_open()
        ended, _ = await asyncio.wait([self._start_connecting()], timeout=timeout_s)
        self._check_open()
        if not ended:
            text = f"no connection to the server within {timeout_s:g} s"
            raise CallFailed(StatusCode.UNAVAILABLE, text, is_unsent=True)
        if self._usable() is None:
            raise self._backoff.failure()

    async def close(self) -> None:
        """Close the connection: calls under way fail with CANCELLED."""
        self._is_closed = True
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        text = "the channel was closed"
        while self._waiting:
            self._waiting.popleft().finish(CallFailed(StatusCode.CANCELLED, text, is_unsent=True))
        for transport in [*self._transports]:
            transport.close(StatusCode.CANCELLED, text)
        self.deadlines.close()
        if connecting is not None:
            await asyncio.wait([connecting])

    # --- for calls and connections

    def forget(self, call: ClientCall) -> None:
        """Forget a call that has no stream yet."""
        if call in self._waiting:
            self._waiting.remove(call)

    def begin_again(self, call: ClientCall) -> bool:
        """Give a unary call that no server has seen another connection, once."""
        if self._is_closed or call.was_refused or not isinstance(call, UnaryClientCall):
            return False
        call.was_refused = True
        call.id = 0
        self.loop.call_soon(self._begin, call)
        return True

    def on_change(self, transport: _ClientTransport) -> None:
        """Open streams for calls that wait: a connection can take them, or does no more."""
        if transport is self._current and not transport.takes_calls:
            self._current = None
        self._open_waiting()

    def on_lost(self, transport: _ClientTransport) -> None:
        """Note that a connection has ended."""
        self._transports.discard(transport)
        if self._current is transport:
            self._current = None
        self._open_waiting()

    def _usable(self) -> ClientConnection | None:
        current = self._current
        if current is None or not current.takes_calls:
            return None
        return current.connection if current.connection.is_established else None

    def _begin(self, call: ClientCall) -> None:
        if call.is_done:
            return
        if self._is_closed:
            text = "the channel was closed"
            call.finish(CallFailed(StatusCode.CANCELLED, text, is_unsent=True))
            return
        connection = self._usable()
        if connection is not None and not self._waiting and connection.can_open:
            connection.open(call)
            return
        if connection is None and self._connecting is None and self._backoff.is_on:
            call.finish(self._backoff.failure())
            return
        self._waiting.append(call)
        if connection is None:
            _ = self._start_connecting()

    def _open_waiting(self) -> None:
        waiting = self._waiting
        while waiting:
            connection = self._usable()
            if connection is None:
                if not self._is_closed:
                    _ = self._start_connecting()
                return
            if not connection.can_open:
                return
            connection.open(waiting.popleft())

    def _start_connecting(self) -> asyncio.Task[None]:
        """Begin to connect, unless that has begun."""
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())
        return self._connecting

    async def _connect(self) -> None:
        """Connect once; calls that wait fail when that fails, for whatever reason."""
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                transport = await self._open_transport()
        except Exception as error:  # noqa: BLE001 - calls would wait for ever
            reason = reason_of(error) or f"no answer within {self.options.connect_timeout_s:g} s"
            self._backoff.note_failure(reason)
        else:
            self._current = transport
            if transport.takes_calls:
                self._backoff.note_success()
            else:
                self._backoff.note_failure("the server takes no calls")
        finally:
            self._connecting = None
        if self._usable() is None:
            while self._waiting:
                self._waiting.popleft().finish(self._backoff.failure())
        self._open_waiting()

    async def _open_transport(self) -> _ClientTransport:
        transport = _ClientTransport(self)
        try:
            if self.address.startswith(UNIX_PREFIX):
                path = self.address.removeprefix(UNIX_PREFIX)
                await self.loop.create_unix_connection(lambda: transport, path)
            else:
                host, port = host_and_port(self.address)
                protocol = self._secured(transport, host)
                await self.loop.create_connection(lambda: protocol, host, port)
            self._transports.add(transport)
            transport.connection.set_fields(self._fields)  # which may have changed meanwhile
            await transport.ready
        except BaseException:
            transport.close(StatusCode.UNAVAILABLE, "no connection")  # it has no calls
            raise
        return transport

    def _secured(self, transport: _ClientTransport, host: str) -> asyncio.Protocol:
        """Put TLS before the protocol of a connection, if there is any."""
        options = self.options
        if options.tls is None:
            return transport
        from shalekv_wire.tls_transport import TlsTransport

        return TlsTransport(transport, options.tls.current(), options.server_name or host)

    def _check_open(self) -> None:
        if self._is_closed:
            raise CallFailed(StatusCode.CANCELLED, "the channel was closed", is_unsent=True)


class _Backoff:
    """The time for which calls fail at once after a failed attempt to connect."""

    def __init__(self, options: ChannelOptions) -> None:
        self._options = options
        self._next_s = options.backoff_s
        self._until_s = float("-inf")
        self._reason = ""

    @property
    def is_on(self) -> bool:
        """Return whether the last attempt has failed a short time ago."""
        return time.monotonic() < self._until_s

    def note_failure(self, reason: str) -> None:
        """Begin to wait."""
        self._reason = reason
        spread = _JITTER.uniform(1.0 - BACKOFF_JITTER, 1.0 + BACKOFF_JITTER)
        self._until_s = time.monotonic() + self._next_s * spread
        self._next_s = min(self._next_s * BACKOFF_FACTOR, self._options.backoff_max_s)

    def note_success(self) -> None:
        """Begin again with the shortest time."""
        self._next_s = self._options.backoff_s
        self._until_s = float("-inf")

    def failure(self) -> CallFailed:
        """Return the error of calls."""
        return not_connected(self._reason)


class _ClientTransport(asyncio.Protocol):
    """One connection: its transport, its state machine, and its signs of life."""

    __slots__ = (
        "_channel",
        "_check",
        "_heard_s",
        "_is_active",
        "_pinged_s",
        "_sender",
        "_transport",
        "connection",
        "ready",
    )

    def __init__(self, channel: WireChannel) -> None:
        self._channel = channel
        self._sender = Sender(self._wake)
        self._sender.is_held = True  # until there is a transport
        self._transport: asyncio.Transport | None = None  # None: not yet, or no more
        self._check: asyncio.TimerHandle | None = None
        self._is_active = False  # something was received since the last check
        self._heard_s = time.monotonic()
        self._pinged_s: float | None = None
        self.ready: asyncio.Future[None] = channel.loop.create_future()
        options = channel.options
        is_path = channel.address.startswith(UNIX_PREFIX)
        self.connection = ClientConnection(
            self._sender,
            authority=authority_of(channel.address),
            user_agent=options.user_agent,
            limits=options.limits,
            received=channel.received,
            now_s=time.monotonic,
            on_change=self._on_change,
            is_secured=options.tls is not None and not is_path,
        )

    @property
    def takes_calls(self) -> bool:
        """Return whether calls can be begun, now or when others have ended."""
        connection = self.connection
        return not connection.is_leaving and not connection.is_over

    def close(self, code: StatusCode, text: str) -> None:
        """Close the connection; calls under way fail with `code`."""
        connection = self.connection
        connection.is_over = True
        streams, connection.streams = connection.streams, {}
        for call in streams.values():
            call.drop_partial()
            call.is_local_done = call.is_remote_done = True
            call.finish(CallFailed(code, text))
        self._end()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._channel.on_lost(self)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop has classes of its own
        assert self._transport is not None
        if self.connection.is_over:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._check = self._channel.loop.call_later(CHECK_INTERVAL_S, self._look)
        self._flush()

    def on_secured(self, certificate: bytes) -> None:
        """Implement `SecuredProtocol`: the certificate of the server was verified."""

    def data_received(self, data: bytes) -> None:
        self._is_active = True
        self._sender.is_held = True
        self.connection.receive(data)
        self._flush()

    def pause_writing(self) -> None:
        self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._sender.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        why = self.connection.fault or exc or "the server has closed it"
        if not self.ready.done():
            self.ready.set_exception(CallFailed(StatusCode.UNAVAILABLE, str(why)))
        self.close(StatusCode.UNAVAILABLE, lost(why))

    # --- the rest

    def _on_change(self) -> None:
        if self.connection.is_established and not self.ready.done():
            self.ready.set_result(None)
            return  # the channel is told by the task that waits
        self._channel.on_change(self)

    def _look(self) -> None:
        """Look for signs of life, once a second."""
        now_s = time.monotonic()
        options = self._channel.options
        if self._is_active or not self.connection.streams:
            self._is_active = False
            self._heard_s, self._pinged_s = now_s, None
        elif self._pinged_s is not None:
            if now_s - self._pinged_s > options.keepalive_timeout_s:
                self.close(StatusCode.UNAVAILABLE, lost("the server is silent"))
                return
        elif now_s - self._heard_s > options.keepalive_s:
            self._pinged_s = now_s
            self.connection.ping()
        self._check = self._channel.loop.call_later(CHECK_INTERVAL_S, self._look)

    def _wake(self) -> None:
        self._channel.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._transport is None:
            return
        data = self._sender.take()
        if data:
            self._transport.write(data)
        connection = self.connection
        if connection.is_over or (connection.is_leaving and not connection.streams):
            self._transport.close()

    def _end(self) -> None:
        self._sender.drop()
        if self._check is not None:
            self._check.cancel()
        if not self.ready.cancel() and not self.ready.cancelled():
            self.ready.exception()  # is known, also if nobody waits for it any more


def _deadline_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
