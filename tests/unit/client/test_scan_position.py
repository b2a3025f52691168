"""The position of a scan: the request for the rest, for every way in which a call may break off."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from shalekv.v1 import kv_pb2
from shalekv_client.scan import ScanPosition

KEYS = [b"k%02d" % number for number in range(12)]
VALUE = b"12"
ENTRY_BYTES = 5


def served(
    request: kv_pb2.ScanRequest, message_entries: int, *, is_hasty: bool = False
) -> Iterator[kv_pb2.ScanReply]:
    """Answer as the documentation of the API demands for a resumable scan of `KEYS`. A
    server that `is_hasty` sends a message as soon as it is full, before it checks for more.
    """
    left = [key for key in KEYS if key > request.page_token]
    reply = kv_pb2.ScanReply()
    for count, key in enumerate(left):
        is_full = 0 < request.limit_bytes <= count * ENTRY_BYTES
        if is_full or 0 < request.limit <= count:
            reply.more, reply.page_token = True, left[count - 1]
            yield reply
            return
        if reply.entries and len(reply.entries) == message_entries:
            reply.page_token = left[count - 1]
            yield reply
            reply = kv_pb2.ScanReply()
        reply.entries.add(key=key, value=VALUE)
        if is_hasty and len(reply.entries) == message_entries and key != KEYS[-1]:
            reply.page_token = key
            yield reply
            reply = kv_pb2.ScanReply()
    yield reply


@given(
    limit=st.integers(0, 14),
    limit_bytes=st.integers(0, 70),
    message_entries=st.integers(1, 5),
    breaks=st.lists(st.integers(0, 4), max_size=12),
    is_hasty=st.booleans(),
)
def test_breaking_off_changes_nothing(
    limit: int, limit_bytes: int, message_entries: int, breaks: list[int], *, is_hasty: bool
) -> None:
    """Wherever calls break off, the entries and `more` are those of a single call."""
    request = kv_pb2.ScanRequest(limit=limit, limit_bytes=limit_bytes, resumable=True)
    whole = list(served(request, 100))
    place = ScanPosition(request, b"")
    found: list[bytes] = []
    left = list(breaks)
    while not place.is_at_end:
        messages_left = left.pop(0) if left else None
        replies = served(place.next_request(), message_entries, is_hasty=is_hasty)
        for number, reply in enumerate(replies):
            if number == messages_left or place.is_at_end:
                break
            found += [entry.key for entry in place.take(reply)]
    assert found == [entry.key for reply in whole for entry in reply.entries]
    assert place.more == whole[-1].more


def test_scan_that_is_not_resumable_ends_with_its_call() -> None:
    """Without page tokens in messages, the scan ends only at the end of the call."""
    place = ScanPosition(kv_pb2.ScanRequest(), b"token")
    assert place.next_request().page_token == b"token"
    place.take(kv_pb2.ScanReply(entries=[kv_pb2.Entry(key=b"k")]))
    assert (place.is_at_end, place.can_resume) == (False, False)
