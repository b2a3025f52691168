"""The interface of a client's transport: `Channel` and its streams.

Code that makes calls depends on these two only, so that it works on any transport.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from shalekv_wire.status import Metadata


class ClientStream(Protocol):
    """A call whose messages are written and read one by one. It has begun.

    Cancelling a task that waits in `write` or `read` does not cancel the call. One task writes and
    one reads, at the same time or not.
    """

    async def wait_open(self) -> None:
        """Wait until there is a connection, on which `write` can send. Raises as `write`."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; returns when flow control has taken it.

        Raises `CallFailed` when the call is over.
        """
        ...

    async def done_writing(self) -> None:
        """Tell the server that no more messages follow. Raises as `write`."""
        ...

    async def read(self) -> bytes | None:
        """Return the next message; None when the call has ended with OK.

        Raises `CallFailed` when it has ended otherwise: with CANCELLED after `cancel`.
        """
        ...

    def cancel(self) -> None:
        """End the call, unless it is over; messages that were not read are dropped."""
        ...


class UnaryChannel(Protocol):
    """The part of a `Channel` that makes calls with one request and one reply."""

    @property
    def address(self) -> str:
        """The address of the server, HOST:PORT."""
        ...

    def unary(
        self, path: str, request: bytes, *, timeout_s: float, metadata: Metadata = ()
    ) -> Awaitable[bytes]:
        """Make a call with one request and one reply, which is returned. Raises `CallFailed`.

        `path` is `/SERVICE/METHOD`. Cancelling what waits for the reply cancels the call.
        """
        ...


class Channel(UnaryChannel, Protocol):
    """The connection to one address. It connects at its first call, and again when it is lost."""

    def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Awaitable[bytes]:
        """Make a call as `UnaryChannel`, with no deadline by default."""
        ...

    def stream(
        self, path: str, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> ClientStream:
        """Begin a call in which either side may send any number of messages."""
        ...

    def set_metadata(self, metadata: Metadata) -> None:
        """Send `metadata` with every call that begins from now on, beside that of the call.

        Raises ValueError, which does not repeat the values: a key or a value cannot be sent.
        """
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Connect, unless there is a connection.

        Raises `CallFailed` (UNAVAILABLE) when that fails, or takes longer than `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Close the connection: calls under way fail with `CallFailed` (CANCELLED)."""
        ...
