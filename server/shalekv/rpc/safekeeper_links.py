"""Connections of a writer, reader or safekeeper to safekeepers: `Links` over gRPC.

There is one channel for each address, which is kept. Streams are read and written directly, without
a task in between. A message that goes to several members is encoded once. An error that a
safekeeper sends is converted back to its class by `error_from_status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors
from shalekv.errors import CorruptObject, InvalidRequest, ShaleError
from shalekv.format.quorum_messages import (
    propose_request,
    records_of,
    relay_request,
    to_proposer,
)
from shalekv.protocol.quorum_records import Append, Record, ToAcceptor, ToProposer
from shalekv.rpc.status import DOMAIN
from shalekv.server.safekeeper.service import node_status_of
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import (
    CONNECT_TIMEOUT_MS,
    DatabasePlace,
    LinkBroken,
    NodeStatus,
    TailPiece,
)

ReplyT = TypeVar("ReplyT", bound=Message)
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
_StreamMethod: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"

_SERVICE = wire.DESCRIPTOR.services_by_name["Safekeeper"].full_name
# A safekeeper asks the object store before it creates or deletes a member.
_SLOW_CALL_MS = 60_000
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A connection breaks when data that was sent is not acknowledged by the other machine for this
    # long; servers close the connections of clients that ping more often.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A safekeeper that comes back is found soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_DETAILS = "grpc-status-details-bin"
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


def error_from_status(error: grpc.aio.AioRpcError, address: str) -> ShaleError | LinkBroken:
    """Convert a gRPC error to the error that the node at `address` has sent."""
    status = _status_of(error)
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
    return LinkBroken(f"{text} ({error.code().name})")


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata():
        if key == _DETAILS and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status(message=error.details() or "it does not answer")


class GrpcLinks:
    """Links to safekeepers, by HOST:PORT. Needs a running loop.

    All requests raise `LinkBroken` when the node does not answer, or the error that it sends.
    """

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._encoder = _Encoder()

    async def connect(self, address: str, place: DatabasePlace) -> GrpcLink:
        """Open a stream to the node's member of a database. Raises `LinkBroken`.

        If the node has none, `GrpcLink.receive` raises the error instead of the first reply.
        """
        channel = self._channel(address)
        await self._wait_ready(channel, address)
        propose: _StreamMethod = channel.stream_stream(f"/{_SERVICE}/Propose")
        return GrpcLink(propose(), place, address, self._encoder)

    async def relay(self, address: str) -> GrpcRelayLink:
        """Open a stream for appends relayed to the members of a node. Raises `LinkBroken`."""
        channel = self._channel(address)
        await self._wait_ready(channel, address)
        relay: _StreamMethod = channel.stream_stream(f"/{_SERVICE}/Relay")
        return GrpcRelayLink(relay(), address)

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

    def _channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel of an address; a new one if the old one has failed to connect.

        A channel that has failed waits before it tries again, and reports that failure until it has
        succeeded.
        """
        channel = self._channels.get(address)
        if channel is None or channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # The old one is closed when nothing refers to it any more.
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
            self._channels[address] = channel
        return channel

    async def _wait_ready(self, channel: grpc.aio.Channel, address: str) -> None:
        """Connect, or raise `LinkBroken` when that fails or takes too long."""
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1_000):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise LinkBroken(f"{address}: nobody answers there")
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise LinkBroken(f"{address}: no connection within {CONNECT_TIMEOUT_MS} ms") from None

    async def _unary(
        self, method: str, address: str, request: Message, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        channel = self._channel(address)
        await self._wait_ready(channel, address)
        call = channel.unary_unary(f"/{_SERVICE}/{method}", _encoded, reply.FromString)
        try:
            answer: ReplyT = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, address) from None
        return answer

    async def _stream(
        self, method: str, address: str, request: Message, reply: type[ReplyT]
    ) -> AsyncIterator[ReplyT]:
        channel = self._channel(address)
        await self._wait_ready(channel, address)
        call = channel.unary_stream(f"/{_SERVICE}/{method}", _encoded, reply.FromString)(request)
        try:
            while True:
                message: Any = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield message
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, address) from None
        finally:
            call.cancel()


class GrpcLink:
    """Stream to one member. Cancelling a `send` or `receive` ends it."""

    def __init__(
        self, call: _StreamCall, place: DatabasePlace, address: str, encoder: _Encoder
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
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise LinkBroken(
                f"{self._address} takes no more"
            ) from None  # `receive` raises the reason
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise

    async def receive(self) -> ToProposer:
        """Receive the next reply. Raises `LinkBroken`, or the error that the safekeeper sends."""
        try:
            data: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, self._address) from None
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        if data is grpc.aio.EOF:
            raise LinkBroken(f"{self._address} has ended the stream")
        try:
            return to_proposer(wire.ProposeReply.FromString(data))
        except (DecodeError, InvalidRequest) as error:
            raise LinkBroken(f"{self._address} has sent an invalid reply: {error}") from None

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()

    def _raise_if_closed(self) -> None:
        """Raise `LinkBroken` if the call was cancelled by `close`, and not with its task."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise LinkBroken(f"{self._address}: the stream was closed here") from None


class GrpcRelayLink:
    """Stream from one safekeeper to another. Cancelling a `send` ends it."""

    def __init__(self, call: _StreamCall, address: str) -> None:
        """REQUIRES: `call` has begun."""
        self._call = call
        self._address = address

    async def send(self, database_id: bytes, member_id: bytes, append: Append) -> None:
        """Send an append; waits while flow control allows no more. Raises `LinkBroken`."""
        data = relay_request(database_id, member_id, append).SerializeToString()
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise LinkBroken(f"{self._address} takes no more") from None

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


def _encoded(request: Message) -> bytes:
    return request.SerializeToString()
