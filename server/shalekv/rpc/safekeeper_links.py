"""Connections of a writer, reader or safekeeper to safekeepers: `Links` over gRPC.

There is one channel for each address, which is kept. Streams are read and written directly, without
a task in between. A message that goes to several members is encoded once. An error that a
safekeeper sends is converted back to its class by `error_from_status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors
from shalekv.errors import CorruptObject, InvalidRequest, ShaleError
from shalekv.format.quorum.messages import (
    propose_request,
    records_of,
    relay_request,
    to_proposer,
)
from shalekv.protocol.quorum_records import Append, Record, ToAcceptor, ToProposer
from shalekv.rpc.status import DOMAIN
from shalekv.server.safekeeper.service import node_status_of
from shalekv.settings.model import MIB
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import (
    CONNECT_TIMEOUT_MS,
    DatabasePlace,
    LinkBroken,
    NodeStatus,
    TailPiece,
)
from shalekv_wire.calls import Channel, ClientStream
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.status import CallFailed
from shalekv_wire.stream import Limits
from shalekv_wire.tls import TlsContexts

ReplyT = TypeVar("ReplyT", bound=Message)

_SERVICE = wire.DESCRIPTOR.services_by_name["Safekeeper"].full_name
# A safekeeper asks the object store before it creates or deletes a member.
_SLOW_CALL_MS = 60_000
_MESSAGE_BYTES_MAX = 1024 * MIB  # of what a safekeeper sends: more than it ever does
# A connection breaks when the other machine does not answer a ping for this long; servers close the
# connections of clients that ping more often.
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 30.0, 5.0
# A safekeeper that comes back is found soon.
_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 1.0
GRPCIO_OPTIONS = (  # for a channel of grpcio, the fallback
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", round(1_000 * _KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", round(1_000 * _KEEPALIVE_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", round(1_000 * _BACKOFF_S)),
    ("grpc.min_reconnect_backoff_ms", round(1_000 * _BACKOFF_MAX_S)),
    ("grpc.max_reconnect_backoff_ms", round(1_000 * _BACKOFF_MAX_S)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

# Errors that are made from a text alone, by their reasons. Any other reason says no more than that
# a node cannot answer now, and becomes a broken link.
_ERROR_OF_REASON: Mapping[str, type[ShaleError]] = {
    kind.reason: kind
    for kind in (
        errors.DatabaseExists,
        errors.DatabaseMismatch,
        errors.DatabaseNotFound,
        errors.InvalidSetting,
        errors.InvalidUrl,
        errors.LogDamaged,
        errors.NotAMember,
        errors.RecordTrimmed,
    )
}
_CORRUPTION_OF_REASON: Mapping[str, type[CorruptObject]] = {
    kind.reason: kind
    for kind in (
        errors.BadChecksum,
        errors.BadMagic,
        errors.BadStructure,
        errors.CorruptObject,
        errors.Truncated,
        errors.UnsupportedVersion,
        errors.WrongObject,
    )
}


def native_channel(address: str, tls: TlsContexts | None = None) -> Channel:
    """Open a connection to a safekeeper by our own wire; without TLS if `tls` is None."""
    options = ChannelOptions(
        limits=Limits(message_bytes_max=_MESSAGE_BYTES_MAX),
        connect_timeout_s=CONNECT_TIMEOUT_MS / 1_000,
        backoff_s=_BACKOFF_S,
        backoff_max_s=_BACKOFF_MAX_S,
        keepalive_s=_KEEPALIVE_S,
        keepalive_timeout_s=_KEEPALIVE_TIMEOUT_S,
        tls=tls,
    )
    return WireChannel(address, options)


def error_from_status(failed: CallFailed, address: str) -> ShaleError | LinkBroken:
    """Convert the failure of a call to the error that the node at `address` has sent."""
    status = _status_of(failed)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if not detail.Unpack(info):
            detail.Unpack(bad)
    text = f"{address}: {status.message}"
    if info.domain == DOMAIN:
        kind = _ERROR_OF_REASON.get(info.reason)
        if kind is not None:
            return kind(text)
        if info.reason == InvalidRequest.reason and bad.field_violations:
            violation = bad.field_violations[0]
            return InvalidRequest(violation.field, f"{address}: {violation.description}")
        corrupt = _CORRUPTION_OF_REASON.get(info.reason)
        if corrupt is not None:
            offset = int(info.metadata.get("offset", "0"))
            return corrupt(info.metadata.get("object", address), offset, text)
    return LinkBroken(f"{text} ({failed.code.name})")


def _status_of(failed: CallFailed) -> status_pb2.Status:
    if failed.details:
        return status_pb2.Status.FromString(failed.details)
    return status_pb2.Status(message=failed.message or "it does not answer")


class GrpcLinks:
    """Links to safekeepers, by HOST:PORT. Needs a running loop.

    All requests raise `LinkBroken` when the node does not answer, or the error that it sends.
    """

    def __init__(self, open_channel: Callable[[str], Channel] = native_channel) -> None:
        """Create links without connections, which are opened by `open_channel`."""
        self._open_channel = open_channel
        self._channels: dict[str, Channel] = {}
        self._encoder = _Encoder()

    async def connect(self, address: str, place: DatabasePlace) -> GrpcLink:
        """Open a stream to the node's member of a database. Raises `LinkBroken`.

        If the node has none, `GrpcLink.receive` raises the error instead of the first reply.
        """
        channel = await self._connected(address)
        return GrpcLink(channel.stream(f"/{_SERVICE}/Propose"), place, address, self._encoder)

    async def relay(self, address: str) -> GrpcRelayLink:
        """Open a stream for appends relayed to the members of a node. Raises `LinkBroken`."""
        channel = await self._connected(address)
        return GrpcRelayLink(channel.stream(f"/{_SERVICE}/Relay"), address)

    async def fetch(
        self, address: str, database_id: bytes, member_id: bytes, first_lsn: int
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield records from `first_lsn` to the present end of the log, with verified checksums."""
        request = wire.FetchRequest(
            database_id=database_id, member_id=member_id, first_lsn=first_lsn
        )
        async for reply in self._stream("Fetch", address, request, wire.FetchReply):
            yield records_of(reply.records, address)

    async def tail(
        self, address: str, database_id: bytes, first_wal_id: int
    ) -> AsyncIterator[TailPiece]:
        """Yield committed records from the first of a WAL object on, with verified checksums."""
        request = wire.TailRequest(database_id=database_id, first_wal_id=first_wal_id)
        async for reply in self._stream("Tail", address, request, wire.TailReply):
            yield TailPiece(records_of(reply.records, address), reply.committed_lsn)

    async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
        """Have a node create a log for the database; returns the member id."""
        request = wire.AdmitRequest(database=_place_message(place), request_id=request_id)
        reply = await self._unary("Admit", address, request, wire.AdmitReply, _SLOW_CALL_MS / 1_000)
        return reply.member_id

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        """Get the status of a node: of its member of one database, or (empty id) of all members."""
        request = wire.GetSafekeeperStatusRequest(database_id=database_id)
        reply = await self._unary(
            "GetSafekeeperStatus",
            address,
            request,
            wire.GetSafekeeperStatusReply,
            CONNECT_TIMEOUT_MS / 1_000,
        )
        return node_status_of(reply)

    async def retire(self, address: str, database_id: bytes, member_id: bytes) -> None:
        """Have a node delete the log of a member that the manifest does not name any more."""
        request = wire.RetireRequest(database_id=database_id, member_id=member_id)
        await self._unary("Retire", address, request, wire.RetireReply, _SLOW_CALL_MS / 1_000)

    async def close(self) -> None:
        """Close all channels, and with them all streams."""
        channels = [*self._channels.values()]
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _connected(self, address: str) -> Channel:
        """Return the channel of an address, with a connection. Raises `LinkBroken`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
        try:
            await channel.wait_ready(CONNECT_TIMEOUT_MS / 1_000)
        except CallFailed as failed:
            raise LinkBroken(f"{address}: {failed.message}") from None
        return channel

    async def _unary(
        self, method: str, address: str, request: Message, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        channel = await self._connected(address)
        data = request.SerializeToString()
        try:
            answer = await channel.unary(f"/{_SERVICE}/{method}", data, timeout_s=timeout_s)
        except CallFailed as failed:
            raise error_from_status(failed, address) from None
        return _decoded(answer, reply, address)

    async def _stream(
        self, method: str, address: str, request: Message, reply: type[ReplyT]
    ) -> AsyncIterator[ReplyT]:
        channel = await self._connected(address)
        call = channel.stream(f"/{_SERVICE}/{method}")
        try:
            await call.write(request.SerializeToString())
            await call.done_writing()
            while (data := await call.read()) is not None:
                yield _decoded(data, reply, address)
        except CallFailed as failed:
            raise error_from_status(failed, address) from None
        finally:
            call.cancel()


class GrpcLink:
    """Stream to one member. Cancelling a `send` or `receive` ends it."""

    def __init__(
        self, call: ClientStream, place: DatabasePlace, address: str, encoder: _Encoder
    ) -> None:
        """REQUIRES: `call` has begun, and nothing was sent."""
        self._call = call
        self._place: DatabasePlace | None = place  # sent with the first message
        self._address = address
        self._encoder = encoder

    async def send(self, message: ToAcceptor) -> None:
        """Send a message; waits while flow control allows no more. Raises `LinkBroken`."""
        if self._place is None:
            data = self._encoder.encode(message)
        else:
            request = propose_request(message)
            request.database.CopyFrom(_place_message(self._place))
            data = request.SerializeToString()
            self._place = None
        try:
            await self._call.write(data)
        except CallFailed:  # `receive` raises the reason
            raise LinkBroken(f"{self._address} takes no more") from None
        except asyncio.CancelledError:
            self._call.cancel()
            raise

    async def receive(self) -> ToProposer:
        """Receive the next reply. Raises `LinkBroken`, or the error that the safekeeper sends."""
        try:
            data = await self._call.read()
        except CallFailed as failed:
            raise error_from_status(failed, self._address) from None
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        if data is None:
            raise LinkBroken(f"{self._address} has ended the stream")
        try:
            return to_proposer(wire.ProposeReply.FromString(data))
        except (DecodeError, InvalidRequest) as error:
            raise LinkBroken(f"{self._address} has sent an invalid reply: {error}") from None

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()


class GrpcRelayLink:
    """Stream from one safekeeper to another. Cancelling a `send` ends it."""

    def __init__(self, call: ClientStream, address: str) -> None:
        """REQUIRES: `call` has begun."""
        self._call = call
        self._address = address

    async def send(self, database_id: bytes, member_id: bytes, append: Append) -> None:
        """Send an append; waits while flow control allows no more. Raises `LinkBroken`."""
        data = relay_request(database_id, member_id, append).SerializeToString()
        try:
            await self._call.write(data)
        except CallFailed:
            raise LinkBroken(f"{self._address} takes no more") from None
        except asyncio.CancelledError:
            self._call.cancel()
            raise

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()


class _Encoder:
    """Encodes each message once, although it is sent to several members one after the other."""

    def __init__(self) -> None:
        self._last: Append | None = None
        self._data = b""

    def encode(self, message: ToAcceptor) -> bytes:
        if not isinstance(message, Append):
            return propose_request(message).SerializeToString()
        if message != self._last:  # cheap: the records of equal messages are the same objects
            self._data = propose_request(message).SerializeToString()
            self._last = message if message.records else None
        return self._data


def _place_message(place: DatabasePlace) -> wire.DatabasePlace:
    return wire.DatabasePlace(database_id=place.database_id, url=place.url)


def _decoded(data: bytes, reply: type[ReplyT], address: str) -> ReplyT:
    try:
        return reply.FromString(data)
    except DecodeError:
        raise LinkBroken(f"{address} has sent an invalid reply") from None
