"""Watches of a client: one stream for all, and every commit exactly once after any failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shalekv import errors as server_errors
from shalekv.v1 import kv_pb2
from shalekv_client import RetryPolicy
from shalekv_client.errors import (
    Abandoned,
    DeadlineExceeded,
    InvalidRequest,
    ShaleKVError,
    Unreachable,
    WalCollected,
    WatchTooSlow,
)
from shalekv_client.policies import MESSAGE_BYTES_MAX
from shalekv_client.routing.addresses import chosen_wire
from shalekv_client.routing.servers import ConnectionOptions, open_channel
from shalekv_client.watch import ChangeKind, Watch, WatchCommit, WatchProgress
from shalekv_client.watch_stream import WATCH, OnHeader, WatchMultiplexer
from shalekv_wire.calls import ClientStream
from tests.unit.client.watch_server import History, WatchServer

QUICK = RetryPolicy(attempts_max=3, backoff_initial_ms=1, backoff_max_ms=5)
NOWHERE = "127.0.0.1:1"


@asynccontextmanager
async def watching(
    *addresses: str, policy: RetryPolicy = QUICK, timeout_ms: int = 10_000
) -> AsyncIterator[WatchMultiplexer]:
    """Open watches at the first of the servers, or at the next one when a call has ended."""
    how = ConnectionOptions(MESSAGE_BYTES_MAX, wire=chosen_wire(None))
    channels = [open_channel(address, how) for address in addresses]
    attempts = 0

    async def open_call(_reason: ShaleKVError | None) -> tuple[str, ClientStream, OnHeader]:
        nonlocal attempts
        number = attempts % len(addresses)
        attempts += 1
        return addresses[number], channels[number].stream(WATCH), _ignore

    watches = WatchMultiplexer(
        open_call, address=addresses[0], policy=policy, timeout_ms=timeout_ms
    )
    try:
        yield watches
    finally:
        await watches.aclose()
        for channel in channels:
            await channel.close()


def _ignore(_header: kv_pb2.ReplyHeader) -> None:
    """Ignore headers, which matter only with several servers."""


def watch(
    watches: WatchMultiplexer,
    prefix: bytes = b"",
    *,
    from_seq: int = 0,
    consumer: str = "",
    buffered_bytes_max: int = 1 << 20,
) -> Watch:
    create = kv_pb2.WatchCreate(
        range=kv_pb2.KeyRange(prefix=prefix), start_seq=from_seq, consumer=consumer
    )
    return Watch(watches, create, buffered_bytes_max=buffered_bytes_max)


async def commits(it: Watch, count: int) -> list[tuple[int, list[bytes]]]:
    found = []
    async for event in it:
        if isinstance(event, WatchCommit):
            found.append((event.seq, [change.key for change in event.changes]))
        if len(found) == count:
            break
    return found


async def test_a_watch_reports_commits_from_its_opening_on() -> None:
    """Inside `async with` a watch delivers commits from its opening on, and none before."""
    history = History()
    await history.put(b"a")
    async with (
        WatchServer(history) as server,
        watching(server.address) as watches,
        watch(watches) as it,
    ):
        assert it.opened_at_seq == 2
        assert it.next_seq == 2
        await history.put(b"b", value=b"1")
        event = await anext(it)
    assert isinstance(event, WatchCommit)
    assert (event.seq, event.wal_id) == (2, 2)
    (change,) = event.changes
    assert (change.kind, change.key, change.value) == (ChangeKind.PUT, b"b", b"1")
    assert it.next_seq == 3


async def test_all_watches_travel_on_one_stream() -> None:
    """All watches share one stream, each gets its own commits, and the last one ends the stream."""
    history = History()
    async with WatchServer(history) as server, watching(server.address) as watches:
        async with watch(watches, b"a") as first, watch(watches, b"b") as second:
            await history.put(b"a1", b"b1")
            await history.put(b"b2")
            await history.put(b"a3")
            assert await commits(first, 2) == [(1, [b"a1"]), (3, [b"a3"])]
            assert await commits(second, 2) == [(1, [b"b1"]), (2, [b"b2"])]
            assert server.streams == 1
        await server.until(open_streams=0)
        async with watch(watches, b"a") as third:
            await history.put(b"a4")
            assert await commits(third, 1) == [(4, [b"a4"])]
        assert server.streams == 2


@pytest.mark.parametrize("turns", [0, 1, 10, 300])
async def test_a_watch_may_begin_while_the_stream_ends(turns: int) -> None:
    """A watch that is begun while the stream ends is opened, on that stream or another."""
    history = History()
    await history.put(b"a")
    async with (
        WatchServer(history) as server,
        watching(server.address, timeout_ms=30_000) as watches,
    ):
        for _ in range(10):
            async with watch(watches, from_seq=1) as it:
                assert await commits(it, 1) == [(1, [b"a"])]
            for _ in range(turns):
                await asyncio.sleep(0)
        await server.until(open_streams=0)


@pytest.mark.parametrize("cut_after", [3, 4, 5, 8])
async def test_broken_streams_are_replaced_and_every_commit_is_reported_once(
    cut_after: int,
) -> None:
    """Wherever a stream breaks, within a commit too, no commit is lost or repeated, and no
    error is raised.
    """
    history = History()
    expected = [
        (await history.put(b"k%d" % n, b"l", b"m"), [b"k%d" % n, b"l", b"m"]) for n in range(9)
    ]
    async with WatchServer(history) as first, WatchServer(history) as second:
        first.cut_after = second.cut_after = cut_after
        async with (
            watching(first.address, second.address) as watches,
            watch(watches, from_seq=1) as it,
        ):
            assert await commits(it, 9) == expected
        assert first.streams > 1
        assert second.streams >= 1


async def test_one_that_nobody_reads_is_parked_and_holds_nobody_up() -> None:
    """A watch beyond its bound is closed at the server, continues when it is read, and
    misses nothing.
    """
    history = History()
    async with (
        WatchServer(history) as server,
        watching(server.address) as watches,
        watch(watches, buffered_bytes_max=4_000) as idle,
        watch(watches) as busy,
    ):
        numbers = [await history.put(b"k", value=bytes(500)) for _ in range(30)]
        assert [seq for seq, _ in await commits(busy, 30)] == numbers
        assert idle.is_parked
        assert idle._events.held_bytes < 6_000  # noqa: SLF001 - a bound shows nowhere else
        assert [seq for seq, _ in await commits(idle, 30)] == numbers
        assert len(server.creates) > 2
        assert server.streams == 1


async def test_watches_of_a_collected_past_fail_with_the_oldest_number() -> None:
    """The error has the oldest seq at which a watch can begin; other watches of the stream
    continue.
    """
    history = History(oldest_seq=3)
    for _ in range(4):
        await history.put(b"k")
    async with (
        WatchServer(history) as server,
        watching(server.address) as watches,
        watch(watches) as other,
    ):
        with pytest.raises(WalCollected) as raised:
            await anext(watch(watches, from_seq=2))
        assert raised.value.oldest_seq == 3
        await history.put(b"k")
        assert await commits(other, 1) == [(5, [b"k"])]


async def test_a_watch_that_was_cut_reports_where_to_go_on() -> None:
    """Events before `WatchTooSlow` are delivered first, and the error has the next seq."""
    history = History()
    async with WatchServer(history) as server, watching(server.address) as watches:
        server.closures.append(server_errors.WatchTooSlow("not taken", next_seq=7))
        it = watch(watches, from_seq=1)
        with pytest.raises(WatchTooSlow) as raised:
            await it.opened()
        assert raised.value.next_seq == 7
        with pytest.raises(WatchTooSlow):
            await anext(it)


async def test_refusals_that_may_pass_are_waited_out() -> None:
    """After a transient refusal, streams and watches are opened again."""
    history = History()
    async with WatchServer(history) as server, watching(server.address) as watches:
        server.refusals.append(server_errors.Stopping("shutting down"))
        server.closures.append(server_errors.Overloaded("too many watches", retry_after_ms=1))
        async with watch(watches) as it:
            await history.put(b"a")
            assert await commits(it, 1) == [(1, [b"a"])]
        assert server.streams == 2
        assert len(server.creates) == 2


async def test_a_watch_that_cannot_be_opened_gives_up() -> None:
    """Without a server, opening fails after the policy's attempts; with a silent one, after
    the timeout.
    """
    async with watching(NOWHERE) as watches:
        with pytest.raises(Unreachable):
            await watch(watches).opened()
    async with WatchServer(History()) as server:
        server.is_silent = True
        async with watching(server.address, timeout_ms=1_000) as watches:
            with pytest.raises(DeadlineExceeded):
                await watch(watches).opened()


async def test_acknowledgements_reach_the_server_before_the_watch_is_closed() -> None:
    """The last acknowledgement arrives at the latest when the watch is closed, and again on
    a new stream.
    """
    history = History()
    async with (
        WatchServer(history) as first,
        WatchServer(history) as second,
        watching(first.address, second.address) as watches,
    ):
        async with watch(watches, consumer="mirror") as it:
            assert first.creates[0].consumer == "mirror"
            await history.put(b"a")
            assert await commits(it, 1) == [(1, [b"a"])]
            it.ack(1)
            it.ack(1)
            await first.until(requests=2)
            assert first.acks == [1]
            await first.stop()
            await second.until(requests=2)
            assert second.acks == [1]
            it.ack(5)
        assert second.acks == [1, 5]
        kinds = [request.WhichOneof("request") for request in second.requests]
        assert kinds == ["create", "ack", "ack", "cancel"]
        with pytest.raises(ValueError, match="consumer"):
            watch(watches).ack(1)


async def test_a_consumer_waits_until_its_name_is_free_again() -> None:
    """A watch that was open waits until the server has forgotten its last stream; a new one
    is refused.
    """
    taken = server_errors.InvalidRequest("create.consumer", "another watch is open for it")
    history = History()
    async with (
        WatchServer(history) as first,
        WatchServer(history) as second,
        watching(first.address, second.address) as watches,
    ):
        async with watch(watches, consumer="mirror") as it:
            second.closures += [taken] * 5
            await first.stop()
            await history.put(b"a")
            assert await commits(it, 1) == [(1, [b"a"])]
        second.closures.append(taken)
        with pytest.raises(InvalidRequest):
            await watch(watches, consumer="mirror").opened()


async def test_progress_is_reported_once_for_what_was_not_taken() -> None:
    """Consecutive progress events that were not taken are merged into one."""
    history = History()
    async with (
        WatchServer(history) as server,
        watching(server.address) as watches,
        watch(watches, b"a") as it,
        watch(watches, b"b") as other,
    ):
        for _ in range(5):
            await history.put(b"b")
        assert len(await commits(other, 5)) == 5
        await history.put(b"a")
        event = await anext(it)
        while isinstance(event, WatchProgress) and event.seq < 5:
            event = await anext(it)
        assert event == WatchProgress(5)
        assert await commits(it, 1) == [(6, [b"a"])]


async def test_closing_ends_the_iteration() -> None:
    """Closing a watch ends its iteration quietly; closing the client ends it with an error."""
    async with WatchServer(History()) as server, watching(server.address) as watches:
        first, second = watch(watches), watch(watches)
        await first.opened()
        await second.opened()
        reading = asyncio.create_task(first.read())
        failing = asyncio.create_task(second.read())
        await asyncio.sleep(0)
        await first.aclose()
        await first.aclose()
        assert await reading == []
        await watches.aclose()
        with pytest.raises(Abandoned):
            await failing
        await server.until(open_streams=0)
