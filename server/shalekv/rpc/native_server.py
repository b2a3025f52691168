"""The transport of our own, `shalekv_wire`, which is the default: its server with our limits."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.rpc.calls import Find
from shalekv.rpc.listening import (
    BACKLOG,
    CONCURRENT_STREAMS_MAX,
    CONNECTION_AGE_GRACE_MS,
    CONNECTION_IDLE_MS,
    HANDSHAKE_TIMEOUT_MS,
    METADATA_BYTES_MAX,
    address_of,
    bind,
    release,
)
from shalekv.settings import EndpointSettings
from shalekv_wire.server import ServerOptions, WireServer
from shalekv_wire.stream import Limits


class NativeServer:
    """Server of `shalekv_wire` on one address."""

    services: Sequence[str] = ()  # it has none of its own

    def __init__(self, settings: EndpointSettings, find: Find) -> None:
        """Bind the address. `find` returns the methods. Raises `OSError`."""
        self._sockets = bind(settings.listen)
        self.listen = address_of(settings.listen, self._sockets)
        self._server = WireServer(find, server_options(settings))

    async def start(self) -> None:
        """Serve from now on."""
        for each in self._sockets:
            await self._server.serve(each)

    async def stop(self, grace_s: float) -> None:
        """Close the port; cancel the calls that are in progress after `grace_s`."""
        await self._server.stop(grace_s)
        for each in self._sockets:  # if it never served
            each.close()
        release(self.listen)


def server_options(settings: EndpointSettings) -> ServerOptions:
    """Return the limits and time-outs of connections."""
    return ServerOptions(
        limits=Limits(
            message_bytes_max=settings.message_bytes_max,
            metadata_bytes_max=METADATA_BYTES_MAX,
            streams_max=CONCURRENT_STREAMS_MAX,
        ),
        backlog=BACKLOG,
        handshake_timeout_s=HANDSHAKE_TIMEOUT_MS / 1_000,
        idle_s=CONNECTION_IDLE_MS / 1_000,
        age_s=settings.connection_age_ms / 1_000,
        age_grace_s=CONNECTION_AGE_GRACE_MS / 1_000,
    )
