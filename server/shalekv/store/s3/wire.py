"""How a request of botocore goes over the wire: once, counted, and never silent for long.

aiohttp repeats what it takes for harmless when a kept connection turns out to be dead, and it
follows redirections. Here a conditional PUT is neither: its second copy would meet the first one's
object and report a rival, or bypass the count of what is paid for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp.payload import Payload

from shalekv.store.requests import RequestCounts, RequestKind

if TYPE_CHECKING:
    from aiohttp import AddrInfoType, ClientResponse, ClientSession, ClientTimeout
    from aiohttp.abc import AbstractStreamWriter

SLICE_BYTES = 256 * 1024  # what is handed to the transport at once
KEEPALIVE_S = 30  # of silence, after which the kernel asks whether the other end is still there
KEEPALIVE_PROBES = 4

Body = bytes | memoryview

# The client is shared by stores that count for themselves: a request belongs to whose task it is.
_counted: ContextVar[tuple[RequestCounts, RequestKind] | None] = ContextVar("counted", default=None)


@contextmanager
def counted_as(counts: RequestCounts, kind: RequestKind) -> Iterator[None]:
    """Count what this task sends to the store inside as `kind` in `counts`."""
    token = _counted.set((counts, kind))
    try:
        yield
    finally:
        _counted.reset(token)


def kept_alive_socket(address: AddrInfoType) -> socket.socket:
    """A socket that notices when the other end is gone, long before two hours have passed."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S // 2),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


class OneAttempt(AIOHTTPSession):
    """What carries botocore's requests: each is sent once, and counted."""

    _timeout: ClientTimeout

    async def send(self, request: Any) -> Any:
        """The reply; raises botocore's `HTTPClientError`."""
        counted = _counted.get()
        if counted is not None:
            counts, kind = counted
            counts.add(kind)
        return await super().send(request)

    async def _get_session(self, proxy_url: str | None) -> ClientSession:
        session: ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in the stubs
        session._retry_connection = False  # noqa: SLF001 - aiohttp has no public way to say it
        return cast("ClientSession", _Sender(session, self._timeout.sock_read))


class _Sender:
    """The one method of a session of aiohttp that botocore's requests need."""

    def __init__(self, session: ClientSession, silence_s: float | None) -> None:
        self._session = session
        self._silence_s = silence_s

    async def request(self, method: str, *, data: Any, **options: Any) -> ClientResponse:
        body = _SlicedBody(data, self._silence_s) if isinstance(data, Body) else data
        return await self._session.request(method, data=body, allow_redirects=False, **options)


class _SlicedBody(Payload):
    """Bytes that are sent slice by slice, so that others run between, without being copied.

    aiohttp watches over silence only while it waits for the reply; whoever stops reading what it
    is sent would hold the request for ever.
    """

    def __init__(self, data: Body, silence_s: float | None) -> None:
        super().__init__(data)
        self._view = memoryview(data)
        self._size = self._view.nbytes
        self._silence_s = silence_s

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._view, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for first in range(0, self._view.nbytes, SLICE_BYTES):
            async with asyncio.timeout(self._silence_s):
                await writer.write(self._view[first : first + SLICE_BYTES])
