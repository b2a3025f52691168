"""A client for programs that make one call and end, such as a command of the command line.

`OneCallClient` has the data calls of `Client`. The first attempt of its first call needs no event
loop. When it fails, a `Client` goes on with the same operation as if that attempt had been its own,
so retries, the search for the writer and errors are the same, and a write is applied once.

    client = OneCallClient("127.0.0.1:7654", lambda: Client("127.0.0.1:7654"), timeout_ms=10_000)
    found = run(client.get(b"greeting"))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv_client.calls import DataCalls
from shalekv_client.errors import ShaleKVError
from shalekv_client.operations import At, Operation, UnaryCalls, in_context
from shalekv_client.policies import MESSAGE_BYTES_MAX
from shalekv_client.routing.idempotency import IdempotencyKeys
from shalekv_wire.blocking_client import BlockingChannel
from shalekv_wire.stream import Limits

if TYPE_CHECKING:  # slow to import, and needed by calls that fail only
    from shalekv_client.client import Client

ResultT = TypeVar("ResultT")

# A longer call is left to `Client`: after 20 s it gives up to connect, and later it asks a silent
# server for a sign of life.
TIMEOUT_MS_MAX = 20_000


class OneCallClient(DataCalls):
    """The data calls of a client; what else there is, `client` has. For `run` only."""

    def __init__(
        self,
        address: str | None,
        open_client: Callable[[], Client],
        *,
        timeout_ms: int,
        traceparent: str = "",
    ) -> None:
        """Create a client of the server at `address`, without TLS and access token.

        `traceparent` names the span that the calls belong to; empty: there is none.
        `open_client` is called in an event loop when a `Client` is needed, with the same timeout;
        without an `address`, it is needed for every call.
        """
        self._address = address
        self._open_client = open_client
        self._timeout_ms = timeout_ms
        self._traceparent = traceparent
        self._client: Client | None = None

    async def client(self) -> Client:
        """Return the `Client`, for all that one call cannot do."""
        if self._client is None:
            await _EventLoop()
            self._client, self._address = self._open_client(), None
        return self._client

    async def aclose(self) -> None:
        """Close the `Client`, if there is one."""
        if self._client is not None:
            await self._client.aclose()

    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        timeout_ms = timeout_ms or self._timeout_ms
        if self._traceparent:
            operation = operation._replace(traceparent=self._traceparent)
        address, self._address = self._address, None  # for one attempt
        is_large = len(operation.data) > MESSAGE_BYTES_MAX
        if address is None or is_large or timeout_ms > TIMEOUT_MS_MAX:
            return await (await self.client()).resume(operation, timeout_ms)
        deadline_s = time.monotonic() + timeout_ms / 1000.0
        operation = in_context(operation)
        channel = BlockingChannel(address, Limits(message_bytes_max=MESSAGE_BYTES_MAX))
        try:
            return await UnaryCalls(channel).call(operation, timeout_ms)
        except ShaleKVError as error:
            failed = error
        client = await self.client()
        left_ms = (deadline_s - time.monotonic()) * 1000.0
        return await client.resume(operation, left_ms, failed=failed)

    def _key(self, idempotency_key: bytes | None) -> bytes:
        return idempotency_key or IdempotencyKeys().next()

    def _min_seq(self) -> int:
        return 0

    def _staleness_ms(self, max_staleness_ms: int | None, at: At) -> int:  # noqa: ARG002 (no default)
        return max_staleness_ms or 0


class _EventLoop:
    """Suspends a coroutine once: it needs an event loop from here on."""

    def __await__(self) -> Generator[None]:
        yield


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine, the part before its first suspension without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: ResultT = ended.value
        return result
    import asyncio

    return asyncio.run(coroutine)
