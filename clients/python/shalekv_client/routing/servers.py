"""The connections to the servers of one database, one for each address.

Here are the options of gRPC channels, `Server` (the connection to one address) and `Servers` (all
that are open).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv.v1 import kv_pb2
from shalekv_client.error_table import not_reached
from shalekv_client.errors import ServerFailed, WrongDatabase
from shalekv_client.operations import SESSION, Operation, SessionAbsent, UnaryCalls
from shalekv_client.policies import ReadLevel, Role, Wire
from shalekv_client.results import known
from shalekv_client.routing.addresses import checked_address
from shalekv_client.routing.endpoints import Endpoint, Endpoints
from shalekv_client.routing.security import NO_SECURITY, Security
from shalekv_client.routing.tokens import Freshness
from shalekv_wire.calls import Channel, ClientStream
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.status import Metadata
from shalekv_wire.stream import Limits

if TYPE_CHECKING:
    from shalekv_client.coalescer import Coalescer
    from shalekv_client.routing.access_token import AccessToken

_GRPCIO_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Only `shalekv_client.routing.fleet` repeats calls.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),  # not from DNS
    # Channels to one address would otherwise share a connection, its limits and its failures.
    ("grpc.use_local_subchannel_pool", 1),
    # A database is called directly, even when the environment names an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    # Servers disconnect clients that ping more often than every 20 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Reconnect soon to a server that was started again; by default gRPC waits up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

ResultT = TypeVar("ResultT")
_MEMORY = kv_pb2.DURABILITY_MEMORY


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Options of the connections to servers."""

    message_bytes_max: int
    coalesce: bool = True
    wire: Wire = Wire.NATIVE
    security: Security = NO_SECURITY


def open_channel(address: str, how: ConnectionOptions, metadata: Metadata = ()) -> Channel:
    """Open a channel to `address`, which connects at its first call; calls have `metadata`.

    Raises RuntimeError when no event loop runs, and ValueError as `checked_address`.
    """
    channel = _new_channel(checked_address(address), how)
    if metadata:
        channel.set_metadata(metadata)
    return channel


def _new_channel(address: str, how: ConnectionOptions) -> Channel:
    tls, server_name = how.security.tls, how.security.server_name
    if how.wire is Wire.NATIVE:
        limits = Limits(message_bytes_max=how.message_bytes_max)
        return WireChannel(address, ChannelOptions(limits=limits, tls=tls, server_name=server_name))
    from shalekv_client.routing.grpcio_channel import GrpcioChannel

    bounds = (
        ("grpc.max_send_message_length", how.message_bytes_max),
        ("grpc.max_receive_message_length", how.message_bytes_max),
    )
    return GrpcioChannel(address, _GRPCIO_OPTIONS + bounds, tls, server_name)


class Server:
    """The connection to one address, which connects at its first call.

    Who makes a call by its `channel` must pass the header of each reply to `note_header`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        endpoints: Endpoints,
        freshness: Freshness,
        how: ConnectionOptions,
        metadata: Metadata,
    ) -> None:
        """Create a connection to `endpoint`, one of `endpoints`. Needs a running event loop.

        `metadata` goes with every call.
        """
        self.endpoint = endpoint
        self.address = address = endpoint.address
        self.is_dropped = False  # by the client: calls under way must go to another server
        self._endpoints = endpoints
        self._freshness = freshness
        self._role_number = -1  # that was noted last; -1: none
        self.channel = open_channel(address, how, metadata)
        self._unary = UnaryCalls(self.channel, note=self.note)
        self._coalescer: Coalescer | None = None
        if how.coalesce:
            from shalekv_client.coalescer import Coalescer
            from shalekv_client.stream import MESSAGE_BYTES_MAX as COALESCED_BYTES_MAX
            from shalekv_client.stream import Outbox

            self._coalescer = Coalescer(
                self.open_session,
                address=address,
                outbox=Outbox(message_bytes_max=min(COALESCED_BYTES_MAX, how.message_bytes_max)),
                note=self.note,
                is_alone=lambda: endpoints.sole is not None,
            )

    @property
    def is_writer(self) -> bool:
        """Return whether this server is the writer, by the newest answer of any server."""
        return self._endpoints.writer is self.endpoint

    async def send(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """Send `operation` and return its result; raises the errors of `shalekv_client.errors`."""
        if operation.min_seq and not self.is_writer:  # the writer has every commit ever seen
            operation = operation.demanding_min_seq()
        coalescer = self._coalescer
        if coalescer is not None and coalescer.takes(operation):
            try:
                return await coalescer.call(operation, timeout_ms)
            except SessionAbsent:
                pass  # it fails at once, so `timeout_ms` still holds
        return await self._unary.call(operation, timeout_ms)

    def renew(self, metadata: Metadata) -> None:
        """Send `metadata` with every call from now on, and coalesce in another session."""
        self.channel.set_metadata(metadata)
        if self._coalescer is not None:
            self._coalescer.renew()

    def open_session(self) -> ClientStream:
        """Begin a KV.Session call."""
        return self.channel.stream(SESSION)

    def note(self, operation: Operation[Any], reply: Any) -> None:
        """Note the state, role and database that the reply to `operation` reports.

        Raises `SeqNotReached` when the reply shows an older state than was seen before: the server
        is a writer that does not know yet that it was replaced. Raises `WrongDatabase` as
        `note_header`.
        """
        header = reply.header
        read_level = operation.read_level
        if read_level is not None:
            self.note_read(header, read_level, operation.min_seq)
            return
        try:
            self.note_header(header, is_certain=reply.durability != _MEMORY)
        except WrongDatabase as error:
            raise ServerFailed(error.details) from error  # applied, but to another database

    def note_read(self, header: kv_pb2.ReplyHeader, read_level: ReadLevel, min_seq: int) -> None:
        """Note the header of a reply to a read. Raises as `note`."""
        self.note_header(header, is_certain=read_level is not ReadLevel.UNCOMMITTED)
        if header.seq < min_seq <= self._freshness.seq:
            self._endpoints.doubt(self.endpoint)
            raise not_reached(self.address, header.seq, min_seq)

    def note_header(self, header: kv_pb2.ReplyHeader, *, is_certain: bool = True) -> None:
        """Note the database, sequence number, role and epoch in the header of a reply.

        `is_certain` says that no crash can revoke the state with this sequence number. Raises
        `WrongDatabase` when the server has another database than the client.
        """
        freshness = self._freshness
        if header.database_id != freshness.database_id:
            freshness.note_database(header.database_id, self.address)
        if is_certain and header.seq > freshness.seq:
            freshness.seq = header.seq
        if header.epoch != self.endpoint.epoch or header.role != self._role_number:
            self._role_number = header.role
            self._endpoints.note_role(self.endpoint, known(Role, header.role), header.epoch)

    async def aclose(self) -> None:
        """Close the connection; calls under way fail."""
        if self._coalescer is not None:
            await self._coalescer.aclose()
        await self.channel.close()


class Servers:
    """The connections that are open, by endpoint."""

    def __init__(
        self,
        endpoints: Endpoints,
        freshness: Freshness,
        how: ConnectionOptions,
        on_new_token: Callable[[], None],
    ) -> None:
        """Open connections to all `endpoints`. Raises ValueError and OSError as `AccessToken`.

        `on_new_token` is called when all of them have another access token.
        """
        token = how.security.token
        self.token: AccessToken | None = None
        if token is not None:
            from shalekv_client.routing.access_token import AccessToken

            self.token = AccessToken(token, self._renew)
        self._endpoints = endpoints
        self._freshness = freshness
        self._how = how
        self._on_new_token = on_new_token
        self._open: dict[Endpoint, Server] = {}
        self._closing: set[asyncio.Task[None]] = set()
        for endpoint in endpoints:
            self.of(endpoint)

    def of(self, endpoint: Endpoint) -> Server:
        """Return the connection to an endpoint; opens it if there is none.

        Raises `Unauthenticated` if the access token must not be sent there.
        """
        server = self._open.get(endpoint)
        if server is None:
            self._how.security.check(endpoint.address)
            metadata = () if self.token is None else self.token.metadata
            server = Server(endpoint, self._endpoints, self._freshness, self._how, metadata)
            self._open[endpoint] = server
        return server

    def _renew(self) -> None:
        assert self.token is not None
        for server in self._open.values():
            server.renew(self.token.metadata)
        self._on_new_token()

    def drop(self, endpoints: Iterable[Endpoint]) -> None:
        """Close the connections to these endpoints, without waiting."""
        for endpoint in endpoints:
            server = self._open.pop(endpoint, None)
            if server is not None:
                server.is_dropped = True
                closing = asyncio.create_task(server.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close all connections."""
        if self.token is not None:
            self.token.close()
        opened, self._open = self._open, {}
        for server in opened.values():
            await server.aclose()
        await asyncio.gather(*self._closing)
