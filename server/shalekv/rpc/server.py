"""The gRPC server: bound first, serving when there is something to serve, drained at its end.

    bound ----- start ------> serving ---- refuse, drain, stop ----> closed
      |                        |   ^
      +-------- stand_by ------+-> +-- start -- standing by: each call is turned away

Binding comes before the writer opens: the port is then known (it is advertised in the manifest),
and a port that is taken is noticed before another writer is fenced for nothing. Until `start`, or
`stand_by`, connections wait in the backlog.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from shalekv.core.trouble import READ, WRITE
from shalekv.engine.stalls import Stalls
from shalekv.errors import ShaleError
from shalekv.read.memory_budget import ResultRoom
from shalekv.rpc import admin, health, methods
from shalekv.rpc.adapter import Adapter
from shalekv.rpc.current_methods import CurrentMethods
from shalekv.rpc.interceptors import AccessLog
from shalekv.rpc.reflection import reflection_methods
from shalekv.runtime import Runtime
from shalekv.server.readiness import Readiness
from shalekv.server.service import AdminService, KvService, WatchService
from shalekv.settings import EndpointSettings, LimitSettings, LogLevel

if TYPE_CHECKING:
    from shalekv.server.safekeeper.service import SafekeeperService

# Calls of any kind, health and reflection included, that grpc.aio lets through; the calls of our
# own services are limited, with an error that says more, by the adapter.
CALLS_OF_ANY_KIND = 2
# A reply that was made may not be on the wire yet; a health watch never ends by itself.
LAST_REPLIES_S = 0.25
# A call may be on its way that was sent before its sender could know of the end. Until the port
# closes it is refused with a reason; afterwards grpc cancels it, and its outcome is unknown.
LAST_CALLS_S = 0.1
# Streams of watches move the leases of their consumers on at their end: some requests to the store.
LAST_EDITS_S = 1.0
GRPC_LOGGER = "grpc._cython.cygrpc"
OWN_SERVICES = (methods.KV_SERVICE, admin.ADMIN_SERVICE)
READY = Readiness()


class Server:
    """One listening address and the services behind it."""

    def __init__(
        self, settings: EndpointSettings, runtime: Runtime, *, limits: LimitSettings | None = None
    ) -> None:
        """Bind the address; needs a running loop.

        Raises:
            OSError: the address cannot be bound; EADDRINUSE when another process has it.
        """
        self._server = grpc.aio.server(
            options=channel_options(settings),
            interceptors=[AccessLog()] if settings.log_level is LogLevel.DEBUG else [],
            maximum_concurrent_rpcs=CALLS_OF_ANY_KIND * settings.concurrent_calls_max,
        )
        self._limits = limits or LimitSettings()
        self._runtime = runtime
        stalls = Stalls(runtime.clock, self._limits.result_stalled_ms)
        self.session_room = ResultRoom(self._limits.sessions_bytes_max, stalls)
        self._calls_max = settings.concurrent_calls_max
        self._adapter = self._new_adapter()
        self._methods = CurrentMethods()
        self._health = health.Health()
        self._has_debug_services = settings.debug_services
        self._is_started = self._is_refusing = False
        host, _, port = settings.listen.rpartition(":")
        # Of a name with several addresses grpc is content with one: two servers would share a port.
        refusal = _refusal(host, int(port)) if int(port) else None
        if refusal is not None:
            raise refusal
        try:
            bound = self._server.add_insecure_port(settings.listen)
        except RuntimeError as refused:
            free = f"{host}:{port} was refused, and may be free by now"
            raise _refusal(host, int(port)) or OSError(errno.EADDRNOTAVAIL, free) from refused
        self.listen = f"{host}:{bound}"

    async def start(
        self,
        kv_service: KvService,
        admin_service: AdminService,
        watches: WatchService,
        readiness: Readiness = READY,
    ) -> None:
        """Serve from now on; `readiness` is that of the beginning."""
        self._adapter = self._new_adapter()  # that of a server that stands by turns all away
        self._methods.become(
            methods.kv_methods(kv_service, watches, self._adapter, self._limits),
            admin.admin_methods(admin_service, self._adapter),
        )
        self._is_refusing = False
        await self.report(readiness)
        await self._listen(OWN_SERVICES)

    async def report(self, readiness: Readiness) -> None:
        """Tell the health service; nothing while new calls are refused."""
        if self._is_refusing:
            return
        await self._health.report(
            {
                health.WHOLE_SERVER: readiness.is_whole,
                methods.KV_SERVICE: readiness.is_whole,
                admin.ADMIN_SERVICE: True,
                READ: readiness.reads is None,
                WRITE: readiness.is_ready_for_writes,
            }
        )

    async def start_safekeeper(self, service: SafekeeperService) -> None:
        """Serve as a safekeeper from now on."""
        from shalekv.rpc import safekeeper  # noqa: PLC0415 - 30 modules that no other role needs

        self._methods.become(safekeeper.safekeeper_methods(service, self._adapter))
        await self._health.report({health.WHOLE_SERVER: True, safekeeper.SAFEKEEPER_SERVICE: True})
        await self._listen([safekeeper.SAFEKEEPER_SERVICE])

    async def stand_by(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and answer each call with `error` until the next `start`.

        What is in progress is cut off: `refuse` and `drain` come before.
        """
        self._is_refusing = True
        before, self._adapter = self._adapter, self._new_adapter()
        self._adapter.refuse(error)
        self._methods.become(self._adapter.turning_away(OWN_SERVICES))
        await self._health.stop((*OWN_SERVICES, READ, WRITE))
        await self._listen(OWN_SERVICES)
        before.refuse(error)
        before.cut_off()
        await before.leave(LAST_EDITS_S)

    def tell(self, error: ShaleError) -> None:
        """Answer each call with this one from now on. REQUIRES: `stand_by`, and no `start`."""
        self._adapter.refuse(error)

    async def refuse(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and answer each new call with `error`; others go on."""
        self._is_refusing = True
        self._adapter.refuse(error)
        await self._health.stop()

    async def drain(self, grace_ms: float) -> bool:
        """Wait until no call is in progress, at most `grace_ms`; whether all came to their end."""
        try:
            async with asyncio.timeout(grace_ms / 1000.0):
                await self._adapter.idle()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Close the port and cancel what is still in progress."""
        if self._is_refusing:
            await asyncio.sleep(LAST_CALLS_S)
        await self._server.stop(LAST_REPLIES_S)
        await self._adapter.leave(LAST_EDITS_S)

    def _new_adapter(self) -> Adapter:
        return Adapter(
            self._runtime,
            calls_max=self._calls_max,
            limits=self._limits,
            session_room=self.session_room,
        )

    async def _listen(self, services: Sequence[str]) -> None:
        if self._is_started:
            return
        self._is_started = True
        listed = [*services, health.SERVICE]
        if self._has_debug_services:
            listed.append(_add_channelz(self._server))
        self._server.add_generic_rpc_handlers(
            [self._methods, self._health.methods(), *reflection_methods(listed)]
        )
        logging.getLogger(GRPC_LOGGER).addFilter(_is_news)
        await self._server.start()


def _add_channelz(server: grpc.aio.Server) -> str:
    """Add the service that tells what grpc counts of its connections; the full name."""
    from grpc_channelz.v1 import channelz, channelz_pb2  # noqa: PLC0415 - for debugging alone

    channelz.add_channelz_servicer(server)
    return channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


def channel_options(settings: EndpointSettings) -> Sequence[tuple[str, int]]:
    """What grpc is told about connections, messages and metadata."""
    return [
        ("grpc.so_reuseport", 0),  # two servers would share a port in silence
        ("grpc.server_handshake_timeout_ms", settings.handshake_timeout_ms),
        ("grpc.max_connection_idle_ms", settings.connection_idle_ms),
        ("grpc.max_connection_age_ms", settings.connection_age_ms),
        ("grpc.max_connection_age_grace_ms", settings.connection_age_grace_ms),
        ("grpc.max_concurrent_streams", settings.concurrent_streams_max),
        # Clients keep to that limit by queueing. This would also count calls that have just ended,
        # and cut off new ones of a client at its limit: with a bare UNAVAILABLE.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_receive_message_length", settings.message_bytes_max),
        ("grpc.max_send_message_length", -1),  # the services cut their replies
        # Below the absolute limit grpc refuses at random, so both are the same.
        ("grpc.max_metadata_size", settings.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", settings.metadata_bytes_max),
        # By default clients that keep an idle connection alive are sent away.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", settings.ping_interval_min_ms),
        # grpc counts for channelz by default, also where no service shows it.
        ("grpc.enable_channelz", int(settings.debug_services)),
    ]


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record of grpc tells more than that a caller was gone before the reply."""
    error = record.exc_info[1] if record.exc_info else None
    # A deadline that passes while a reply is sent is nobody's fault; the class is not public.
    return not (isinstance(error, grpc.aio.BaseError) and "execute_batch" in str(error))


def _refusal(host: str, port: int) -> OSError | None:
    """Why the operating system lets nobody listen there, which grpc does not tell."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as refused:
        return OSError(refused.errno, f"{host}:{port}: {refused.strerror}")
    return None
