"""The messages of a scan: where they are cut, and the page tokens by which it continues."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import InvalidRequest, Overloaded, PageExpired
from shalekv.format.coding import crc32c
from shalekv.protocol.entry import KEY_BYTES_MAX, Entry, KeyRange, Kind
from shalekv.read.memory_budget import MemoryBudget
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import OpenView, ReadView
from shalekv.server.replies.scans import (
    ENTRY_FRAME_BYTES,
    MESSAGE_COPIES,
    ReplyBuffer,
    scan_messages,
)
from shalekv.server.requests import PageSeal, PageToken
from shalekv.server.scans import OpenScan
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2
from tests.kit.engine.commits import put, run_of
from tests.kit.engine.running_log import YieldingClock
from tests.kit.inline_runtime import gathered

HEADER = kv_pb2.ReplyHeader(database_id=b"d" * 16, epoch=3, seq=7)
GREATEST = 2**64 - 1
EVERYTHING = kv_pb2.ScanRequest()


def token(last_key: bytes) -> bytes:
    return b"after " + last_key


def entry(key: bytes, value: bytes = b"v") -> Entry:
    return Entry(key, 7, Kind.PUT, value)


async def nothing() -> None:
    """Stop no reads: nothing is read in these tests."""


async def _one_by_one(slices: list[list[Entry]]) -> AsyncIterator[list[Entry]]:
    for entries in slices:
        yield entries


async def stream(
    slices: AsyncIterator[list[Entry]],
    request: kv_pb2.ScanRequest = EVERYTHING,
    *,
    message_bytes: int,
    room: MemoryBudget,
    wait_ms: int = 0,
) -> AsyncGenerator[kv_pb2.ScanReply, None]:
    """The messages of a scan; their bytes are those that protobuf makes."""
    messages = scan_messages(
        slices,
        request,
        kv_pb2.ScanReply(header=HEADER).SerializeToString(),
        ReplyBuffer(room, message_bytes=message_bytes, wait_ms=wait_ms, close=nothing, call=Call()),
        clock=YieldingClock(),
        next_page=token,
    )
    async with aclosing(messages):
        async for data, has_token in messages:
            reply = kv_pb2.ScanReply.FromString(data)
            assert reply.SerializeToString(deterministic=True) == data
            assert bool(reply.page_token) == has_token
            yield reply


def keys(reply: kv_pb2.ScanReply) -> list[bytes]:
    return [each.key for each in reply.entries]


async def test_message_is_cut_before_it_grows_too_large() -> None:
    """A message ends before the entry that would exceed its size; every message has the header."""
    one, room = 2 + ENTRY_FRAME_BYTES, MemoryBudget(1 << 30)
    slices = [[entry(b"%d" % number) for number in range(5)]]
    replies = await gathered(stream(_one_by_one(slices), message_bytes=2 * one, room=room))
    assert [keys(reply) for reply in replies] == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert all(reply.header == HEADER for reply in replies)
    smaller = stream(_one_by_one(slices), message_bytes=2 * one - 1, room=room)
    assert len(await gathered(smaller)) == 5


def test_frame_of_an_entry_is_bounded() -> None:
    """The overhead of an entry of any size is at most `ENTRY_FRAME_BYTES`."""
    for key_bytes, value_bytes in ((1, 0), (KEY_BYTES_MAX, 5 << 20)):
        key, value = b"k" * key_bytes, b"v" * value_bytes
        found = kv_pb2.Entry(key=key, value=value, seq=GREATEST, expire_at_ms=GREATEST)
        message_bytes = kv_pb2.ScanReply(entries=[found]).ByteSize()
        assert message_bytes - key_bytes - value_bytes <= ENTRY_FRAME_BYTES


ENTRIES = st.builds(
    Entry,
    key=st.binary(min_size=1, max_size=150),
    seq=st.one_of(st.integers(1, 300), st.integers(1, GREATEST)),
    kind=st.just(Kind.PUT),
    value=st.binary(max_size=150),
    expire_at_ms=st.sampled_from([0, 0, 1, 300, GREATEST]),
)


@given(
    slices=st.lists(st.lists(ENTRIES, max_size=6), max_size=4),
    message_bytes=st.integers(1, 900),
    limit=st.sampled_from([0, 0, 1, 2, 5, 9]),
    limit_bytes=st.sampled_from([0, 0, 1, 100, 400]),
    keys_only=st.booleans(),
    resumable=st.booleans(),
)
async def test_messages_are_cut_where_they_were_one_by_one(
    slices: list[list[Entry]], message_bytes: int, **fields: Any
) -> None:
    """The messages, as protobuf makes them, if entries are looked at one after the other."""
    request = kv_pb2.ScanRequest(**fields)
    expected = [kv_pb2.ScanReply(header=HEADER)]
    total_bytes = size_bytes = 0
    last_key = b""
    for count, each in enumerate(chain.from_iterable(slices)):
        if 0 < request.limit <= count or 0 < request.limit_bytes <= total_bytes:
            expected[-1].more = True
            expected[-1].page_token = token(last_key)
            break
        value = b"" if request.keys_only else each.value
        own_bytes = len(each.key) + len(value)
        if size_bytes and size_bytes + own_bytes + ENTRY_FRAME_BYTES > message_bytes:
            if request.resumable:
                expected[-1].page_token = token(last_key)
            expected.append(kv_pb2.ScanReply(header=HEADER))
            size_bytes = 0
        expected[-1].entries.add(
            key=each.key, value=value, seq=each.seq, expire_at_ms=each.expire_at_ms
        )
        size_bytes += own_bytes + ENTRY_FRAME_BYTES
        total_bytes += own_bytes
        last_key = each.key
    room = MemoryBudget(1 << 30)
    found = stream(_one_by_one(slices), request, message_bytes=message_bytes, room=room)
    assert await gathered(found) == expected


async def test_nothing_is_read_ahead() -> None:
    """A slice is read after the caller has taken the messages before it, and not if it has gone."""
    taken: list[int] = []

    async def slices() -> AsyncIterator[list[Entry]]:
        for number in range(5):
            taken.append(number)
            yield [entry(b"%d" % number, b"v" * 100)]

    replies = stream(slices(), message_bytes=1, room=MemoryBudget(1 << 30))
    await anext(replies)
    await anext(replies)
    await replies.aclose()
    assert taken == [0, 1, 2]


async def test_messages_are_smaller_where_little_memory_is_left() -> None:
    """A message takes the memory that is left, and gives it back when it was read."""
    one = 2 + ENTRY_FRAME_BYTES
    room = MemoryBudget(MESSAGE_COPIES * 3 * one)
    slices = _one_by_one([[entry(b"%d" % number) for number in range(6)]])
    replies = stream(slices, message_bytes=2 * one, room=room)
    sizes = [len((await anext(replies)).entries)]
    assert room.used_bytes == MESSAGE_COPIES * 2 * one
    others_bytes = room.take(MESSAGE_COPIES * 2 * one, 0)
    sizes.append(len((await anext(replies)).entries))
    room.give_back(others_bytes)
    sizes += [len(reply.entries) async for reply in replies]
    assert sizes == [2, 1, 2, 1]
    assert room.used_bytes == 0


async def test_a_large_value_waits_for_memory() -> None:
    """A large value waits for memory, and is refused if there is none in time."""
    room = MemoryBudget(1 << 20)
    room.take(1 << 20, 0)
    slices = _one_by_one([[entry(b"k", b"v" * (1 << 19))]])
    replies = stream(slices, message_bytes=1_024, room=room, wait_ms=1)
    with pytest.raises(Overloaded):
        await anext(replies)
    assert room.used_bytes == 1 << 20


SEAL = PageSeal(b"d" * 16, "token:alice", b"secret", KeyRange(b"a", b"c"))
AT_VIEW = kv_pb2.ScanRequest()
AT_SNAPSHOT = kv_pb2.ScanRequest(header=kv_pb2.RequestHeader(snapshot_id=bytes(range(16))))
PAGES = [(AT_VIEW, PageToken(0x0123456789ABCDEF, b"a key")), (AT_SNAPSHOT, PageToken(None, b"a"))]
ALTERED = "was not given out for this scan"


def decode(data: bytes, request: kv_pb2.ScanRequest, seal: PageSeal = SEAL) -> PageToken:
    """Decode the token of a request that continues this scan."""
    going_on = kv_pb2.ScanRequest()
    going_on.CopyFrom(request)
    going_on.page_token = data
    return seal.decode(going_on)


def is_refused(data: bytes, request: kv_pb2.ScanRequest, seal: PageSeal = SEAL) -> bool:
    """Return whether the token is refused; the error is the same, whatever is wrong with it."""
    try:
        decode(data, request, seal)
    except InvalidRequest as error:
        return (error.field, error.problem) == ("page_token", ALTERED)
    return False


@pytest.mark.parametrize(("request_", "page"), PAGES)
def test_altered_tokens_are_refused(request_: kv_pb2.ScanRequest, page: PageToken) -> None:
    """A token with any single bit flipped, or of any other length, is refused."""
    data = SEAL.encode(page, request_)
    assert decode(data, request_) == page
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_refused(bytes(flipped), request_)
    for length in range(len(data)):
        assert is_refused(data[:length] or b"\0", request_)
    assert is_refused(data + b"\0", request_)


@pytest.mark.parametrize(("request_", "page"), PAGES)
def test_token_of_another_scan_is_refused(request_: kv_pb2.ScanRequest, page: PageToken) -> None:
    """A token is good for its database, caller, range, order, view and secret alone."""
    data = SEAL.encode(page, request_)
    fields: list[dict[str, Any]] = [
        {"database_id": b"e" * 16},
        {"principal": "token:bob"},
        {"principal": ""},
        {"secret": b"another"},
        {"keys": KeyRange(b"a", b"d")},
        {"keys": KeyRange(b"ac", b"")},
    ]
    assert all(is_refused(data, request_, replace(SEAL, **other)) for other in fields)
    for other in (kv_pb2.ScanRequest(reverse=True), kv_pb2.ScanRequest(keys_only=True)):
        other.MergeFrom(request_)
        assert is_refused(data, other)
    for snapshot_id in {b"", b"s" * 16, AT_SNAPSHOT.header.snapshot_id}:
        other = kv_pb2.ScanRequest(header=kv_pb2.RequestHeader(snapshot_id=snapshot_id))
        assert is_refused(data, other) == (snapshot_id != request_.header.snapshot_id)


@pytest.mark.parametrize("name", ["", "token:alice"])
def test_token_without_a_secret_has_expired_when_there_is_one(name: str) -> None:
    """A token that was given out before there was a policy is told from an altered one."""
    (request_, page), _ = PAGES
    before = replace(SEAL, principal=name, secret=b"")
    data = before.encode(page, request_)
    assert decode(data, request_, before) == page
    with pytest.raises(PageExpired):
        decode(data, request_)
    assert is_refused(before.encode(page, AT_SNAPSHOT), request_)


def test_token_of_version_0_7_has_expired() -> None:
    """A token of an earlier version, which was sealed by a CRC-32C, has expired."""
    rest = bytes((1, 0)) + SEAL.database_id + bytes(8) + bytes(16) + b"a key"
    with pytest.raises(PageExpired):
        decode(crc32c(rest).to_bytes(4, "little") + rest, AT_VIEW)


@pytest.mark.parametrize("key", [b"", b"A", b"c", b"d"])
def test_made_up_token_does_not_leave_the_range(key: bytes) -> None:
    """Anybody can make a token while there is no secret, but not for keys outside of the range."""
    seal = replace(SEAL, principal="", secret=b"")
    for request_, page in PAGES:
        assert is_refused(seal.encode(page._replace(last_key=key), request_), request_, seal)


class Scanning:
    """A scan of a view that nothing else refers to, with a slice for each of its three runs."""

    def __init__(self) -> None:
        self.may_come = asyncio.Event()
        self.may_come.set()
        view = ReadView(3, 0, tuple(run_of(seq, put(b"%d" % seq)) for seq in range(1, 4)))
        self.run: weakref.ref[MemoryRun] = weakref.ref(view.runs[-1])
        opened = OpenView(view, 0)
        self.scan = OpenScan(opened, self._slices(opened))

    async def _slices(self, opened: OpenView) -> AsyncGenerator[list[Entry], None]:
        for number in range(3):
            await self.may_come.wait()
            yield [*opened.view.runs[number].entries]

    async def keys(self) -> list[bytes]:
        return [entry.key for entry in await anext(self.scan)]


async def test_a_running_scan_ends_after_its_slice() -> None:
    """An expired scan returns the slice that is being read, and then raises."""
    it = Scanning()
    it.may_come.clear()
    reading = asyncio.create_task(it.keys())
    await asyncio.sleep(0)
    await it.scan.expire()
    it.may_come.set()
    assert await reading == [b"1"]
    assert it.run() is None
    with pytest.raises(PageExpired):
        await it.keys()
