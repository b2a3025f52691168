"""Serialized replies: the bytes are those that protobuf makes of the whole message."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import ReplyTooLarge
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.engine import ReadEngine
from shalekv.server.replies.gets import (
    EncodedHeaders,
    batch_get_reply,
    get_reply,
    get_reply_without_value,
    made_in_slices,
)
from shalekv.settings import MIB
from shalekv.telemetry.prices import OBJECTS
from shalekv.v1 import kv_pb2

NOW_MS = 1_000
U64 = st.integers(0, 2**64 - 1)
SEQS = st.one_of(st.integers(1, 300), st.integers(1, 2**64 - 1))  # commits are numbered from 1
ENTRIES = st.none() | st.builds(
    Entry,
    key=st.just(b"k"),
    seq=SEQS,
    kind=st.sampled_from([Kind.PUT, Kind.PUT, Kind.TOMBSTONE]),
    value=st.binary(max_size=200),
    expire_at_ms=st.sampled_from([0, 0, NOW_MS - 1, NOW_MS, NOW_MS + 1, 2**63]),
)
STATES = st.tuples(SEQS, st.none() | U64, st.integers(1, 3), U64)


@dataclass
class Epoch:
    """The part of an engine that headers need."""

    epoch: int = 1
    made: int = 0

    def make(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        self.made += 1
        return kv_pb2.ReplyHeader(
            database_id=bytes(16), epoch=self.epoch, seq=seq, wal_id=wal_id, staleness_ms=7
        )


def headers_of(engine: Epoch) -> EncodedHeaders:
    return EncodedHeaders(cast("ReadEngine", engine), engine.make, OBJECTS["s3"])


def now() -> int:
    return NOW_MS


def fields(entry: Entry | None) -> dict[str, Any]:
    """The fields of a result for this entry."""
    if entry is None or not entry.is_visible(NOW_MS):
        return {}
    return {
        "found": True,
        "value": entry.value,
        "seq": entry.seq,
        "expire_at_ms": entry.expire_at_ms,
    }


@given(states=st.lists(STATES, min_size=1, max_size=4), entries=st.lists(ENTRIES, max_size=4))
def test_replies_are_those_of_protobuf(
    states: list[tuple[int, int | None, int, int]], entries: list[Entry | None]
) -> None:
    """Whatever states follow each other, a reply has the header of its own."""
    engine = Epoch()
    headers = headers_of(engine)
    for seq, wal_id, epoch, staleness_ms in states:
        engine.epoch = epoch
        encoded = headers.encode(seq, wal_id, staleness_ms)
        header = engine.make(seq, wal_id)
        header.staleness_ms = staleness_ms
        for entry in entries:
            one = kv_pb2.GetReply(header=header, **fields(entry))
            assert get_reply(encoded, [entry], now) == one.SerializeToString()
            one.ClearField("value")
            one.ttl_ms = max(one.expire_at_ms - NOW_MS, 0)
            assert get_reply_without_value(encoded, [entry], now) == one.SerializeToString()
        results = [kv_pb2.BatchGetResult(**fields(entry)) for entry in entries]
        many = kv_pb2.BatchGetReply(header=header, results=results)
        assert batch_get_reply(encoded, entries, now) == many.SerializeToString()


async def test_a_large_reply_is_the_same() -> None:
    """However many results it has, and whatever their number is, it lets others run in between."""
    entry = Entry(b"k", 300, Kind.PUT, b"value", 0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(others())
        for count in (1, 2_999, 3_000, 3_001):
            entries = [entry if number % 3 else None for number in range(count)]
            reply = await made_in_slices(batch_get_reply, b"header", entries, now)
            assert reply == batch_get_reply(b"header", entries, now)
        running.cancel()
    assert turns >= 3 + 3 + 4
    large = [entry._replace(value=bytes(1_000))] * 5_000
    with pytest.raises(ReplyTooLarge, match="these 5000 keys"):
        await made_in_slices(batch_get_reply, b"", large, now)


def test_a_header_is_made_once_for_a_state() -> None:
    """A header is made again when commit, object or epoch differ, and not for another staleness."""
    engine = Epoch()
    headers = headers_of(engine)
    for staleness_ms in range(5):
        headers.encode(9, 1, staleness_ms)
    assert engine.made == 1
    headers.encode(9, 2, 0)
    engine.epoch = 2
    headers.encode(9, 2, 0)
    assert engine.made == 3


def test_a_reply_that_is_too_large_is_refused() -> None:
    """The bound counts all values."""
    entry = Entry(b"k", 1, Kind.PUT, bytes(MIB))
    assert len(batch_get_reply(b"", [entry] * 3, now)) > 3 * MIB
    with pytest.raises(ReplyTooLarge, match="these 4 keys"):
        batch_get_reply(b"", [entry] * 4, now)
