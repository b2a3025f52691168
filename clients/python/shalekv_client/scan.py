"""A scan: an asynchronous iterator over entries that reads message by message.

`ScanPosition` decides, without I/O, how a scan continues after its call has broken off; `Scan` does
the calls. A page token of a client of several servers contains the address of the server that
keeps the view:

    10 bytes  NUL, "shalekv@", NUL
    1 byte    the length of the address
    ...       the address, then the token of that server

A client of a single server, and a scan at a snapshot, use the server's own token alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Self

from google.protobuf.message import DecodeError

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncCloseable, abandoned
from shalekv_client.error_table import error_of, not_an_answer, silence
from shalekv_client.errors import ErrorDetails, PageExpired, ShaleKVError, Unauthenticated
from shalekv_client.operations import KV, destination_of
from shalekv_client.policies import Destination, ReadLevel
from shalekv_client.results import Entry, View, entries_of, view_of
from shalekv_client.routing.call_names import metadata_here
from shalekv_client.routing.endpoints import Endpoint
from shalekv_client.routing.fleet import Fleet
from shalekv_client.routing.retry import CallTarget, NextAttempt, next_attempt
from shalekv_client.routing.servers import Server
from shalekv_client.routing.spans import begin_span
from shalekv_wire.calls import ClientStream
from shalekv_wire.status import CallFailed, Metadata

SCAN = f"/{KV}/Scan"
_MARK = b"\0shalekv@\0"
ADDRESS_BYTES_MAX = 255


def with_address(address: str, token: bytes) -> bytes:
    """Return a page token that contains `address` and the `token` of the server there."""
    encoded = address.encode()
    if len(encoded) > ADDRESS_BYTES_MAX:
        return token  # only the server that made it accepts it
    return _MARK + bytes([len(encoded)]) + encoded + token


def without_address(token: bytes) -> tuple[str, bytes]:
    """Split a page token into the address, which may be empty, and the server's own token."""
    if not token.startswith(_MARK) or len(token) == len(_MARK):
        return "", token
    begin = len(_MARK) + 1
    end = begin + token[begin - 1]
    return token[begin:end].decode(errors="replace"), token[end:]


@dataclass(slots=True)
class ScanPosition:
    """The progress of one scan: what has been received, and the request for the rest."""

    request: kv_pb2.ScanRequest  # of the whole scan, without a token
    token: bytes  # of the server: where to continue; empty: at the start
    count: int = 0  # of received entries
    size_bytes: int = 0  # of their keys and values
    is_probing: bool = False  # a limit is reached: the request only asks whether there is more
    is_at_end: bool = False
    more: bool = False  # at the end: a limit ended the scan before its range did

    def next_request(self) -> kv_pb2.ScanRequest:
        """Return the request for what is left.

        A server reports whether there is more when it meets the first entry beyond a limit. If the
        scan breaks off just before that, the request is for one more entry, which is not delivered.
        """
        request = kv_pb2.ScanRequest(page_token=self.token)
        request.MergeFrom(self.request)
        limit, limit_bytes = self.request.limit, self.request.limit_bytes
        is_full = bool(limit and self.count >= limit)
        self.is_probing = is_full or bool(limit_bytes and self.size_bytes >= limit_bytes)
        if self.is_probing:
            request.limit, request.limit_bytes = 1, 0
        else:
            request.limit = limit and limit - self.count
            request.limit_bytes = limit_bytes and limit_bytes - self.size_bytes
        return request

    def take(self, reply: kv_pb2.ScanReply) -> list[kv_pb2.Entry]:
        """Note a message; return its entries that the caller gets."""
        if self.is_probing:
            self.is_at_end = True
            self.more = bool(reply.entries)
            return []
        entries = list(reply.entries)
        self.count += len(entries)
        self.size_bytes += sum(len(each.key) + len(each.value) for each in entries)
        self.more = reply.more
        if self.request.resumable:
            self.is_at_end = reply.more or not reply.page_token
        self.token = reply.page_token
        return entries

    @property
    def can_resume(self) -> bool:
        """Return whether the scan can continue behind the last message after its call has broken
        off.
        """
        return self.request.resumable and bool(self.token)


@dataclass(frozen=True, slots=True)
class ScanOrder:
    """The range and the options of a scan."""

    request: kv_pb2.ScanRequest  # without a page token
    read_level: ReadLevel
    min_seq: int  # that the view must have reached
    silence_ms: int  # the longest time until a message that is due

    @property
    def is_at_snapshot(self) -> bool:
        """Return whether the scan reads a snapshot, so that any server can continue it."""
        return bool(self.request.header.snapshot_id)


class Scan(AsyncCloseable, AsyncIterator[Entry]):
    """The entries of a range in order, all at one sequence number. Iterate over it once.

    The call begins when the first entry is asked for; the server sends no faster than entries are
    taken. To leave the loop early, use the scan as a context manager, or `aclose` it.
    """

    def __init__(self, fleet: Fleet, order: ScanOrder, page_token: bytes) -> None:
        """Create a scan, behind the page of the token if there is one; `Client.scan` does so."""
        self.view: View | None = None  # the state that is read; known with the first entry
        self.more: bool = False  # at the end: a limit ended the scan before its range did
        self.page_token: bytes = b""  # at the end, if there is more: continues at this view
        self._fleet = fleet
        self._order = order
        self._address, token = without_address(page_token)  # of the server that has the view
        self._position = ScanPosition(order.request, token)
        self._server: Server | None = None
        self._call: ClientStream | None = None
        self._entries: Iterator[Entry] = iter(())
        self._ended = False
        self._token_number = 0  # of the access token of the call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry:
        """Return the next entry. Raises as `Client.get`; entries before an error are valid."""
        while True:
            for entry in self._entries:
                return entry
            if self._ended:
                raise StopAsyncIteration
            await self._read_message()

    async def read(self) -> list[Entry]:
        """Return the entries of the next message; none at the end. Raises as `Client.get`."""
        while not (entries := list(self._entries)) and not self._ended:
            await self._read_message()
        return entries

    def next_page(self) -> Scan:
        """Return the scan that continues behind this one, at the same view, with the same limits.

        Raises ValueError unless this scan is at its end and has `more`. The server keeps the view
        for a while; after that the first entry raises `PageExpired`.
        """
        if not self.page_token:
            raise ValueError("there is no next page, or this one is not at its end yet")
        return Scan(self._fleet, replace(self._order, min_seq=0), self.page_token)

    async def pages(self) -> AsyncIterator[list[Entry]]:
        """Iterate over the pages to the end of the range; each has the limits of this scan."""
        page = self
        while True:
            async with page:
                yield [entry async for entry in page]
            if not page.more:
                return
            page = page.next_page()

    async def aclose(self) -> None:
        """End the call; entries that were not taken are dropped."""
        self._ended = True
        self._entries = iter(())
        if self._call is not None:
            self._call.cancel()

    async def _read_message(self) -> None:
        """Take the next message; if the call has broken off, from another call when possible."""
        try:
            if self._call is None or self._server is None:
                reply = await self._begin_call()
            else:
                reply = await self._continue(self._server, self._call)
        except BaseException:
            self._ended = True
            raise
        if reply is None:
            self._ended = True
            return
        if self.view is None:
            self.view = view_of(reply.header)
        self._entries = iter(entries_of(self._position.take(reply)))
        self.more = self._position.more
        self.page_token = self._token()
        if self._position.is_at_end:  # nothing more of the call is needed
            self._ended = True
            if self._call is not None:
                self._call.cancel()

    def _token(self) -> bytes:
        """Return the page token for the caller; empty if there is no more."""
        token = self._position.token if self.more else b""
        several = self._fleet.endpoints.sole is None and not self._order.is_at_snapshot
        if token and several and self._server is not None:
            return with_address(self._server.address, token)
        return token

    async def _continue(self, server: Server, call: ClientStream) -> kv_pb2.ScanReply | None:
        position = self._position
        can_resume = position.can_resume
        silence_ms = self._order.silence_ms
        try:
            return await _reply(server, call, silence_ms // 2 if can_resume else silence_ms)
        except ShaleKVError as raised:
            call.cancel()
            if self._ended:  # by `aclose`
                raise abandoned(server.address, "the scan") from raised
            error = self._fleet.explained(server, raised)
            self._fleet.failed(server, error, Destination.BY_POLICY)
            if not can_resume or not await self._may_resume(error):
                if error is raised:
                    raise
                raise error from raised
        return await self._begin_call()

    async def _may_resume(self, error: ShaleKVError) -> bool:
        """Return whether another call may succeed after `error`."""
        if isinstance(error, Unauthenticated):
            return await self._fleet.renewed(self._token_number, self._order.silence_ms)
        decision = next_attempt(error, Destination.BY_POLICY, is_repeatable=True)
        return decision is NextAttempt.OTHER

    async def _begin_call(self) -> kv_pb2.ScanReply | None:
        """Begin a new call behind all received messages; return its first message."""
        order = self._order
        request = self._position.next_request()
        span = begin_span("scan")  # up to the first message: that of the server is longer
        metadata = metadata_here("" if span is None else span.traceparent)

        async def send(server: Server, left_ms: float) -> kv_pb2.ScanReply | None:
            if order.min_seq and not server.is_writer:
                request.header.min_seq = order.min_seq
            number = self._fleet.token_number
            call = server.channel.stream(SCAN, metadata=metadata)
            try:
                reply = await _reply(server, call, left_ms, request, metadata)
                if reply is not None:
                    server.note_read(reply.header, order.read_level, order.min_seq)
            except BaseException:
                call.cancel()
                raise
            self._server, self._call, self._token_number = server, call, number
            return reply

        target = CallTarget(
            destination_of(order.read_level),
            is_repeatable=True,
            only=self._only(),
            # A scan may take long to its first entry at a reader that does not lag.
            replica_wait_ms=None if order.min_seq else order.silence_ms,
        )
        if span is None:
            return await self._fleet.run(send, target, order.silence_ms)
        return await span.cover(send, lambda send: self._fleet.run(send, target, order.silence_ms))

    def _only(self) -> Endpoint | None:
        """Return the only server that has the view; None: any server can be asked."""
        if self._order.is_at_snapshot or not self._position.token:
            return None
        if self._server is not None:
            return self._server.endpoint
        if not self._address:
            return None  # a token of a client of one server
        found = self._fleet.endpoints.get(self._address)
        if found is None:
            message = f"the view of the page is kept by {self._address}, which this client does "
            message += "not know: begin the scan again"
            raise PageExpired(ErrorDetails(self._address, "ABORTED", message, "PAGE_EXPIRED"))
        return found


async def _reply(
    server: Server,
    call: ClientStream,
    within_ms: float,
    request: kv_pb2.ScanRequest | None = None,
    metadata: Metadata = (),
) -> kv_pb2.ScanReply | None:
    """Return the next message of `call`, after sending `request` if one is given.

    None: the call is over. Raises the errors of `shalekv_client.errors`, with the names in
    `metadata`, that of the call.
    """
    try:
        async with asyncio.timeout(within_ms / 1000.0):
            if request is not None:
                await call.write(request.SerializeToString())
                await call.done_writing()
            data = await call.read()
    except TimeoutError:
        raise silence(server.address, round(within_ms)) from None
    except CallFailed as error:
        raise error_of(server.address, error, sent=metadata) from error
    try:
        return None if data is None else kv_pb2.ScanReply.FromString(data)
    except DecodeError:
        raise not_an_answer(server.address, "Scan") from None
