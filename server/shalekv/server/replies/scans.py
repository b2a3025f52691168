"""The messages of a scan: where its entries are cut, and their bytes.

Messages are serialized here, from pieces. What a client has not read of them takes memory, which is
bounded for all scans: a scan waits for it, and is ended by `ReplyBuffer.end` to free its message.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from shalekv.clock import Clock
from shalekv.errors import StreamTooSlow
from shalekv.format.coding import SHORT_MAX, varint
from shalekv.protocol.entry import Entry
from shalekv.read.memory_budget import MemoryBudget, Share
from shalekv.server.replies.encoding import (
    EXPIRY_TAG,
    HIGH_SEQS,
    LOW_SEQS,
    SHORT_SEQS,
    EncodedPieces,
)
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2

# Size of an entry in a message beside key and value, at most: five tags, 5 + 3 + 5 bytes of
# lengths (of entry, key and value), and two numbers of up to 10 bytes.
ENTRY_FRAME_BYTES = 40
MESSAGE_COPIES = 2  # the message, and its bytes that the transport has not sent yet
# Fields 2 and 3 of a ScanReply, with lengths, and 4, which is true.
_ENTRY_LENGTHS = EncodedPieces(lambda length: b"\x12" + varint(length))
_TOKEN_TAG, _MORE = b"\x1a", b"\x20\x01"
# Fields 1 and 2 of an Entry, with lengths; there is none for an empty value.
_KEY_HEADS = EncodedPieces(lambda length: b"\x0a" + varint(length))
_VALUE_HEADS = EncodedPieces(lambda length: b"\x12" + varint(length) if length else b"")


class ScanMessage(NamedTuple):
    """A serialized ScanReply."""

    data: bytes
    has_token: bool


class _Limits:
    """The limits of a request, less what was taken of them."""

    def __init__(self, request: kv_pb2.ScanRequest) -> None:
        self.count: float = request.limit or math.inf
        self.bytes: float = request.limit_bytes or math.inf  # of keys and values

    @property
    def are_reached(self) -> bool:
        """Return whether no entry may follow."""
        return self.count <= 0 or self.bytes <= 0

    def allowed(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the first of the sizes of keys with values, as far as the limits allow."""
        if self.count < len(sizes):
            sizes = sizes[: int(self.count)]
        if self.bytes < math.inf:
            return sizes[: bisect_left([*accumulate(sizes)], self.bytes) + 1]
        return sizes

    def take(self, sizes: Sequence[int]) -> None:
        """Take entries of these sizes."""
        self.count -= len(sizes)
        self.bytes -= sum(sizes)


class _Message:
    """A message to which entries are added in their order."""

    def __init__(self, header: bytes, *, keys_only: bool) -> None:
        self._parts = [header]
        self._keys_only = keys_only
        self.size_bytes = 0  # accounted for its entries: at least their size

    def size_of(self, entry: Entry) -> int:
        """Return what is accounted for an entry."""
        value_bytes = 0 if self._keys_only else len(entry.value)
        return len(entry.key) + value_bytes + ENTRY_FRAME_BYTES

    def add(self, entries: Sequence[Entry], bytes_max: int, limits: _Limits) -> int:
        """Add the first entries, as many as fit and the limits allow; return how many.

        An empty message takes one of any size. REQUIRES: the limits are not reached.
        """
        if self._keys_only:
            entries = [entry._replace(value=b"") for entry in entries]
        wanted = [len(entry[0]) + len(entry[3]) for entry in entries]
        sizes = self._fitting(limits.allowed(wanted), bytes_max)
        parts, low_seqs, high_seqs = self._parts, LOW_SEQS, HIGH_SEQS
        lengths, key_heads, value_heads = _ENTRY_LENGTHS, _KEY_HEADS, _VALUE_HEADS
        # Calls no function of Python for a usual entry.
        for size, (key, seq, _, value, expire_at_ms) in zip(sizes, entries, strict=False):
            if seq > SHORT_MAX:
                tail = low_seqs[seq & SHORT_MAX] + high_seqs[seq >> 7]
            else:
                tail = SHORT_SEQS[seq]
            if expire_at_ms:
                tail += EXPIRY_TAG + varint(expire_at_ms)
            key_head, value_head = key_heads[len(key)], value_heads[len(value)]
            length = size + len(key_head) + len(value_head) + len(tail)
            parts += lengths[length] + key_head, key, value_head, value, tail
        self.size_bytes += sum(sizes) + ENTRY_FRAME_BYTES * len(sizes)
        limits.take(sizes)
        return len(sizes)

    def _fitting(self, sizes: Sequence[int], bytes_max: int) -> Sequence[int]:
        """Return the first of the sizes, as far as the message has space."""
        if self.size_bytes + sum(sizes) + ENTRY_FRAME_BYTES * len(sizes) <= bytes_max:
            return sizes
        ends = accumulate([size + ENTRY_FRAME_BYTES for size in sizes], initial=self.size_bytes)
        count = bisect_right([*ends], bytes_max) - 1
        return sizes[: max(count, 0 if self.size_bytes else 1)]

    def encoded(self, token: bytes = b"", *, has_more: bool = False) -> ScanMessage:
        """Return the message, with a page token if there is one."""
        if token:
            self._parts += _TOKEN_TAG, varint(len(token)), token
        if has_more:
            self._parts.append(_MORE)
        return ScanMessage(b"".join(self._parts), bool(token))


async def scan_messages(
    slices: AsyncIterable[list[Entry]],
    request: kv_pb2.ScanRequest,
    header: bytes,
    buffer: ReplyBuffer,
    *,
    clock: Clock,
    next_page: Callable[[bytes], bytes],
) -> AsyncGenerator[ScanMessage, None]:
    """Yield the replies to a scan. REQUIRES: `slices` hold visible entries in order.

    `header` is encoded as the first field of a reply. A message is cut before it exceeds the memory
    that `buffer` has for it; an entry that is larger gets a message of its own, and waits for
    memory. The last message says whether a limit of the request has ended the scan, and then has
    the page token that `next_page` makes from the last key; in a resumable scan every other message
    has one as well. Other tasks run between two slices, and no slice is read before the caller has
    taken the messages of the one before.

    Raises `Overloaded` and `StreamTooSlow`.
    """
    limits, keys_only = _Limits(request), request.keys_only
    message = _Message(header, keys_only=keys_only)
    last_key = b""
    with buffer:
        async for entries in slices:
            left = entries
            while left:
                if limits.are_reached:
                    last = message.encoded(next_page(last_key), has_more=True)
                    buffer.offer(message.size_bytes)
                    yield last
                    buffer.taken()
                    return
                if not message.size_bytes:
                    await buffer.begin(message.size_of(left[0]))
                count = message.add(left, buffer.bytes_max, limits)
                if count:
                    last_key = left[count - 1].key
                left = left[count:]
                if left and not limits.are_reached:  # the next one does not fit
                    full = message.encoded(next_page(last_key) if request.resumable else b"")
                    buffer.offer(message.size_bytes)
                    yield full
                    buffer.taken()
                    message = _Message(header, keys_only=keys_only)
            await clock.sleep_ms(0)
        buffer.offer(message.size_bytes)
        yield message.encoded()
        buffer.taken()


class ReplyBuffer:
    """Memory of one scan for the message that its client has not read yet."""

    def __init__(
        self,
        budget: MemoryBudget,
        *,
        message_bytes: int,
        wait_ms: int,
        close: Callable[[], Awaitable[None]],
        call: Call,
    ) -> None:
        """Take memory from `budget`. If the scan is ended to free memory, `close` stops its reads.

        After `close` the `call` is ended as well. `message_bytes` is the size of a message that is
        aimed at; `wait_ms` the longest wait for memory.
        """
        self._share = Share(budget)
        self._stalls = budget.stalls
        self._message_bytes = message_bytes
        self._wait_ms = wait_ms
        self._close = close
        self._call = call
        self._ended_by: StreamTooSlow | None = None
        self.bytes_max = 0  # size limit of the current message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def begin(self, needed_bytes: int) -> None:
        """Take memory for the next message, which needs at least `needed_bytes`.

        Raises `Overloaded`.
        """
        await self._share.take(
            MESSAGE_COPIES * needed_bytes,
            MESSAGE_COPIES * self._message_bytes,
            wait_ms=self._wait_ms,
        )
        self.bytes_max = min(self._share.taken_bytes // MESSAGE_COPIES, self._message_bytes)

    def offer(self, size_bytes: int) -> None:
        """Note that the client can read the message now, and give back what it does not need."""
        self._share.keep(MESSAGE_COPIES * size_bytes)
        if self._stalls is not None:
            self._stalls.offer(self, size_bytes)

    def taken(self) -> None:
        """Note that the client has read the message. Raises the error that has ended the scan."""
        if self._ended_by is not None:
            raise self._ended_by
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def end(self, error: StreamTooSlow) -> None:
        """Implement `Stream`. REQUIRES: a message waits to be read."""
        self._ended_by = error
        self._share.give_back()
        try:
            await self._close()
        finally:
            if self._call.end is not None:
                self._call.end(error)
