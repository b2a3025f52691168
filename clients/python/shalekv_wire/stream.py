"""One call of an HTTP/2 connection, as far as both sides have it in common.

A `Stream` assembles the messages of the peer, and keeps what it could not send yet. Derived classes
say what to do with a message, an end, and a reset.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shalekv_wire import frames
from shalekv_wire.frames import ConnectionFault, ErrorCode
from shalekv_wire.sending import PREFIX_BYTES, Sender
from shalekv_wire.status import StatusCode

if TYPE_CHECKING:  # slow to import, and not needed by a client without an event loop
    import asyncio

MIB = 1024 * 1024
# Frames that cost the peer nothing: so many at once, and so many more a second. Clients whose calls
# time out by the hundred reset them all, and none of these frames costs more than a call.
ALLOWANCE_MAX = 20_000
ALLOWANCE_PER_S = 5_000
# A message that gzip has made much smaller costs us more than its sender: from the allowance of the
# connection, one for so many bytes.
INFLATION_MAX = 20
INFLATED_BYTES = 4 * 1024
STREAM_WINDOW = MIB  # bytes that a peer may send on a stream before they are read
# Frames that cost a peer's allowance as much as a stream that it resets before we have replied.
TASK_COST = 10
MESSAGE_OVERHEAD_BYTES = 64  # memory that a message takes beside its bytes

_LENGTH = struct.Struct(">I").unpack_from


@dataclass(slots=True)
class Limits:
    """Limits of a connection."""

    message_bytes_max: int = 4 * MIB
    metadata_bytes_max: int = 16 * 1024  # of the header of a call
    streams_max: int = 256  # calls of a connection at once
    received_bytes_max: int = 256 * MIB  # of incomplete and unread messages of all connections
    # Of replies that wait for clients, of all connections: beyond it, connections for which some
    # wait may begin no calls, and those that take next to nothing are closed.
    unsent_bytes_max: int = 256 * MIB


class ReceivedBytes:
    """Bytes of incomplete and unread messages, of all connections of a process."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        """Begin with none."""
        self.held = 0


class Allowance:
    """Budget of a peer for frames that cost it nothing: used by frames, refilled by time."""

    __slots__ = ("_left", "_now_s", "_refilled_s")

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` is a clock that does not go back."""
        self._now_s = now_s
        self._left = float(ALLOWANCE_MAX)
        self._refilled_s = now_s()

    def use(self, cost: float = 1.0) -> None:
        """Use some of it. Raises `ConnectionFault` when it is used up."""
        self._left -= cost
        if self._left < 0:
            now_s = self._now_s()
            more = ALLOWANCE_PER_S * (now_s - self._refilled_s)
            self._left = min(self._left + more, ALLOWANCE_MAX)
            self._refilled_s = now_s
            if self._left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames of no use")


class Owner(Protocol):
    """The connection of a stream."""

    is_server: bool
    sender: Sender
    limits: Limits
    received: ReceivedBytes
    allowance: Allowance

    def remove(self, stream: Stream) -> None:
        """Note that both sides of a stream have ended."""
        ...

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once, on both sides."""
        ...


class Stream(ABC):
    """One call, on either side. Derived classes say what to do with what comes in."""

    __slots__ = (
        "connection",
        "content_left",
        "encoding",
        "ending",
        "id",
        "is_local_done",
        "is_remote_done",
        "partial",
        "send_window",
        "unacknowledged_bytes",
        "unsent",
    )

    def __init__(
        self,
        connection: Owner,
        stream_id: int,
        encoding: str = "identity",
        content_left: int | None = None,
    ) -> None:
        """Open a stream, of what its peer has said of its messages."""
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.sender.initial_window
        self.unsent: deque[memoryview] | None = None
        self.ending: bytes | None = None
        self.partial: bytearray | None = None  # of a message that is not complete
        self.unacknowledged_bytes = 0  # received, and not given back to the peer's window
        self.is_remote_done = False  # the peer sends no more
        self.is_local_done = False  # nothing more is sent
        self.encoding = encoding  # of the messages of the peer
        self.content_left = content_left  # bytes that the peer has announced; None: it did not

    @abstractmethod
    def on_message(self, message: bytes) -> None:
        """Take a complete message."""
        ...

    @abstractmethod
    def on_end(self) -> None:
        """Note that the peer sends no more messages."""
        ...

    @abstractmethod
    def on_problem(self, code: StatusCode, text: str) -> None:
        """End the call with an error that the messages of the peer have caused."""
        ...

    @abstractmethod
    def on_closed(self, code: ErrorCode, text: str) -> None:
        """Note that the stream was reset, or its connection has ended, before both sides ended."""
        ...

    @abstractmethod
    def on_sent(self) -> None:
        """Note that nothing waits to be sent any more."""
        ...

    def on_local_end(self) -> None:
        """Note that this side has ended the stream."""
        self.is_local_done = True
        if self.is_remote_done:
            self.connection.remove(self)

    @property
    def reset_cost(self) -> int:
        """Cost to the peer's allowance of a call that it begins and then resets."""
        return 1

    @property
    def wants_messages(self) -> bool:
        """Return whether the peer may send more: no message waits to be read."""
        return True

    def on_pause(self) -> None:
        """Note the end of a DATA frame that does not end the stream."""
        if self.wants_messages:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Let the peer send as much as it has sent, if that is worth a frame."""
        if self.unacknowledged_bytes > STREAM_WINDOW // 2 and not self.is_remote_done:
            update = frames.window_update(self.id, self.unacknowledged_bytes)
            self.unacknowledged_bytes = 0
            self.connection.sender.control(update)

    def receive_data(self, data: bytes, begin: int, end: int) -> None:
        """Take the part of a DATA frame that is messages: `data[begin:end]`."""
        if self.content_left is not None:
            self.content_left -= end - begin
        if self.partial is not None:
            if not self.hold(end - begin):
                return
            self.partial += data[begin:end]
            data, begin, end = self._joined()
        while end - begin >= PREFIX_BYTES:
            size: int = _LENGTH(data, begin + 1)[0]
            if size > self.connection.limits.message_bytes_max:
                self._refuse(size)
                return
            stop = begin + PREFIX_BYTES + size
            if stop > end:
                break
            self._take(data[begin], data[begin + PREFIX_BYTES : stop])
            begin = stop
            if self.is_remote_done:  # ended meanwhile
                return
        if begin < end and self.hold(end - begin):
            self.partial = bytearray(data[begin:end])

    def _joined(self) -> tuple[bytes, int, int]:
        """Return the incomplete message for parsing, if it is complete by now; else nothing."""
        partial = self.partial
        assert partial is not None
        if len(partial) < PREFIX_BYTES:
            return b"", 0, 0
        size: int = _LENGTH(partial, 1)[0]
        if size <= self.connection.limits.message_bytes_max and len(partial) < PREFIX_BYTES + size:
            return b"", 0, 0
        data = bytes(partial)
        self.drop_partial()
        return data, 0, len(data)

    def hold(self, size: int) -> bool:
        """Count bytes that are kept for later; False: there are too many, and the call ends."""
        received = self.connection.received
        if received.held + size > self.connection.limits.received_bytes_max:
            text = "too many messages are incomplete or unread at this time"
            self.on_problem(StatusCode.RESOURCE_EXHAUSTED, text)
            return False
        received.held += size
        return True

    def drop_partial(self) -> None:
        """Forget the message that is not complete."""
        if self.partial is not None:
            self.connection.received.held -= len(self.partial)
            self.partial = None

    def _take(self, flag: int, message: bytes) -> None:
        if flag == 0:
            self.on_message(message)
        elif flag == 1 and self.encoding == "gzip":
            self._decompress(message)
        elif flag == 1:
            text = f"a compressed message, and the encoding of the call is {self.encoding}"
            self.on_problem(StatusCode.INTERNAL, text)
        else:
            self.on_problem(StatusCode.INTERNAL, f"{flag} is no flag of a message")

    def _decompress(self, message: bytes) -> None:
        limit = self.connection.limits.message_bytes_max
        inflater = zlib.decompressobj(wbits=31)
        try:
            plain = inflater.decompress(message, limit + 1)
        except zlib.error as error:
            self.on_problem(StatusCode.INTERNAL, f"a message is no gzip: {error}")
            return
        if self.connection.is_server and len(plain) > INFLATION_MAX * len(message):
            self.connection.allowance.use(len(plain) / INFLATED_BYTES)
        if len(plain) > limit:
            self._refuse(len(plain))
        elif not inflater.eof:
            self.on_problem(StatusCode.INTERNAL, "a message of gzip is cut off")
        else:
            self.on_message(plain)

    def _refuse(self, size: int) -> None:
        limit = self.connection.limits.message_bytes_max
        text = f"a message has more than {limit} bytes (message_bytes_max): at least {size}"
        self.on_problem(StatusCode.RESOURCE_EXHAUSTED, text)


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Let the task that waits for the future go on, if there is one."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
