"""Replies to reads of keys, as serialized messages.

A serialized message may be written in pieces, one after the other. So the header of a reply, which
is the same as long as the state of the engine is, is encoded once for each state, and what was
found is encoded behind it. The bytes are those that protobuf makes of the whole message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shalekv.errors import ReplyTooLarge
from shalekv.format.coding import CONTINUED, SHORT_MAX, varint
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.transaction import RESULT_FRAME_BYTES
from shalekv.read.engine import ReadEngine
from shalekv.server.replies.costs import HEADER_TAG, cost_field, cost_of, sent_by_running_task
from shalekv.server.replies.encoding import (
    EXPIRY_TAG,
    HIGH_SEQS,
    LOW_SEQS,
    SHORT_SEQS,
    EncodedPieces,
)
from shalekv.server.service import MakeHeader
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX
from shalekv.telemetry.prices import PriceList

NOT_FOUND_BYTES = 2  # size of an empty result in a reply
RESULTS_AT_ONCE = 1_000  # encoded before other tasks may run: about two milliseconds
# Makes a reply from its header and the newest entry of each key, which has no value if it
# was deleted, or has expired at the logical time, in ms, that the last argument returns.
MakeReply: TypeAlias = Callable[[bytes, Sequence[Entry | None], Callable[[], int]], bytes]
# Of a GetReply: field 2, which is true, 3, with a length, 4, 5 and 6, all numbers.
_FOUND, _VALUE_TAG, _SEQ_TAG, _EXPIRY_TAG = b"\x10\x01", b"\x1a", b"\x20", b"\x28"
_TTL_TAG = b"\x30"
_RESULT_TAG = b"\x12"  # field 2 of a BatchGetReply, with a length
_NO_RESULT = _RESULT_TAG + b"\0"
_RESULT_FOUND, _RESULT_VALUE_TAG = b"\x08\x01", b"\x12"  # its fields 1, which is true, and 2
_STALENESS_TAG = b"\x30"  # field 6 of a header, the last one; a number
_PUT = Kind.PUT

_GET_HEADS = EncodedPieces(lambda length: _FOUND + (_VALUE_TAG + varint(length) if length else b""))
_GET_LOW_SEQS = [_SEQ_TAG + low for low in CONTINUED]
_RESULT_LENGTHS = EncodedPieces(lambda length: _RESULT_TAG + varint(length))
_RESULT_HEADS = EncodedPieces(
    lambda length: _RESULT_FOUND + (_RESULT_VALUE_TAG + varint(length) if length else b"")
)


class EncodedHeaders:
    """The headers of the replies of one engine, encoded as the first field of a reply."""

    def __init__(self, engine: ReadEngine, make: MakeHeader, prices: PriceList) -> None:
        """Encode what `make` makes; `prices` are those of the store."""
        self._engine = engine
        self._make = make
        self._prices = prices
        self._state: tuple[int, int | None, int] | None = None  # the last one
        self._body = b""  # of that state, without staleness
        self._staleness_ms: int | None = None  # the last one of that state
        self._field = b""  # with it

    def encode(self, seq: int, wal_id: int | None, staleness_ms: int) -> bytes:
        """Return the header of the state at this commit: tag, length and message."""
        state = (seq, wal_id, self._engine.epoch)
        if state != self._state:
            header = self._make(seq, wal_id)
            header.staleness_ms = 0
            self._state = state
            self._body = header.SerializeToString()
            self._staleness_ms = None
        if staleness_ms != self._staleness_ms:
            staleness = _STALENESS_TAG + varint(staleness_ms) if staleness_ms else b""
            body = self._body + staleness
            self._field = HEADER_TAG + varint(len(body)) + body
            self._staleness_ms = staleness_ms
        return self._field

    def cost(self) -> bytes:
        """Return one more piece of a header: what the call of the running task has cost."""
        return cost_field(cost_of(self._prices, sent_by_running_task()))

    def telling_cost(self, make_reply: MakeReply) -> MakeReply:
        """Return what makes the same replies, with the cost of the call in their headers."""
        return lambda header, entries, now_ms: make_reply(header + self.cost(), entries, now_ms)


def get_reply(header: bytes, entries: Sequence[Entry | None], now_ms: Callable[[], int]) -> bytes:
    """Return a GetReply with the value of the one entry, if it has one."""
    (entry,) = entries
    if entry is None:
        return header
    _, seq, kind, value, expire_at_ms = entry
    if kind is not Kind.PUT or (expire_at_ms and expire_at_ms <= now_ms()):
        return header
    head, low_seq = _GET_HEADS[len(value)], _GET_LOW_SEQS[seq & SHORT_MAX]
    if seq > SHORT_MAX and not expire_at_ms:
        return b"".join((header, head, value, low_seq, HIGH_SEQS[seq >> 7]))  # copied once
    expiry = _EXPIRY_TAG + varint(expire_at_ms) if expire_at_ms else b""
    return b"".join((header, head, value, _SEQ_TAG, varint(seq), expiry))


def get_reply_without_value(
    header: bytes, entries: Sequence[Entry | None], now_ms: Callable[[], int]
) -> bytes:
    """Return a GetReply that says whether the one entry has a value, and how long it lives."""
    (entry,) = entries
    logical_ms = now_ms()
    if entry is None or not entry.is_visible(logical_ms):
        return header
    reply = b"".join((header, _FOUND, _SEQ_TAG, varint(entry.seq)))
    if not entry.expire_at_ms:
        return reply
    left_ms = entry.expire_at_ms - logical_ms
    return b"".join((reply, _EXPIRY_TAG, varint(entry.expire_at_ms), _TTL_TAG, varint(left_ms)))


def batch_get_reply(
    header: bytes, entries: Sequence[Entry | None], now_ms: Callable[[], int]
) -> bytes:
    """Return a BatchGetReply with the value of each entry that has one. Raises `ReplyTooLarge`."""
    reply = _BatchGetReply(header, len(entries), now_ms())
    reply.add(entries)
    return reply.encoded()


async def made_in_slices(
    make_reply: MakeReply,
    header: bytes,
    entries: Sequence[Entry | None],
    now_ms: Callable[[], int],
) -> bytes:
    """Return what `make_reply` returns; other tasks run after each `RESULTS_AT_ONCE`."""
    if len(entries) <= RESULTS_AT_ONCE:
        return make_reply(header, entries, now_ms)
    reply = _BatchGetReply(make_reply(header, (), now_ms), len(entries), now_ms())
    for first in range(0, len(entries), RESULTS_AT_ONCE):
        await asyncio.sleep(0)
        reply.add(entries[first : first + RESULTS_AT_ONCE])
    return reply.encoded()


class _BatchGetReply:
    """A reply to which results are added in their order."""

    def __init__(self, header: bytes, count: int, now_ms: int) -> None:
        """It will have `count` results, as of the logical time `now_ms`."""
        self._parts = [header]
        self._count = count
        self._now_ms = now_ms
        self._size_bytes = 0

    def add(self, entries: Sequence[Entry | None]) -> None:
        """Add a result for each entry. Raises `ReplyTooLarge`."""
        parts, now_ms = self._parts, self._now_ms
        lengths, heads, low_seqs, high_seqs = _RESULT_LENGTHS, _RESULT_HEADS, LOW_SEQS, HIGH_SEQS
        found_count = values_bytes = 0
        for entry in entries:  # calls no function of Python for a usual one
            if entry is None or entry[2] is not _PUT or 0 < entry[4] <= now_ms:
                parts.append(_NO_RESULT)
                continue
            _, seq, _, value, expire_at_ms = entry
            length = len(value)
            found_count += 1
            values_bytes += length
            head = heads[length]
            if seq > SHORT_MAX:
                tail = low_seqs[seq & SHORT_MAX] + high_seqs[seq >> 7]
            else:
                tail = SHORT_SEQS[seq]
            if expire_at_ms:
                tail += EXPIRY_TAG + varint(expire_at_ms)
            parts += lengths[len(head) + length + len(tail)], head, value, tail
        self._size_bytes += found_count * RESULT_FRAME_BYTES + values_bytes
        self._size_bytes += (len(entries) - found_count) * NOT_FOUND_BYTES
        if self._size_bytes > STREAM_MESSAGE_BYTES_MAX:
            message = (
                f"the results for these {self._count} keys pass the "
                f"{STREAM_MESSAGE_BYTES_MAX} bytes of one reply: ask for fewer keys at once"
            )
            raise ReplyTooLarge(message)

    def encoded(self) -> bytes:
        """Return the whole reply."""
        return b"".join(self._parts)
