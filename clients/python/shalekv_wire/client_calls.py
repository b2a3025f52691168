"""The calls of a client, for asyncio: the reply of a unary call, and the messages of a stream."""

from __future__ import annotations

import asyncio
from collections import deque

from shalekv_wire.client_connection import NO_REPLY, ClientCall, Opener, UnaryCall
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import wake


class ReplyFuture(asyncio.Future[bytes]):
    """The reply of a unary call; cancelling it cancels the call."""

    def __init__(self, call: UnaryClientCall) -> None:
        """Wait for the reply to `call`."""
        super().__init__(loop=asyncio.get_running_loop())
        self.call: UnaryClientCall | None = call  # None: it is over

    def cancel(self, msg: object = None) -> bool:
        """Cancel the future, and with it the call."""
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.call is not None:
            self.call.cancel()
        return is_cancelled


class UnaryClientCall(UnaryCall):
    """A unary call whose reply is awaited."""

    __slots__ = ("future",)

    def __init__(
        self,
        channel: Opener,
        path: str,
        request: bytes,
        *,
        metadata: Metadata,
        deadline_s: float | None,
    ) -> None:
        """Begin a call; `future` gets the reply."""
        super().__init__(channel, path, request, metadata=metadata, deadline_s=deadline_s)
        self.future = ReplyFuture(self)

    def on_done(self) -> None:
        """Give the reply or the failure to the caller."""
        self.future.call = None  # no cycle of references keeps request and reply
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
            if self.failure.code is StatusCode.CANCELLED:
                self.future.exception()  # as a cancelled future, it need not be awaited
        elif self._reply is None:
            self.future.set_exception(CallFailed(StatusCode.INTERNAL, NO_REPLY))
        else:
            self.future.set_result(self._reply)


class StreamClientCall(ClientCall):
    """A call whose messages are written and read one by one: `ClientStream`."""

    __slots__ = ("_messages", "_opened", "_reader", "_writer")

    def __init__(
        self, channel: Opener, path: str, *, metadata: Metadata, deadline_s: float | None
    ) -> None:
        """Begin a call."""
        super().__init__(channel, path, metadata, deadline_s)
        self._messages: deque[bytes] = deque()  # that were not read
        self._opened: asyncio.Future[None] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def wait_open(self) -> None:
        """Wait until there is a stream for the call. Raises `CallFailed`."""
        while not self.id and not self.is_done:
            self._opened = self._opened or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._opened)
        self._check()

    async def write(self, message: bytes) -> None:
        """Send a message; returns when flow control has taken it. Raises `CallFailed`."""
        await self.wait_open()
        self.connection.sender.message(self, message)
        if self.unsent is not None:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
            self._check()

    async def done_writing(self) -> None:
        """Tell the server that no more messages follow. Raises `CallFailed`."""
        await self.wait_open()
        if not self.is_local_done and self.ending is None:
            self.connection.sender.end_data(self)

    async def read(self) -> bytes | None:
        """Return the next message; None when the call has ended with OK. Raises `CallFailed`."""
        while not self._messages:
            if self.is_done:
                if self.failure is not None:
                    raise self.failure
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        if not self._messages:
            self.acknowledge()
        return message

    def cancel(self) -> None:
        """End the call, unless it is over; messages that were not read are dropped."""
        self._messages.clear()
        super().cancel()

    def _check(self) -> None:
        if self.is_done:
            text = "the call is over"
            raise self.failure or CallFailed(StatusCode.CANCELLED, text)

    @property
    def wants_messages(self) -> bool:
        """Return whether no message waits to be read."""
        return not self._messages

    def on_opened(self) -> None:
        """Let the writer begin."""
        wake(self._opened)

    def on_message(self, message: bytes) -> None:
        """Keep the message until it is read."""
        if self.is_done:
            return
        self._messages.append(message)
        wake(self._reader)

    def on_sent(self) -> None:
        """Let the writer go on."""
        wake(self._writer)

    def on_done(self) -> None:
        """Wake whoever waits."""
        wake(self._opened)
        wake(self._reader)
        wake(self._writer)
