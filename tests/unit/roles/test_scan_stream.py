"""The messages of a scan: where they are cut, and what the last one says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KEY_BYTES_MAX
from shalekv.engine.result_room import ResultRoom
from shalekv.errors import Overloaded
from shalekv.roles.scan_stream import ENTRY_FRAME_BYTES, MESSAGE_COPIES, scan_messages
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import YieldingClock
from tests.kit.inline_runtime import gathered

HEADER = kv_pb2.ReplyHeader(database_id=b"d" * 16, epoch=3, seq=7)
GREATEST = 2**64 - 1


def token(last_key: bytes) -> bytes:
    """The token of the next page."""
    return b"after " + last_key


def entry(key: bytes, value: bytes = b"v") -> Entry:
    """An entry of commit 7."""
    return Entry(key, 7, Kind.PUT, value)


async def _one_by_one(slices: list[list[Entry]]) -> AsyncIterator[list[Entry]]:
    for entries in slices:
        yield entries


def messages(
    slices: list[list[Entry]], *, message_bytes: int = 1 << 20, **request: object
) -> list[kv_pb2.ScanReply]:
    """The whole stream."""

    async def stream() -> list[kv_pb2.ScanReply]:
        scan_request = kv_pb2.ScanRequest(**request)  # type: ignore[arg-type]  # fields of a test
        clock = YieldingClock()
        replies = scan_messages(
            _one_by_one(slices),
            scan_request,
            HEADER,
            message_bytes=message_bytes,
            room=ResultRoom(1 << 30),
            wait_ms=0,
            clock=clock,
            next_page=token,
        )
        return await gathered(replies)

    return asyncio.run(stream())


def keys(reply: kv_pb2.ScanReply) -> list[bytes]:
    """The keys of a message."""
    return [each.key for each in reply.entries]


def test_message_is_cut_before_it_grows_too_large() -> None:
    """A message ends before the entry that would pass its size; every message tells the view."""
    one = 2 + ENTRY_FRAME_BYTES
    slices = [[entry(b"%d" % number) for number in range(5)]]
    replies = messages(slices, message_bytes=2 * one)
    assert [keys(reply) for reply in replies] == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert all(reply.header == HEADER for reply in replies)
    assert len(messages(slices, message_bytes=2 * one - 1)) == 5


def test_large_entry_stands_alone() -> None:
    """An entry that is larger than a message is sent alone, and not with its neighbours."""
    slices = [[entry(b"a"), entry(b"b", b"v" * 5_000), entry(b"c")]]
    replies = messages(slices, message_bytes=1_000)
    assert [keys(reply) for reply in replies] == [[b"a"], [b"b"], [b"c"]]


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from([1, 127, 128, 16_384]), st.sampled_from([0, 100, 128, 16_384])),
        min_size=1,
        max_size=50,
    ),
    message_bytes=st.integers(33_000, 400_000),
)
def test_message_is_within_its_size(sizes: list[tuple[int, int]], message_bytes: int) -> None:
    """As it is sent, no message passes its size by more than the header that it begins with."""
    entries = [
        Entry(b"k" * key_bytes, GREATEST, Kind.PUT, b"v" * value_bytes, GREATEST)
        for key_bytes, value_bytes in sizes
    ]
    replies = messages([entries], message_bytes=message_bytes)
    assert sum(len(reply.entries) for reply in replies) == len(entries)
    header_bytes = kv_pb2.ScanReply(header=HEADER).ByteSize()
    for reply in replies:
        assert reply.ByteSize() <= message_bytes + header_bytes


def test_frame_of_an_entry_is_bounded() -> None:
    """What an entry costs beside key and value is within what is counted for it, at any size."""
    for key_bytes, value_bytes in ((1, 0), (KEY_BYTES_MAX, 5 << 20)):
        key, value = b"k" * key_bytes, b"v" * value_bytes
        found = kv_pb2.Entry(key=key, value=value, seq=GREATEST, expire_at_ms=GREATEST)
        message_bytes = kv_pb2.ScanReply(entries=[found]).ByteSize()
        assert message_bytes - key_bytes - value_bytes <= ENTRY_FRAME_BYTES


def test_nothing_is_read_ahead() -> None:
    """A slice is merged when the caller has taken what came before, and never if he goes."""
    taken: list[int] = []

    async def slices() -> AsyncIterator[list[Entry]]:
        for number in range(5):
            taken.append(number)
            yield [entry(b"%d" % number, b"v" * 100)]

    async def two_messages() -> None:
        replies = scan_messages(
            slices(),
            kv_pb2.ScanRequest(),
            HEADER,
            message_bytes=1,
            room=ResultRoom(1 << 30),
            wait_ms=0,
            clock=YieldingClock(),
            next_page=token,
        )
        await anext(replies)
        await anext(replies)
        await replies.aclose()

    asyncio.run(two_messages())
    assert taken == [0, 1, 2]


async def test_messages_are_smaller_where_little_room_is_left() -> None:
    """Each takes what is left, gives it back when it was taken, and the last one at the end."""
    one = 2 + ENTRY_FRAME_BYTES
    room = ResultRoom(MESSAGE_COPIES * 3 * one)
    replies = scan_messages(
        _one_by_one([[entry(b"%d" % number) for number in range(6)]]),
        kv_pb2.ScanRequest(),
        HEADER,
        message_bytes=2 * one,
        room=room,
        wait_ms=0,
        clock=YieldingClock(),
        next_page=token,
    )
    sizes = [len((await anext(replies)).entries)]
    assert room.used_bytes == MESSAGE_COPIES * 2 * one
    others_bytes = room.take(MESSAGE_COPIES * 2 * one, 0)
    sizes.append(len((await anext(replies)).entries))
    room.give_back(others_bytes)
    sizes += [len(reply.entries) async for reply in replies]
    assert sizes == [2, 1, 2, 1]
    assert room.used_bytes == 0


async def test_a_large_value_waits_for_room() -> None:
    """And is refused when there is none in time."""
    room = ResultRoom(1 << 20)
    room.take(1 << 20, 0)
    replies = scan_messages(
        _one_by_one([[entry(b"k", b"v" * (1 << 19))]]),
        kv_pb2.ScanRequest(),
        HEADER,
        message_bytes=1_024,
        room=room,
        wait_ms=1,
        clock=YieldingClock(),
        next_page=token,
    )
    with pytest.raises(Overloaded):
        await anext(replies)
    assert room.used_bytes == 1 << 20
