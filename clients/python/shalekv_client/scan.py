"""A scan under way: an asynchronous iterator over entries that reads message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self, TypeAlias, cast

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.cancellation import abandoned, is_task_cancelled
from shalekv_client.closing import AsyncClosing
from shalekv_client.error_table import error_of, silence
from shalekv_client.results import Entry, View, entries_of, view_of

ScanCall: TypeAlias = "grpc.aio.UnaryStreamCall[kv_pb2.ScanRequest, kv_pb2.ScanReply]"


class Scan(AsyncClosing, AsyncIterator[Entry]):
    """The entries of a range in order, all at one sequence number. Iterate over it once.

    The call begins with the first entry that is asked for; the server sends no faster than
    entries are taken. Leaving the loop early: use it as a context manager, or `aclose` it.
    """

    def __init__(
        self,
        begin: Callable[[bytes], ScanCall],
        page_token: bytes,
        *,
        address: str,
        silence_ms: int,
    ) -> None:
        """`begin` begins the call behind the page that gave a token, at the start if it is empty.

        A message must come within `silence_ms` when one is due.
        """
        self.view: View | None = None  # what is read from; known with the first entry
        self.more: bool = False  # at the end: a limit ended the scan before its range did
        self.page_token: bytes = b""  # at the end, if there is more: how to go on, at this view
        self._begin = begin
        self._begin_token = page_token
        self._address = address
        self._silence_ms = silence_ms
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
        return Scan(
            self._begin, self.page_token, address=self._address, silence_ms=self._silence_ms
        )

    async def pages(self) -> AsyncIterator[list[Entry]]:
        """All pages to the end of the range; each is a scan with the limits of this one."""
        page = self
        while True:
            async with page:
                yield [entry async for entry in page]
            if not page.more:
                return
            page = page.next_page()

    async def _read_message(self) -> None:
        if self._call is None:
            self._call = self._begin(self._begin_token)
        try:
            async with asyncio.timeout(self._silence_ms / 1000.0):
                message = await self._call.read()
        except TimeoutError:
            self._ended = True
            raise silence(self._address, self._silence_ms) from None
        except grpc.aio.AioRpcError as error:
            self._ended = True
            raise error_of(self._address, error) from error
        except asyncio.CancelledError:
            self._ended = True
            if is_task_cancelled():
                raise
            raise abandoned(self._address, "the client or the scan") from None
        if message is grpc.aio.EOF:
            self._ended = True
            return
        reply = cast("kv_pb2.ScanReply", message)
        if self.view is None:
            self.view = view_of(reply.header)
        self.more = reply.more
        self.page_token = reply.page_token
        self._entries = iter(entries_of(reply.entries))

    async def aclose(self) -> None:
        """End the call; the entries that were not taken yet are dropped."""
        self._ended = True
        self._entries = iter(())
        if self._call is not None:
            self._call.cancel()
