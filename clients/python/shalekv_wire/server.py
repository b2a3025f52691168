"""The gRPC server: connections of a listening socket, with time-outs and a graceful end.

All connections are looked at once a second, and deadlines are kept in slots of 20 ms: there is no
timer for a connection or a call.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from shalekv_wire.deadlines import Deadlines
from shalekv_wire.frames import ErrorCode
from shalekv_wire.sending import Sender, TotalUnsent
from shalekv_wire.server_calls import (
    Find,
    ServerCall,
    StreamCall,
    StreamHandler,
    Streaming,
    Unary,
)
from shalekv_wire.server_connection import ServerConnection
from shalekv_wire.status import CallFailed, StatusCode
from shalekv_wire.stream import Limits, ReceivedBytes
from shalekv_wire.tls import TlsContexts
from shalekv_wire.tls_transport import TlsFailed, TlsTransport

__all__ = [
    "ServerCall",
    "ServerOptions",
    "StreamCall",
    "Streaming",
    "Unary",
    "WireServer",
]

CHECK_INTERVAL_S = 1.0  # between two looks at all connections
# A connection that was asked to go, and whose client has not answered by then, takes no streams.
DRAIN_ANSWER_S = 1.0
# A client for which more than this waits must take as much between two looks, when memory is short.
SLOW_BYTES = 64 * 1024
# Written beyond the messages that wait: replies to a client that sends, and reads nothing.
UNREAD_BYTES_MAX = 1024 * 1024
# A connection that is closed has this time to write what it has; then it is aborted.
CLOSE_TIMEOUT_S = 5.0
WRITE_BUFFER_BYTES_MAX = 256 * 1024  # of a connection, beyond which streams wait
# After so many bytes in one piece, other connections have their turn: uvloop would go on to read
# from this one, for megabytes of requests.
TURN_READ_BYTES = 128 * 1024
SUMMARY_INTERVAL_S = 10.0  # between two log lines of a kind of which strangers can make many
# So long a connection without a reply is that of a client that has just come, which leaves last.
# Later it is that of a stranger, which leaves first.
FIRST_REPLY_S = 3.0
# Parts of all connections: those that are chosen at once to give way to the next ones, as many of
# which may be closing beyond the most that may be open; and the idle ones of a network beyond which
# they leave before those of others. If these were few, each would leave before it could make a
# call.
LEAVING_PART, CROWD_PART = 0.01, 0.1
CHOICE_S = 0.1  # when all idle ones were chosen, all are looked at again after this time
AGE_SPREAD = 0.1  # the age of a connection differs by this part, so that not all end at once

# Small frames are sent at once; asyncio sets that for connections of clients alone. A client
# without traffic is probed after a minute, and is gone when it does not answer: in 90 seconds. One
# that does not acknowledge what was sent is gone after the last time.
_TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 60,  # seconds
    "TCP_KEEPINTVL": 10,  # seconds
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 120_000,  # milliseconds
}

_MAPPED = bytes(10) + b"\xff\xff"  # before an IPv4 address, in IPv6

_log = logging.getLogger(__name__)
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


@dataclass(slots=True)
class ServerOptions:
    """Limits and time-outs of a server."""

    limits: Limits = field(default_factory=Limits)
    connections_max: int = 10_000  # idle ones give way to more; if none is, these are closed
    backlog: int = 512  # connections that wait to be accepted
    handshake_timeout_s: float = 10.0  # a connection without HTTP/2 by then is closed
    idle_s: float | None = 300.0  # a connection without calls is asked to go after it
    age_s: float | None = None  # a connection is asked to go at this age
    age_grace_s: float = 30.0  # calls of a connection that was asked to go may run so long
    tls: TlsContexts | None = None  # of TCP; None: none. Paths are open to this machine alone.


class WireServer:
    """Serves methods on any number of listening sockets. Used on one event loop."""

    def __init__(self, find: Find, options: ServerOptions | None = None) -> None:
        """`find` returns the method of a path, such as `/SERVICE/METHOD`; None: there is none.

        Needs a running event loop.
        """
        self.options = options or ServerOptions()
        self.connections = _Connections()
        self.received = ReceivedBytes()
        self.unsent = TotalUnsent(self.options.limits.unsent_bytes_max)
        self.find = find
        self.loop = asyncio.get_running_loop()
        self._deadlines: Deadlines[ServerCall] = Deadlines(self.loop)
        self._listeners: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._check: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # a connection has ended
        self.is_stopping = False  # connections that come now are closed

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections of a bound socket (TCP or unix) from now on, until `stop`."""
        create = self.loop.create_server
        if sock.family == socket.AF_UNIX:
            create = self.loop.create_unix_server  # type: ignore[assignment]
        backlog = self.options.backlog
        listener = await create(self._protocol_for(sock), sock=sock, backlog=backlog)
        self._listeners.append(listener)
        self._begin_checks()

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere (TCP or unix)."""
        sock.settimeout(0)
        self._begin_checks()
        connect = self.loop.connect_accepted_socket(self._protocol_for(sock), sock)
        task = self.loop.create_task(_finish(connect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _protocol_for(self, sock: socket.socket) -> Callable[[], asyncio.Protocol]:
        """Return what makes the protocol of a connection of `sock`."""
        tls = self.options.tls
        if tls is None or sock.family == socket.AF_UNIX:
            return lambda: _ServerTransport(self)
        return lambda: TlsTransport(_ServerTransport(self), tls.current())

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, wait for the calls in progress for at most `grace_s`, and close.

        Clients are told to send later calls elsewhere; those on their way are answered. Calls that
        are in progress at the end are cancelled, and their clients see a lost connection.
        """
        self.is_stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in [*self.connections]:
            connection.drain()
        ends_s = time.monotonic() + grace_s
        while self.connections and (left_s := ends_s - time.monotonic()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        for connection in [*self.connections]:
            connection.close()
        await asyncio.sleep(0)  # transports are closed in the next turn
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._deadlines.close()
        if self._check is not None:
            self._check.cancel()

    # --- for connections and calls

    def run(self, call: StreamCall, handler: StreamHandler) -> None:
        """Run the handler of a call in a task; cancel it when the call is cancelled."""
        task = self.loop.create_task(self._run(call, handler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.on_cancel = task.cancel  # type: ignore[assignment] # its result is of no use

    async def _run(self, call: StreamCall, handler: StreamHandler) -> None:
        try:
            await handler(call)
        except (
            CallFailed
        ) as failed:  # the call is over, or one that the handler has made has failed
            call.end(failed.code, failed.message, failed.details)
        except asyncio.CancelledError:
            call.end(StatusCode.CANCELLED, "the call was cancelled in the server")
            raise
        except Exception:  # noqa: BLE001 - a bug in one call must not end others
            _log.exception("unexpected error in the handler of %s", call.path)
            call.end(StatusCode.INTERNAL, "unexpected error in the server")
        else:
            call.end()

    def watch_deadline(self, call: ServerCall) -> None:
        """Call `call.expire` at its deadline."""
        self._deadlines.add(call)

    def forget_deadline(self, call: ServerCall) -> None:
        """Undo `watch_deadline`."""
        self._deadlines.discard(call)

    def note_end(self, connection: _ServerTransport) -> None:
        """Note that a connection has ended."""
        self.connections.discard(connection)
        self.connections.closing.pop(connection, None)
        self._changed.set()

    def _begin_checks(self) -> None:
        if self._check is None:
            self._check = self.loop.call_later(CHECK_INTERVAL_S, self._check_all)

    def _check_all(self) -> None:
        now_s = time.monotonic()
        self.connections.forget_choice()
        for connection in [*self.connections]:
            connection.check(now_s)
        if self.options.tls is not None:
            self.options.tls.current()  # so that changes are logged soon, also without connections
        self._check = self.loop.call_later(CHECK_INTERVAL_S, self._check_all)


class _Connections(set["_ServerTransport"]):
    """The connections that are open, and those that leave next when there is no place."""

    def __init__(self) -> None:
        super().__init__()
        # Closed, and not gone: they write what they have. The oldest are first.
        self.closing: dict[_ServerTransport, None] = {}
        # Idle, and the first to leave. Chosen for many new connections at once, and again after a
        # second. Until this time it has all that are idle.
        self.leaving: deque[_ServerTransport] = deque()
        self._has_all_until_s = 0.0

    def make_room(self, most: int) -> bool:
        """Return whether there is a place for one more, of `most`; an idle one may leave for it.

        Those that are closing have a few places beside these.
        """
        if len(self) < most:
            return True
        if len(self) - len(self.closing) >= most and not self._close_one():
            _refusals.note(len(self))
            return False
        while self.closing and len(self) > most + int(LEAVING_PART * most):
            next(iter(self.closing)).end_now()
        return True

    def enter(self, connection: _ServerTransport) -> None:
        """Add a new one."""
        self.add(connection)
        if time.monotonic() < self._has_all_until_s:
            self.leaving.append(connection)

    def forget_choice(self) -> None:
        """Look at all connections when one has to leave the next time."""
        self.leaving.clear()
        self._has_all_until_s = 0.0

    def _close_one(self) -> bool:
        """Close an idle connection in good order; False: none is idle.

        The first to leave are those that got no reply in time, then those that did, then those that
        have just come; among each of them, those of networks with many idle ones; and among these
        the one that is idle longest. All clients of a proxy are of one network, so this is an
        order, and refuses nobody.
        """
        while self.leaving or self._choose():
            each = self.leaving.popleft()
            if each.is_idle:
                _crowding.note(len(self))
                each.give_way()
                return True
        return False

    def _choose(self) -> bool:
        """Choose those that leave next; False: none is idle, or all that are were just chosen."""
        now_s = time.monotonic()
        if now_s < self._has_all_until_s:
            return False
        idle = [each for each in self if each.is_idle]
        counts = Counter(each.network for each in idle)

        def rank(each: _ServerTransport) -> tuple[int, bool, float]:
            standing, since_s = each.standing(now_s)
            return standing, counts[each.network] <= CROWD_PART * len(self), since_s

        chosen_max = 1 + int(LEAVING_PART * len(self))
        self.leaving.extend(heapq.nsmallest(chosen_max, idle, rank))
        if len(idle) <= chosen_max:
            self._has_all_until_s = now_s + CHOICE_S
        return bool(idle)


class _ServerTransport(asyncio.Protocol):
    """One connection: its transport, its state machine, and its age."""

    __slots__ = (
        "_began_s",
        "_closing_s",
        "_connection",
        "_drained_s",
        "_last_call_s",
        "_last_stream_id",
        "_lives_s",
        "_sender",
        "_sent_bytes",
        "_server",
        "_transport",
        "network",
    )

    _connection: ServerConnection
    _transport: asyncio.Transport

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._sender = Sender(self._wake, server.unsent)
        self._sent_bytes = 0  # at the last check
        self._began_s = self._last_call_s = time.monotonic()
        self._last_stream_id = 0  # at the last look at its calls
        self._drained_s: float | None = None  # since when the client is asked to go
        self._closing_s: float | None = None  # since when the transport is closed
        age_s = server.options.age_s
        self._lives_s = float("inf")
        if age_s is not None:
            spread = _JITTER.uniform(1.0 - AGE_SPREAD, 1.0 + AGE_SPREAD)
            self._lives_s = age_s * spread

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment] # uvloop has classes of its own
        server, connections = self._server, self._server.connections
        if server.is_stopping or not connections.make_room(server.options.connections_max):
            self._transport.abort()
            return
        self.network = _network_of(transport)
        _set_tcp_options(transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._connection = ServerConnection(
            self._sender,
            server.find,
            server,
            peer=peer_name(transport),
            limits=server.options.limits,
            received=server.received,
            now_s=time.monotonic,
        )
        connections.enter(self)

    def data_received(self, data: bytes) -> None:
        self._sender.is_held = True
        self._connection.receive(data)
        self._flush()
        if len(data) >= TURN_READ_BYTES:
            self._transport.pause_reading()
            self._server.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._closing_s is None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._sender.resume()

    def on_secured(self, certificate: bytes) -> None:
        """Implement `SecuredProtocol`."""
        self._connection.certificate = certificate

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self._server.connections:
            return
        if isinstance(exc, TlsFailed):
            _log.debug("TLS has ended the connection of %s: %s", self._connection.peer, exc)
            _tls_failures.note(self._connection.peer, exc)
        self._connection.is_over = True
        self._connection.close_streams(ErrorCode.CANCEL, "the connection has ended")
        self._sender.drop()
        self._closing_s = self._began_s
        self._server.note_end(self)

    # --- for the server

    def check(self, now_s: float) -> None:
        """Look after the connection, once a second."""
        options, connection = self._server.options, self._connection
        if self._closing_s is not None:
            if now_s - self._closing_s > CLOSE_TIMEOUT_S:
                self._transport.abort()
            return
        last_call_s = self._last_call(now_s)
        if self._is_stalled():
            _log.warning("disconnected %s, which does not read its replies", connection.peer)
            self.close()
            self._transport.abort()
            return
        if not connection.is_established:
            if now_s - self._began_s > options.handshake_timeout_s:
                self._transport.abort()
        elif self._drained_s is not None:
            self._check_drain(now_s - self._drained_s)
        elif now_s - self._began_s > self._lives_s or (
            options.idle_s is not None and now_s - last_call_s > options.idle_s
        ):
            self.drain()

    def _is_stalled(self) -> bool:
        """Return whether replies wait for a client that has taken next to none for a second,
        although there is no memory for more.
        """
        unsent, before = self._sender.unsent, self._sent_bytes
        self._sent_bytes = unsent.sent
        is_slow = unsent.sent - before < min(unsent.held, SLOW_BYTES)
        return is_slow and unsent.total.is_full

    def drain(self) -> None:
        """Ask the client to go; the connection closes when its calls have ended."""
        if not self._connection.is_established:
            self.close()
        elif self._drained_s is None:
            self._drained_s = time.monotonic()
            self._connection.begin_drain()

    def close(self) -> None:
        """Cancel all calls, and close the connection."""
        if self._closing_s is None:
            self._connection.is_over = True
            self._connection.close_streams(ErrorCode.CANCEL, "the server ends")
            self._flush()

    @property
    def is_idle(self) -> bool:
        """Return whether the connection can be closed without harm to a call that is answered."""
        connection = self._connection
        is_busy = connection.streams and connection.is_busy
        return self._closing_s is None and not is_busy

    def _last_call(self, now_s: float) -> float:
        """Return when there was a call at last, by looking now and once a second."""
        connection = self._connection
        last_stream_id = connection.last_peer_stream_id()
        if connection.streams or last_stream_id != self._last_stream_id:
            self._last_stream_id, self._last_call_s = last_stream_id, now_s
        return self._last_call_s

    def standing(self, now_s: float) -> tuple[int, float]:
        """Return 1 if the client has got a reply, and since when it is idle; else 2 if it has just
        come, and 0 if not, and when it came.
        """
        if self._sender.sent_bytes:
            return 1, self._last_call(now_s)
        return 2 if now_s - self._began_s < FIRST_REPLY_S else 0, self._began_s

    def give_way(self) -> None:
        """Tell the client that it needs another connection, and close this one."""
        self._connection.finish_drain()
        self.close()
        if self._closing_s is None:  # the client reads nothing
            self.end_now()

    def end_now(self) -> None:
        """Close the connection at once, with what it has not written."""
        self._transport.abort()
        self.connection_lost(None)  # its place is free before the transport says so

    def _check_drain(self, asked_s: float) -> None:
        if asked_s > DRAIN_ANSWER_S:
            self._connection.finish_drain()
        if asked_s > self._server.options.age_grace_s:
            self.close()

    def _wake(self) -> None:
        self._server.loop.call_soon(self._flush)

    def _flush(self) -> None:
        data = self._sender.take()
        if self._closing_s is not None:
            return
        if data:
            self._transport.write(data)
            if self._sender.is_paused and self._is_unread():
                return
        if self._connection.is_finished:
            self._closing_s = time.monotonic()
            self._server.connections.closing[self] = None
            self._transport.close()

    def _is_unread(self) -> bool:
        """Return whether the client reads nothing of too much, and is disconnected."""
        unread_bytes = self._transport.get_write_buffer_size()
        if unread_bytes <= WRITE_BUFFER_BYTES_MAX + UNREAD_BYTES_MAX:
            return False
        self._transport.abort()
        return True


class _Summary:
    """A log line of what strangers can do often: at once, then summed up."""

    def __init__(self, level: int, text: str) -> None:
        """`text` ends with the number of times since the line before."""
        self._level = level
        self._text = text + " (%d since the last such line)"
        self._count = 0
        self._logged_s = float("-inf")

    def note(self, *about: object) -> None:
        """Count one, and log it if the last line is old enough."""
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= SUMMARY_INTERVAL_S:
            _log.log(self._level, self._text, *about, self._count)
            self._logged_s, self._count = now_s, 0


# Of all servers of this process.
_tls_failures = _Summary(logging.INFO, "TLS has ended the connection of %s: %s")
_crowding = _Summary(
    logging.WARNING,
    "%d connections are open, the most there may be: an idle one was closed for another",
)
_refusals = _Summary(
    logging.WARNING, "%d connections are open, and none is idle: another one was closed at once"
)


def _set_tcp_options(transport: asyncio.BaseTransport) -> None:
    """Send at once, and notice a client that is gone without a word in some minutes."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # not on every platform
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _finish(connecting: Coroutine[Any, Any, object]) -> None:
    """Wait for a connection; one that its client has closed meanwhile is of no interest."""
    with suppress(OSError):
        await connecting


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Return the address of the peer for logs, as gRPC writes it."""
    peer: Any = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return "unix:"
    host, port = peer[0], peer[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _network_of(transport: asyncio.BaseTransport) -> bytes:
    """Return the IPv4 address of the peer, or of its IPv6 address the 8 bytes that are given to a
    site; empty for a unix socket.
    """
    peer: Any = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return b""
    host = peer[0].partition("%")[0]
    if ":" not in host:
        return socket.inet_aton(host)
    packed = socket.inet_pton(socket.AF_INET6, host)
    return packed[12:] if packed.startswith(_MAPPED) else packed[:8]
