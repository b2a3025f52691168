"""Invalid requests close their watch and not the stream; limits; progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.errors import InvalidRequest
from shalekv.v1 import kv_pb2
from tests.kit.constants import set_constants
from tests.kit.serving.watchers import watched

INVALID = 3
EXHAUSTED = 8
Header = kv_pb2.RequestHeader
KeyRange = kv_pb2.KeyRange


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"header": Header(min_seq=1)}, "create.header.min_seq"),
        ({"header": Header(max_staleness_ms=1)}, "create.header.max_staleness_ms"),
        ({"header": Header(snapshot_id=bytes(16))}, "create.header.snapshot_id"),
        ({"header": Header(read_level=kv_pb2.READ_LEVEL_COMMITTED)}, "create.header.read_level"),
        ({"range": KeyRange(start=b"b", end=b"a")}, "create.range.start"),
        ({"range": KeyRange(start=b"a", end=b"a")}, "create.range"),
        ({"range": KeyRange(start=b"a", prefix=b"a")}, "create.range.prefix"),
        ({"consumer": "n" * 129}, "consumer"),
    ],
)
async def test_bad_watch_is_closed_and_the_stream_goes_on(
    fields: dict[str, Any], field: str
) -> None:
    """An invalid watch is closed with the name of the wrong field; other watches go on."""
    async with watched() as cluster:
        client = cluster.client()
        client.create(1)
        await client.opened(1)
        client.create(2, **fields)
        closed = await client.closed()
        assert (closed.code, closed.metadata["field"]) == (INVALID, field)
        await cluster.writer.put(b"a")
        assert (await client.commit()).seq == 1


async def test_two_watches_with_one_id_are_closed() -> None:
    """A second watch with the id of an open one closes that: later requests would be ambiguous."""
    async with watched() as cluster:
        client = cluster.client()
        client.create(1)
        await client.opened(1)
        client.create(1, b"other")
        assert (await client.closed()).metadata["field"] == "create.watch_id"
        assert cluster.watches.status().watches == 0
        client.create(1)
        await client.opened(1)


async def test_unknown_watch_cannot_be_cancelled() -> None:
    """Cancelling an unknown watch is answered with INVALID_ARGUMENT for its id."""
    async with watched() as cluster:
        client = cluster.client()
        client.cancel(7)
        reply = await client.take()
        assert (reply.watch_id, reply.closed.code) == (7, INVALID)


async def test_acknowledgement_without_a_consumer() -> None:
    """Acknowledging a watch without a consumer closes it; an unknown watch is ignored."""
    async with watched() as cluster:
        client = cluster.client()
        client.ack(1, 9)
        client.create(1)
        await client.opened(1)
        client.ack(1, 1)
        assert (await client.closed()).metadata["field"] == "ack.watch_id"


async def test_cancelled_watch_reports_nothing_more() -> None:
    """After the reply that a watch is closed, no commit of it is sent, not even a queued one."""
    async with watched() as cluster:
        client = cluster.client()
        client.create(1)
        client.create(2, b"a")
        await client.opened(1)
        await client.opened(2)
        await cluster.writer.put(b"a")
        client.cancel(1)
        while cluster.watches.status().watches != 1:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0)
        replies = [await client.take() for _ in range(2)]
        assert [(each.watch_id, each.WhichOneof("event")) for each in replies] == [
            (2, "commit"),
            (1, "closed"),
        ]
        assert replies[1].closed == kv_pb2.OperationError()


async def test_empty_request_ends_the_stream() -> None:
    """A message without a request closes all watches and then ends the stream."""
    async with watched() as cluster:
        client = cluster.client()
        client.create(1)
        await client.opened(1)
        client.send(kv_pb2.WatchRequest())
        assert (await client.closed()).code == INVALID
        with pytest.raises(InvalidRequest):
            await client.take()


async def test_watches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a watch is refused with a retry delay, until another one ends."""
    set_constants(monkeypatch, {"shalekv.watch.stream:WATCHES_MAX": 2})
    async with watched() as cluster:
        one, other = cluster.client(), cluster.client()
        for client in (one, other):
            client.create(1)
            await client.opened(1)
        one.create(2)
        closed = await one.closed()
        assert (closed.code, closed.retry_delay_ms) == (EXHAUSTED, 1_000)
        other.cancel(1)
        await other.closed()
        one.create(3)
        await one.opened(3)


async def test_idle_watches_report_progress() -> None:
    """A watch without commits regularly reports how far the server has come."""
    async with watched(watching={"watch_progress_ms": 10}) as cluster:
        client = cluster.client()
        client.create(1, b"mine")
        await client.opened(1)
        seq = 0
        for _ in range(3):
            seq = (await cluster.writer.put(b"other")).header.seq
            while (reply := await client.take()).progress_seq < seq:
                assert reply.WhichOneof("event") == "progress_seq"
            assert reply.header.seq >= seq
            assert reply.header.role == kv_pb2.ROLE_WRITER


async def test_values_that_do_not_fit_are_unknown() -> None:
    """If two values do not fit into one message, only the new one is sent."""
    size = 2_500_000
    async with watched() as cluster:
        client = cluster.client()
        client.create(previous_value=True)
        await client.opened()
        for value in (b"a" * size, b"b" * size):
            await cluster.writer.put(b"k", value)
        await client.commit()
        change = (await client.commit()).changes[0]
        assert change.entry.value == b"b" * size
        assert change.previous_unknown
