"""The transport of our own, `shalekv_wire`, which is the default; addresses and limits of both.

An address is bound when a server is made; connections wait in the backlog until it serves.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from shalekv.errors import InvalidSetting
from shalekv.rpc.calls import Find
from shalekv.rpc.revocation import read_lists
from shalekv.settings import KIB, MIB, UNIX, EndpointSettings, Wire
from shalekv.settings.security import TlsSettings
from shalekv_wire.server import ServerOptions, WireServer
from shalekv_wire.stream import Limits
from shalekv_wire.tls import TlsContexts, TlsFiles, UnusableFiles, refuse_lists

# Calls of one connection at once: a client that starts more waits for others of its own.
CONCURRENT_STREAMS_MAX = 256
METADATA_BYTES_MAX = 16 * KIB  # of a call; ours are under 1 KiB, so this leaves space for proxies
# Messages that clients have not completed, and as much again of replies that they do not take: of
# all connections. Clients that are well need little of it at any moment.
HELD_BYTES_MAX = 128 * MIB
# A connection that has not sent HTTP/2 by then is of no client of gRPC.
HANDSHAKE_TIMEOUT_MS = 10_000
CONNECTION_IDLE_MS = 300_000  # clients connect again at their next call, which takes one round trip
# Calls may run so long after their connection was asked to reconnect: longer than any but watches
# and scans, which clients continue elsewhere.
CONNECTION_AGE_GRACE_MS = 30_000
# A socket pair over which connections are handed to another process, and the message of each.
DOOR = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
CONNECTION = b"c"
FOR_METRICS = b"m"  # one to the endpoint of metrics
# Open at once; at most half of the files that this process may have open: its store needs the rest.
CONNECTIONS_MAX = 10_000
BACKLOG = 4_096  # connections that wait to be accepted; the operating system has a limit of its own
ACCEPT_PAUSE_S = 1.0  # when too many files are open
LOCK_TRIES, LOCK_POLL_S = 100, 0.01  # of a folder that another process binds a path in

_log = structlog.get_logger(__name__)


class Door:
    """Connections that the parent of this process accepts, and hands over one by one."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is one end of a socket pair of the kind `DOOR`."""
        sock.settimeout(0)
        self._socket = sock
        self._server: WireServer | None = None
        self._takers: dict[bytes, Callable[[socket.socket], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # that looks at the socket

    @property
    def connection_count(self) -> int:
        """The connections that are open."""
        return 0 if self._server is None else len(self._server.connections)

    def open(self, server: WireServer) -> None:
        """Give the connections to `server`, from now on."""
        self._server = server
        self.open_for(CONNECTION, server.adopt)

    def open_for(self, kind: bytes, adopt: Callable[[socket.socket], None]) -> None:
        """Give the connections of a kind to `adopt`, from now on; needs a running loop."""
        self._takers[kind] = adopt
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._take)

    def close(self) -> None:
        """Take no more connections. Idempotent."""
        if self._loop is not None and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def _take(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, len(CONNECTION), 1)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            self._takers.get(message, socket.socket.close)(connection)
        if not message:  # the parent has ended
            self.close()


class NativeServer:
    """Server of `shalekv_wire` on one address."""

    services: Sequence[str] = ()  # it has none of its own

    def __init__(
        self,
        settings: EndpointSettings,
        find: Find,
        door: Door | None = None,
        tls: TlsContexts | None = None,
    ) -> None:
        """Bind the address, unless connections come through a door. `find` returns the methods.

        Raises:
            InvalidSetting: it has no debug services.
            OSError: as `bind`.
        """
        if settings.debug_services:
            raise InvalidSetting("--debug-services needs --wire grpcio, which channelz is part of")
        self._server = WireServer(find, server_options(settings, tls))
        self._sockets = bind(settings.listen) if door is None else []
        self._door = door
        self.listen = address_of(settings.listen, self._sockets)

    @property
    def connection_count(self) -> int:
        """The connections that are open."""
        return len(self._server.connections)

    async def start(self) -> None:
        """Serve from now on."""
        for each in self._sockets:
            await self._server.serve(each)
        if self._door is not None:
            self._door.open(self._server)

    async def stop(self, grace_s: float) -> None:
        """Close the port; cancel the calls that are in progress after `grace_s`."""
        if self._door is not None:
            self._door.close()
        await self._server.stop(grace_s)
        for each in self._sockets:  # if it never served
            each.close()
        if self._door is None:
            release(self.listen)


def listening(tls: TlsSettings | None, wire: Wire) -> TlsContexts | None:
    """Return the contexts of TLS of a server; None: it has none. Raises `InvalidSetting`."""
    if tls is None or not tls.has_certificate:
        return None
    files = TlsFiles(tls.tls_cert, tls.tls_key, tls.tls_client_ca)
    try:
        # grpcio cannot check lists of revoked certificates: with it, files that have some are
        # refused.
        reading = read_lists if wire is Wire.NATIVE else refuse_lists
        return TlsContexts(files, is_server=True, read_lists=reading)
    except UnusableFiles as error:
        raise InvalidSetting(f"TLS is not possible: {error}") from None


def server_options(settings: EndpointSettings, tls: TlsContexts | None = None) -> ServerOptions:
    """Return the limits and time-outs of connections."""
    return ServerOptions(
        limits=Limits(
            message_bytes_max=settings.message_bytes_max,
            metadata_bytes_max=METADATA_BYTES_MAX,
            streams_max=CONCURRENT_STREAMS_MAX,
            received_bytes_max=max(HELD_BYTES_MAX, 2 * settings.message_bytes_max),
            unsent_bytes_max=HELD_BYTES_MAX,
        ),
        connections_max=_connections_max(),
        backlog=BACKLOG,
        handshake_timeout_s=HANDSHAKE_TIMEOUT_MS / 1_000,
        idle_s=CONNECTION_IDLE_MS / 1_000,
        age_s=settings.connection_age_ms / 1_000,
        age_grace_s=CONNECTION_AGE_GRACE_MS / 1_000,
        tls=tls,
    )


def _connections_max() -> int:
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = files_max != resource.RLIM_INFINITY
    return min(CONNECTIONS_MAX, files_max // 2) if is_bounded else CONNECTIONS_MAX


def bind(listen: str) -> list[socket.socket]:
    """Bind to HOST:PORT, with all addresses of the host and one port, or to unix:PATH, and listen.

    Raises:
        OSError: an address cannot be bound; EADDRINUSE when another process has it.
    """
    sockets: list[socket.socket] = []
    try:
        if listen.startswith(UNIX):
            _bind_path(Path(listen.removeprefix(UNIX)), sockets)
        else:
            _bind_port(listen, sockets)
            for each in sockets:
                each.listen(BACKLOG)
    except OSError as refused:
        for each in sockets:
            each.close()
        raise OSError(refused.errno, f"{listen}: {refused.strerror or refused}") from None
    return sockets


async def accepted(listener: socket.socket) -> socket.socket:
    """Return the next connection. Waits, and logs it, while too many files are open."""
    listener.settimeout(0)
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionError:  # its client has gone
            continue
        except OSError as error:  # too many files are open
            _log.error("connections cannot be accepted", problem=str(error))
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        return connection


def address_of(listen: str, sockets: list[socket.socket]) -> str:
    """Return `listen` with the port that was bound, if one was."""
    if listen.startswith(UNIX) or not sockets:
        return listen
    return f"{listen.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"


def release(listen: str) -> None:
    """Remove the path of a socket that was bound."""
    if listen.startswith(UNIX):
        Path(listen.removeprefix(UNIX)).unlink(missing_ok=True)


def bind_error(listen: str) -> OSError | None:
    """Return the error that `bind` would raise; None: the address is free."""
    try:
        for each in bind(listen):
            each.close()
    except OSError as refused:
        return refused
    release(listen)
    return None


def _bind_port(listen: str, sockets: list[socket.socket]) -> None:
    host, _, text = listen.rpartition(":")
    port = int(text)
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    for family, address in addresses:
        made = socket.socket(family, socket.SOCK_STREAM)
        sockets.append(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # [::] alone takes connections over IPv4, too
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(len(addresses) > 1))
        made.bind((address[0], port, *address[2:]))
        port = made.getsockname()[1]


def _bind_path(path: Path, sockets: list[socket.socket]) -> None:
    """Bind to a path, which may be left over from a process that has ended, and listen.

    Of processes that do so at once with a path that was left, one gets it: its folder is locked
    from the look at the path until the socket listens. If it stays locked, the path counts as in
    use.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sockets.append(made)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _lock(folder)
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        made.bind(str(path))
        made.listen(BACKLOG)
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_POLL_S)
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
