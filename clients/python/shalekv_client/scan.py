"""A scan under way: an asynchronous iterator over entries that reads message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Self, TypeAlias, cast

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncClosing, abandoned, is_task_cancelled
from shalekv_client.endpoints import Endpoint
from shalekv_client.error_table import error_of, silence
from shalekv_client.errors import ErrorDetails, PageExpired, ShaleKVError
from shalekv_client.fleet import Aim, Fleet
from shalekv_client.operations import destination_of
from shalekv_client.policies import Destination, ReadLevel
from shalekv_client.results import Entry, View, entries_of, view_of
from shalekv_client.retry import Verdict, verdict
from shalekv_client.servers import Server

# --- page_tokens
# Page tokens of a client of several servers: with the address of the one that has the view.
#
#     10 bytes  NUL, "shalekv@", NUL
#     1 byte    the length of the address
#     ...       the address, then the token of that server
#
# What a single server, or a snapshot, is asked for has the server's own token and nothing before
# it.


_MARK = b"\0shalekv@\0"
ADDRESS_BYTES_MAX = 255


def with_address(address: str, token: bytes) -> bytes:
    """The token of the server at `address`, in a form that tells the address."""
    told = address.encode()
    if len(told) > ADDRESS_BYTES_MAX:
        return token  # only its own server knows it: others refuse it
    return _MARK + bytes([len(told)]) + told + token


def without_address(token: bytes) -> tuple[str, bytes]:
    """The address that a token tells, or nothing, and the server's own token."""
    if not token.startswith(_MARK) or len(token) == len(_MARK):
        return "", token
    begin = len(_MARK) + 1
    end = begin + token[begin - 1]
    return token[begin:end].decode(errors="replace"), token[end:]


# --- scan_place
# How far a scan has come, and with which request it goes on behind that. Pure.


@dataclass(slots=True)
class ScanPlace:
    """The place of one scan between what its caller has got and what is left."""

    request: kv_pb2.ScanRequest  # as it was begun, without a token
    token: bytes  # of the server: where to go on; empty: at the start
    count: int = 0  # of entries that came
    size_bytes: int = 0  # of their keys and values
    is_looking: bool = False  # all came that was asked for: is there more?
    is_at_end: bool = False
    more: bool = False  # at the end: a limit ended the scan before its range did

    def next_request(self) -> kv_pb2.ScanRequest:
        """What to ask for now.

        A server tells whether there is more when it meets the first entry beyond a limit. If a
        scan breaks off between that and the entry before, one more entry is asked for.
        """
        request = kv_pb2.ScanRequest(page_token=self.token)
        request.MergeFrom(self.request)
        limit, limit_bytes = self.request.limit, self.request.limit_bytes
        is_full = bool(limit and self.count >= limit)
        self.is_looking = is_full or bool(limit_bytes and self.size_bytes >= limit_bytes)
        if self.is_looking:
            request.limit, request.limit_bytes = 1, 0
        else:
            request.limit = limit and limit - self.count
            request.limit_bytes = limit_bytes and limit_bytes - self.size_bytes
        return request

    def take(self, reply: kv_pb2.ScanReply) -> list[kv_pb2.Entry]:
        """The entries of a message that the caller gets."""
        if self.is_looking:
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
        """Whether the scan can go on behind the last message after its call has broken off."""
        return self.request.resumable and bool(self.token)


# --- scan


ScanCall: TypeAlias = "grpc.aio.UnaryStreamCall[kv_pb2.ScanRequest, kv_pb2.ScanReply]"


@dataclass(frozen=True, slots=True)
class ScanOrder:
    """What is to be scanned, and how."""

    request: kv_pb2.ScanRequest  # without a page token
    read_level: ReadLevel
    min_seq: int  # that the view has to show
    silence_ms: int  # the longest time to a message that is due

    @property
    def is_at_snapshot(self) -> bool:
        """Whether any server can go on with it."""
        return bool(self.request.header.snapshot_id)


class Scan(AsyncClosing, AsyncIterator[Entry]):
    """The entries of a range in order, all at one sequence number. Iterate over it once.

    The call begins with the first entry that is asked for; the server sends no faster than
    entries are taken. Leaving the loop early: use it as a context manager, or `aclose` it.
    """

    def __init__(self, fleet: Fleet, order: ScanOrder, page_token: bytes) -> None:
        """As `Client.scan` makes it: behind the page that gave the token, if there is one."""
        self.view: View | None = None  # what is read from; known with the first entry
        self.more: bool = False  # at the end: a limit ended the scan before its range did
        self.page_token: bytes = b""  # at the end, if there is more: how to go on, at this view
        self._fleet = fleet
        self._order = order
        self._address, token = without_address(page_token)  # of the server that has the view
        self._place = ScanPlace(order.request, token)
        self._server: Server | None = None
        self._call: ScanCall | None = None
        self._entries: Iterator[Entry] = iter(())
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry:
        """The next entry. Raises as `Client.get`; what was returned before an error is good."""
        while True:
            for entry in self._entries:
                return entry
            if self._ended:
                raise StopAsyncIteration
            await self._read_message()

    async def read(self) -> list[Entry]:
        """The next entries, those that came together; none at the end. Raises as `Client.get`."""
        while not (entries := list(self._entries)) and not self._ended:
            await self._read_message()
        return entries

    def next_page(self) -> Scan:
        """The scan that goes on behind this one, at the same view, with the same limits.

        For a scan that has come to its end and has `more`. The server keeps the view for a while;
        after that the first entry raises `PageExpired`.
        """
        if not self.page_token:
            raise ValueError("there is no next page, or this one is not at its end yet")
        return Scan(self._fleet, replace(self._order, min_seq=0), self.page_token)

    async def pages(self) -> AsyncIterator[list[Entry]]:
        """All pages to the end of the range; each is a scan with the limits of this one."""
        page = self
        while True:
            async with page:
                yield [entry async for entry in page]
            if not page.more:
                return
            page = page.next_page()

    async def aclose(self) -> None:
        """End the call; the entries that were not taken yet are dropped."""
        self._ended = True
        self._entries = iter(())
        if self._call is not None:
            self._call.cancel()

    async def _read_message(self) -> None:
        """Take the next message, from another call when this one has broken off and may be."""
        try:
            if self._call is None or self._server is None:
                message = await self._begin()
            else:
                message = await self._go_on(self._server, self._call)
        except BaseException:
            self._ended = True
            raise
        if message is grpc.aio.EOF:
            self._ended = True
            return
        reply = cast("kv_pb2.ScanReply", message)
        if self.view is None:
            self.view = view_of(reply.header)
        self._entries = iter(entries_of(self._place.take(reply)))
        self.more = self._place.more
        self.page_token = self._token()
        if self._place.is_at_end:  # what is left of the call says nothing more
            self._ended = True
            if self._call is not None:
                self._call.cancel()

    def _token(self) -> bytes:
        """What the caller is told of how to go on, which it may when there is more."""
        token = self._place.token if self.more else b""
        several = self._fleet.endpoints.sole is None and not self._order.is_at_snapshot
        if token and several and self._server is not None:
            return with_address(self._server.address, token)
        return token

    async def _go_on(self, server: Server, call: ScanCall) -> object:
        place = self._place
        can_resume = place.can_resume
        silence_ms = self._order.silence_ms
        try:
            return await _message(server, call, silence_ms // 2 if can_resume else silence_ms)
        except ShaleKVError as raised:
            call.cancel()
            error = self._fleet.explained(server, raised)
            aim = Destination.BY_POLICY
            self._fleet.failed(server, error, aim)
            if not can_resume or verdict(error, aim, is_repeatable=True) is not Verdict.OTHER:
                if error is raised:
                    raise
                raise error from raised
        return await self._begin()

    async def _begin(self) -> object:
        """The first message of a new call, behind all that has come."""
        order = self._order
        request = self._place.next_request()

        async def send(server: Server, left_ms: float) -> object:
            if order.min_seq and not server.is_writer:
                request.header.min_seq = order.min_seq
            call = server.kv.Scan(request)
            try:
                message = await _message(server, call, left_ms)
                if isinstance(message, kv_pb2.ScanReply):
                    server.shown(message.header, order.read_level, order.min_seq)
            except BaseException:
                call.cancel()
                raise
            self._server, self._call = server, call
            return message

        aim = Aim(
            destination_of(order.read_level),
            is_repeatable=True,
            only=self._only(),
            # A long way to the first entry is no sign of a reader that is behind.
            replica_wait_ms=None if order.min_seq else order.silence_ms,
        )
        return await self._fleet.run(send, aim, order.silence_ms)

    def _only(self) -> Endpoint | None:
        """The one server that has the view; None: any has."""
        if self._order.is_at_snapshot or not self._place.token:
            return None
        if self._server is not None:
            return self._server.endpoint
        if not self._address:
            return None  # a client of one server has got it
        found = self._fleet.endpoint_at(self._address)
        if found is None:
            message = f"the view of the page is kept by {self._address}, which this client does "
            message += "not know: begin the scan again"
            raise PageExpired(ErrorDetails(self._address, "ABORTED", message, "PAGE_EXPIRED"))
        return found


async def _message(server: Server, call: ScanCall, within_ms: float) -> object:
    try:
        async with asyncio.timeout(within_ms / 1000.0):
            return await call.read()
    except TimeoutError:
        raise silence(server.address, round(within_ms)) from None
    except grpc.aio.AioRpcError as error:
        raise error_of(server.address, error) from error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise abandoned(server.address, "the client or the scan") from None
