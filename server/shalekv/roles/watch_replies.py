"""Replies of watches as bytes: a commit is encoded once, however many watches tell of it."""

from __future__ import annotations

from collections.abc import Iterator

from shalekv.protocol.entry import Entry, Kind
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX
from shalekv.v1 import kv_pb2
from shalekv.watch.change_event import Lack, Previous, SeenCommit

CHANGE_FRAME_BYTES = 16  # of a change in a commit: its tag and length
_COMMIT_TAG = b"\x22"  # field 4 of WatchReply, with a length
_LOW_BITS = 0x7F  # of each byte of a number of variable length
assert _COMMIT_TAG[0] >> 3 == kv_pb2.WatchReply.COMMIT_FIELD_NUMBER

_DELETE_RANGE = kv_pb2.WatchChange.KIND_DELETE_RANGE
_DELETE = kv_pb2.WatchChange.KIND_DELETE
_EXPIRED = kv_pb2.WatchChange.KIND_EXPIRED
_PUT = kv_pb2.WatchChange.KIND_PUT


def commit_replies(
    header: kv_pb2.ReplyHeader, watch_id: int, commit: SeenCommit, now_ms: int
) -> Iterator[bytes]:
    """The replies that tell of a commit: several if it does not fit into one message.

    Values before that have expired at `now_ms` are none. REQUIRES: none is `UNREAD`.
    """
    frame = kv_pb2.WatchReply(header=header, watch_id=watch_id).SerializeToString()
    for body in _bodies(commit, now_ms):
        # Fields of a message may stand one after the other: the commit is what many share.
        yield b"".join((frame, _COMMIT_TAG, _varint(len(body)), body))


def _bodies(commit: SeenCommit, now_ms: int) -> Iterator[bytes]:
    """The same commit as one message or more."""
    if commit.encoded is not None:
        yield commit.encoded
        return
    message = kv_pb2.WatchCommit(seq=commit.seq, wal_id=commit.wal_id)
    size_bytes = 0
    is_whole = True
    for change in _changes(commit, now_ms):
        change_bytes = change.ByteSize() + CHANGE_FRAME_BYTES
        if size_bytes and size_bytes + change_bytes > STREAM_MESSAGE_BYTES_MAX:
            message.more = True
            yield message.SerializeToString()
            message = kv_pb2.WatchCommit(seq=commit.seq, wal_id=commit.wal_id)
            size_bytes = 0
            is_whole = False
        message.changes.append(change)
        size_bytes += change_bytes
    message.more = commit.more
    body = message.SerializeToString()
    if is_whole:
        commit.encoded = body
    yield body


def _changes(commit: SeenCommit, now_ms: int) -> Iterator[kv_pb2.WatchChange]:
    if commit.previous is None:
        yield from map(_change, commit.changes)
        return
    for entry, previous in zip(commit.changes, commit.previous, strict=True):
        change = _change(entry)
        if entry.kind is not Kind.RANGE_TOMBSTONE:
            _set_previous(change, previous, now_ms)
        yield change


def _change(entry: Entry) -> kv_pb2.WatchChange:
    key, seq, kind, value, expire_at_ms = entry
    if kind is Kind.RANGE_TOMBSTONE:
        told = kv_pb2.Entry(key=key, seq=seq)
        return kv_pb2.WatchChange(kind=_DELETE_RANGE, entry=told, end=value)
    told = kv_pb2.Entry(key=key, value=value, seq=seq, expire_at_ms=expire_at_ms)
    if kind is Kind.PUT:
        return kv_pb2.WatchChange(kind=_PUT, entry=told)
    return kv_pb2.WatchChange(kind=_EXPIRED if expire_at_ms else _DELETE, entry=told)


def _set_previous(change: kv_pb2.WatchChange, previous: Previous, now_ms: int) -> None:
    """Tell the value before; one that does not fit beside the new one is not known."""
    if isinstance(previous, Lack):
        change.previous_unknown = True
        return
    if previous is None or not previous.is_visible(now_ms):
        return
    if change.ByteSize() + len(previous.value) > STREAM_MESSAGE_BYTES_MAX:
        change.previous_unknown = True
        return
    change.previous.key = previous.key
    change.previous.value = previous.value
    change.previous.seq = previous.seq
    change.previous.expire_at_ms = previous.expire_at_ms


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > _LOW_BITS:
        encoded.append(number & _LOW_BITS | ~_LOW_BITS & 0xFF)
        number >>= _LOW_BITS.bit_length()
    encoded.append(number)
    return bytes(encoded)
