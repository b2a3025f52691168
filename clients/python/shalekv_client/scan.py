"""A scan under way: an asynchronous iterator over entries that reads message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self, TypeAlias, cast

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.error_table import error_of, silence
from shalekv_client.results import Entry, View, entries_of, view_of

ScanCall: TypeAlias = "grpc.aio.UnaryStreamCall[kv_pb2.ScanRequest, kv_pb2.ScanReply]"


class Scan(AsyncIterator[Entry]):
    """The entries of a range in order, all at one sequence number. Iterate over it once.

    The call begins with the first entry that is asked for; the server sends no faster than
    entries are taken. Leaving the loop early: use it as a context manager, or `aclose` it.
    """

    def __init__(self, start: Callable[[], ScanCall], *, address: str, silence_ms: int) -> None:
        """`start` begins the call; a message must come within `silence_ms` when one is due."""
        self.view: View | None = None  # what is read from; known with the first entry
        self.more: bool = False  # at the end: a limit ended the scan before its range did
        self._start = start
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

    async def _read_message(self) -> None:
        if self._call is None:
            self._call = self._start()
        try:
            async with asyncio.timeout(self._silence_ms / 1000.0):
                message = await self._call.read()
        except TimeoutError:
            self._ended = True
            raise silence(self._address, self._silence_ms) from None
        except grpc.aio.AioRpcError as error:
            self._ended = True
            raise error_of(self._address, error) from error
        if message is grpc.aio.EOF:
            self._ended = True
            return
        reply = cast("kv_pb2.ScanReply", message)
        if self.view is None:
            self.view = view_of(reply.header)
        self.more = reply.more
        self._entries = iter(entries_of(reply.entries))

    async def aclose(self) -> None:
        """End the call; the entries that were not taken yet are dropped."""
        self._ended = True
        self._entries = iter(())
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
