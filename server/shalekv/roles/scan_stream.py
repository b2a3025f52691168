"""Cutting a scan into messages: by size, by the limits of the request, and by turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Self

from shalekv.clock import Clock
from shalekv.errors import StreamTooSlow
from shalekv.protocol.entry import Entry
from shalekv.read.memory_budget import ResultRoom, Share
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2

# What an entry costs in a message beside key and value, at most: five tags, 5 + 3 + 5 bytes of
# lengths (of entry, key and value), and two numbers of up to 10 bytes.
ENTRY_FRAME_BYTES = 40
MESSAGE_COPIES = 2  # as a message, and as the bytes that the transport has not sent yet


async def scan_messages(
    slices: AsyncIterable[list[Entry]],
    request: kv_pb2.ScanRequest,
    header: kv_pb2.ReplyHeader,
    outlet: Outlet,
    *,
    clock: Clock,
    next_page: Callable[[bytes], bytes],
) -> AsyncGenerator[kv_pb2.ScanReply, None]:
    """The replies to a scan. REQUIRES: `slices` hold visible entries in order.

    A message is cut before it passes what `outlet` has room for; an entry that is larger stands
    alone, and waits for room. The last message tells whether a limit has ended the scan, and then
    has the token that `next_page` makes of the last key; of a scan that is resumable all others
    have one, too. Other tasks run between two slices, and nothing is read ahead of what the caller
    has taken. Raises `Overloaded` and `StreamTooSlow`.
    """
    reply = kv_pb2.ScanReply(header=header)
    reply_bytes = count = total_bytes = 0
    last_key = b""
    with outlet:
        async for entries in slices:
            for entry in entries:
                if _is_ended(request, count, total_bytes):
                    reply.more = True
                    reply.page_token = next_page(last_key)
                    outlet.offer(reply_bytes)
                    yield reply
                    outlet.taken()
                    return
                value = b"" if request.keys_only else entry.value
                size_bytes = len(entry.key) + len(value) + ENTRY_FRAME_BYTES
                if reply_bytes and reply_bytes + size_bytes > outlet.bytes_max:
                    if request.resumable:
                        reply.page_token = next_page(last_key)
                    outlet.offer(reply_bytes)
                    yield reply
                    outlet.taken()
                    reply, reply_bytes = kv_pb2.ScanReply(header=header), 0
                if not reply_bytes:
                    await outlet.begin(size_bytes)
                reply.entries.add(
                    key=entry.key, value=value, seq=entry.seq, expire_at_ms=entry.expire_at_ms
                )
                reply_bytes += size_bytes
                last_key = entry.key
                count += 1
                total_bytes += len(entry.key) + len(value)
            await clock.sleep_ms(0)
        outlet.offer(reply_bytes)
        yield reply
        outlet.taken()


class Outlet:
    """Memory that one scan holds for its client: room for one message after the other."""

    def __init__(
        self,
        room: ResultRoom,
        *,
        message_bytes: int,
        wait_ms: int,
        close: Callable[[], Awaitable[None]],
        call: Call,
    ) -> None:
        """When it is ended for others, it closes what is read by `close`, and then the `call`."""
        self._share = Share(room)
        self._stalls = room.stalls
        self._message_bytes = message_bytes
        self._wait_ms = wait_ms
        self._close = close
        self._call = call
        self._ended_by: StreamTooSlow | None = None
        self.bytes_max = 0  # of the message that was begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def begin(self, needed_bytes: int) -> None:
        """Take room for the next message, which begins with so many bytes."""
        await self._share.take(
            MESSAGE_COPIES * needed_bytes,
            MESSAGE_COPIES * self._message_bytes,
            wait_ms=self._wait_ms,
        )
        self.bytes_max = min(self._share.taken_bytes // MESSAGE_COPIES, self._message_bytes)

    def offer(self, size_bytes: int) -> None:
        """The message has become so large, and the client may take it."""
        self._share.keep(MESSAGE_COPIES * size_bytes)
        if self._stalls is not None:
            self._stalls.offer(self, size_bytes)

    def taken(self) -> None:
        """The client has taken the message. Raises what has ended the scan meanwhile."""
        if self._ended_by is not None:
            raise self._ended_by
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def end(self, error: StreamTooSlow) -> None:
        """Implements `Stream`. REQUIRES: a message waits to be taken."""
        self._ended_by = error
        self._share.give_back()
        try:
            await self._close()
        finally:
            if self._call.end is not None:
                self._call.end(error)


def _is_ended(request: kv_pb2.ScanRequest, count: int, total_bytes: int) -> bool:
    """Whether a limit of the request is reached."""
    by_count = 0 < request.limit <= count
    by_bytes = 0 < request.limit_bytes <= total_bytes
    return by_count or by_bytes
