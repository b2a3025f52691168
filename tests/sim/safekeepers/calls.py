"""gRPC over the simulated network, as the shipped links and the shipped adapter use it.

Channels and calls are those of `shalekv_wire.calls`. Bytes go through the real encoding, errors
through real statuses.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from shalekv.rpc.calls import Method, Unary
from shalekv_wire.status import DETAILS_KEY, CallFailed, Metadata, StatusCode
from shalekv_wire.trace_context import UNNAMED
from tests.sim.nodes import Node
from tests.sim.safekeepers.wires import RETRY_MS, Line, Listener, Pipe, Wires


class End(NamedTuple):
    """End of a call."""

    error: CallFailed | None = None


class _Open(NamedTuple):
    method: str


class _Reset(NamedTuple):
    """The client has cancelled the call."""


class State(enum.Enum):
    """The state of a channel."""

    IDLE = enum.auto()
    CONNECTING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()  # to connect; the next attempt may succeed


def unavailable(problem: str) -> CallFailed:
    return CallFailed(StatusCode.UNAVAILABLE, problem)


def cancelled() -> CallFailed:
    return CallFailed(StatusCode.CANCELLED, "the call was cancelled by the client")


class SimCall:
    """One call. The client's half is used by the links, the server's half runs the handler."""

    def __init__(self, line: Line | None, listener: Listener, method: str) -> None:
        """Begin the call; without a connection it has failed."""
        self._listener = listener
        self._line = line
        self._inbox: deque[bytes] = deque()
        self._end: End | None = None
        self._is_cancelled = False
        self._reader: asyncio.Future[None] | None = None
        self._served: _Served | None = None
        self._is_refused = False
        if line is None or not line.is_usable:
            self._line = None
            self._end = End(unavailable("there is no connection"))
            return
        line.streams[self] = None
        self._up: Pipe[Any] = Pipe(line.wires, line.client, line.server, self._arrive_at_server)
        self._down: Pipe[Any] = Pipe(line.wires, line.server, line.client, self._arrive_at_client)
        self._up.put(_Open(method))

    # The client.

    async def wait_open(self) -> None:
        """Does nothing: there is a connection, or it has failed."""

    async def write(self, message: bytes) -> None:
        """Send a message; waits while the other side reads none."""
        if self._is_over:
            raise self._failure()
        self._up.put(message)
        await self._up.until_writable()
        if self._is_cancelled or (self._end is not None and self._end.error is not None):
            raise self._failure()

    async def done_writing(self) -> None:
        """Does nothing: servers end the calls of which they read one request."""

    async def read(self) -> bytes | None:
        """The next message, or None at the end; raises what the call has failed with."""
        while True:
            if self._is_cancelled:
                raise cancelled()
            if self._inbox:
                self._down.was_read()
                return self._inbox.popleft()
            if self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def cancel(self) -> None:
        """End it from this side; pending reads and writes fail."""
        if self._is_over or self._line is None:
            return
        self._is_cancelled = True
        if self._line.wires.random.random() < 0.5:
            self._up.lose_some()
        self._up.put(_Reset())
        self._wake()
        self._down.shut()

    def _failure(self) -> CallFailed:
        if self._end is not None and self._end.error is not None:
            return self._end.error
        return cancelled() if self._is_cancelled else unavailable("the call is over")

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._end is not None

    def _arrive_at_client(self, item: bytes | End) -> None:
        if self._is_over:
            return
        if isinstance(item, End):
            self._end = item
            self._forget()
        else:
            self._inbox.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # The server.

    def _arrive_at_server(self, item: Any) -> None:
        if isinstance(item, _Open):
            if self._listener.node is not self._line_of.server or self._listener.methods is None:
                self._down.put(End(unavailable("nobody answers there")))
                return
            self._served = _Served(self._listener.methods, item.method, self._up, self._down)
        elif self._served is None:
            self._up.was_read()
        elif isinstance(item, _Reset):
            self._served.cancel()
            self._forget()
        else:
            self._served.take(item)

    # The connection.

    @property
    def _line_of(self) -> Line:
        assert self._line is not None
        return self._line

    def lost_at_client(self) -> None:
        if self._is_over:
            return
        self._end = End(unavailable("the connection is lost"))
        if self._line_of.wires.random.random() < 0.5:
            self._inbox.clear()
        self._up.shut()
        self._wake()

    def lost_at_server(self) -> None:
        self._down.shut()
        if self._served is not None:
            self._served.cancel()

    def sender_is_gone(self, node: Node) -> None:
        """The end of what it has sent may not arrive."""
        pipe = self._up if node is self._line_of.client else self._down
        if self._line_of.wires.random.random() < 0.5:
            pipe.lose_some()

    def _forget(self) -> None:
        self._line_of.streams.pop(self, None)


class _Served:
    """A call as the server has it: implements `ServerCall`."""

    peer = "sim"
    deadline_s = None  # calls have no deadline here, and show nothing of their caller
    certificate = b""
    authorization = ""
    names = UNNAMED
    is_admitted = False

    def __init__(
        self, methods: Mapping[str, Method], path: str, up: Pipe[Any], down: Pipe[Any]
    ) -> None:
        self.on_cancel: Callable[[], None] | None = None
        self._requests: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._up = up
        self._down = down
        self._is_over = False
        self._task = asyncio.get_running_loop().create_task(self._handle(methods[path]))

    def take(self, data: bytes) -> None:
        self._requests.append(data)
        self._arrived.set()

    def name_trace(self, trace_id: str) -> None:
        """Send nothing: no call in the simulation is traced."""

    def cancel(self) -> None:
        self._is_over = True
        self._task.cancel()
        if self.on_cancel is not None:
            self.on_cancel()

    def reply(self, message: bytes) -> None:
        if not self._is_over:
            self._down.put(message)
            self.end()

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        if self._is_over:
            return
        self._is_over = True
        if code is StatusCode.OK:
            self._down.put(End())
            return
        self._down.put(End(CallFailed(code, message, metadata=((DETAILS_KEY, details),))))

    def reset(self) -> None:
        self.cancel()

    async def write(self, message: bytes) -> None:
        """Send a reply; waits while the client reads none."""
        self._down.put(message)
        await self._down.until_writable()

    async def read(self) -> bytes:
        """Return the next message; a client never ends its side alone."""
        while not self._requests:
            self._arrived.clear()
            await self._arrived.wait()
        self._up.was_read()
        return self._requests.popleft()

    async def _handle(self, method: Method) -> None:
        call: Any = self  # has what the adapter uses of one
        if isinstance(method, Unary):
            method.handler(call, await self.read())
        else:
            with suppress(asyncio.CancelledError):  # the client is gone
                await method.handler(call)


class SimChannel:
    """A `shalekv_wire.calls.Channel` of one process to one machine."""

    def __init__(self, wires: Wires, client: Node, listener: Listener) -> None:
        self.address = listener.name
        self._wires = wires
        self._client = client
        self._listener = listener
        self._line: Line | None = None
        self._state = State.IDLE
        self._waiting: list[asyncio.Future[None]] = []

    def set_metadata(self, metadata: Metadata) -> None:
        assert not metadata

    async def wait_ready(self, timeout_s: float) -> None:
        if self._state is State.FAILED:
            self._state = State.IDLE
        self._connect_if_idle()
        try:
            async with asyncio.timeout(timeout_s):
                while self._state is not State.READY:
                    if self._state is State.FAILED:
                        raise unavailable("nobody answers there")
                    waiter: asyncio.Future[None] = self._wires.loop.create_future()
                    self._waiting.append(waiter)
                    await waiter
                    self._connect_if_idle()
        except TimeoutError:
            raise unavailable(f"no connection within {timeout_s} s") from None

    def stream(
        self, path: str, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> SimCall:
        assert timeout_s is None
        assert not metadata
        return SimCall(self._line, self._listener, path)

    async def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        call = self.stream(path, metadata=metadata)
        try:
            async with asyncio.timeout(timeout_s):
                with suppress(CallFailed):  # the reader gets the reason
                    await call.write(request)
                reply = await call.read()
        except TimeoutError:
            raise unavailable(f"no answer within {timeout_s} s") from None
        finally:
            call.cancel()
        assert reply is not None
        return reply

    async def close(self) -> None:
        if self._line is not None:
            self._line.lose_client()

    def _connect_if_idle(self) -> None:
        if self._state is State.IDLE:
            self._become(State.CONNECTING)
            self._call()

    def _call(self) -> None:
        delay_s = 2 * self._wires.draw_ms() / 1_000
        self._wires.loop.call_later(delay_s, self._called, context=self._client.context)

    def _called(self) -> None:
        node, wires = self._listener.node, self._wires
        is_there = self._listener.is_powered and not (node and wires.is_parted(self._client, node))
        if not is_there:  # calls again, as TCP does
            delay_s = RETRY_MS.high_ms * (0.5 + wires.random.random()) / 1_000
            wires.loop.call_later(delay_s, self._call_again, context=self._client.context)
        elif node is None or not node.alive or self._listener.methods is None:
            self._become(State.FAILED)
        else:
            self._line = wires.connect(self._client, node, self._lost)
            self._become(State.READY)

    def _call_again(self) -> None:
        if self._waiting:
            self._call()
        else:
            self._become(State.IDLE)

    def _lost(self) -> None:
        self._line = None
        self._become(State.IDLE)

    def _become(self, state: State) -> None:
        self._state = state
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
