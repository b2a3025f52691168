"""Scans that are cut anywhere and resumed: no gap, nothing twice, the same state (I7)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from random import Random
from typing import Any, cast

import pytest

from shalekv.errors import PageExpired
from shalekv.roles.open_views import ENDED_TTL_MS
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.messages import delete, delete_range, put
from tests.kit.serving.roles import CALL, Serving, pairs, serving
from tests.kit.serving.sweeping import compact
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.roles.snapshot_world import at, create, replica, scanned

LIMITS = LimitSettings(scan_message_bytes=1_024)
SCANS_COUNT = 30
Pairs = list[tuple[bytes, bytes]]
Messages = AsyncGenerator[kv_pb2.ScanReply, None]


def some_range(random: Random) -> dict[str, Any]:
    """A range in one of the ways in which it is said."""
    prefix = b"%d" % random.randrange(10)
    start, end = sorted(b"%03d" % random.randrange(400) for _ in range(2))
    ranges = [
        kv_pb2.KeyRange(),
        kv_pb2.KeyRange(prefix=prefix),
        kv_pb2.KeyRange(start=start, end=end),
        kv_pb2.KeyRange(start=start),
    ]
    return {
        "range": random.choice(ranges),
        "reverse": random.random() < 0.5,
        "keys_only": random.random() < 0.3,
    }


async def resumed(
    servers: Sequence[Any],
    header: kv_pb2.RequestHeader,
    random: Random,
    limits: dict[str, Any],
    **fields: Any,
) -> tuple[Pairs, set[int]]:
    """A scan that is cut after some message and resumed elsewhere, until it is at its end.

    What it has read, and the sequence numbers that it has told.
    """
    found: Pairs = []
    seqs: set[int] = set()
    token = b""
    for _ in range(10_000):
        request = kv_pb2.ScanRequest(
            header=header, resumable=True, page_token=token, **limits, **fields
        )
        server = random.choice(servers)
        messages = cast("Messages", server.kv.scan(request, CALL))
        is_cut = False
        async for message in messages:
            found += pairs([message])
            seqs.add(message.header.seq)
            token = message.page_token
            if token and random.random() < 0.3:
                is_cut = True
                break
        await messages.aclose()
        if not is_cut and not token:
            return found, seqs
        assert token
        assert message.entries
    raise AssertionError("it makes no progress")


def some_limits(random: Random) -> dict[str, Any]:
    """Limits of a page, or none."""
    return random.choice([{}, {"limit": random.randint(1, 40)}, {"limit_bytes": 700}])


async def fill(writer: Serving, random: Random, database: Database) -> None:
    """Keys in levels and memory, with deletes of all kinds above them."""
    keys = [b"%03d" % number for number in range(400)]
    await writer.ask(kv_pb2.WriteRequest(changes=[put(k, random.randbytes(60)) for k in keys]))
    await compact(database)
    await churn(writer, random, keys)


async def churn(writer: Serving, random: Random, keys: Sequence[bytes]) -> None:
    """Change a part of them."""
    changed = [put(key, random.randbytes(50)) for key in random.sample(keys, 60)]
    deleted = [delete(key) for key in random.sample(keys, 30)]
    start = random.randrange(390)
    await writer.ask(kv_pb2.WriteRequest(changes=[*changed, *deleted]))
    emptied = delete_range(start=b"%03d" % start, end=b"%03d" % (start + 9))
    await writer.ask(kv_pb2.WriteRequest(changes=[emptied]))


@pytest.mark.parametrize("seed", range(6))
async def test_scan_of_a_snapshot_goes_on_at_any_server(seed: int) -> None:
    """Cut anywhere, resumed at the writer, a replica or the next writer, it is one scan."""
    random = Random(seed)
    database = await Database.created(seed)
    async with serving(database, limits=LIMITS, fence_poll_ms=10) as writer:
        await fill(writer, random, database)
        info = await create(writer.admin.snapshots)
        header = at(info.id)
        async with replica(database, LIMITS) as reader:
            for number in range(SCANS_COUNT):
                fields = some_range(random)
                whole = pairs(await scanned(writer, header, **fields))
                limits = some_limits(random)
                found = await resumed((writer, reader), header, random, limits, **fields)
                assert found == (whole, {info.seq})
                if number % 10 == 0:
                    await churn(writer, random, [b"%03d" % each for each in range(400)])
            assert len(reader.kv.scans.views) == len(writer.kv.scans.views) == 0
        request = kv_pb2.ScanRequest(header=header, resumable=True)
        first = await anext(writer.kv.scan(request, CALL))
        whole = pairs(await scanned(writer, header))
    async with serving(database, limits=LIMITS) as writer:
        rest = await scanned(writer, header, page_token=first.page_token)
        assert pairs([first, *rest]) == whole


@pytest.mark.parametrize("seed", range(6))
async def test_scan_of_the_newest_state_goes_on_where_it_began(seed: int) -> None:
    """Cut anywhere while writes go on, it shows the state of its beginning to its end."""
    random = Random(seed)
    database = await Database.created(seed)
    async with serving(database, limits=LIMITS, fence_poll_ms=10) as writer:
        await fill(writer, random, database)
        for number in range(SCANS_COUNT):
            fields = some_range(random)
            info = await create(writer.admin.snapshots)
            whole = pairs(await scanned(writer, at(info.id), **fields))
            request = kv_pb2.ScanRequest(resumable=True, **fields)
            messages = cast("Messages", writer.kv.scan(request, CALL))
            first = await anext(messages)
            await messages.aclose()
            if number % 3 == 0:
                await churn(writer, random, [b"%03d" % each for each in range(400)])
                await compact(database)
            found = pairs([first])
            if first.page_token:
                rest = {"page_token": first.page_token}
                later = [*await scanned(writer, kv_pb2.RequestHeader(), **rest, **fields)]
                assert {reply.header.seq for reply in later} == {first.header.seq}
                found += pairs(later)
            assert found == whole
            limits = some_limits(random)
            now = pairs(await scanned(writer, kv_pb2.RequestHeader(), **fields))
            again, _ = await resumed((writer,), kv_pb2.RequestHeader(), random, limits, **fields)
            assert again == now


def test_view_of_a_resumable_scan_does_not_stay() -> None:
    """One that has come to its end is kept for moments, and is the first to make room.

    Where the caller went away before, it is kept for as long as that of any page.
    """

    async def main(world: World) -> None:
        limits = LimitSettings(
            scan_message_bytes=1_024, scan_view_ttl_ms=60_000, scan_view_count_max=2
        )
        async with serving(limits=limits) as writer:
            many = [put(b"%03d" % number, b"v" * 100) for number in range(50)]
            await writer.ask(kv_pb2.WriteRequest(changes=many))
            views = writer.kv.scans.views
            whole = await scanned(writer, kv_pb2.RequestHeader(), resumable=True)
            rest = await scanned(writer, kv_pb2.RequestHeader(), page_token=whole[-2].page_token)
            assert pairs(rest) == pairs(whole[-1:])  # whose last message was lost on its way
            ended = await scanned(writer, kv_pb2.RequestHeader(), resumable=True)
            page = await scanned(writer, kv_pb2.RequestHeader(), limit=1)
            await scanned(writer, kv_pb2.RequestHeader(), limit=1)
            with pytest.raises(PageExpired):
                await scanned(writer, kv_pb2.RequestHeader(), page_token=ended[0].page_token)
            await scanned(writer, kv_pb2.RequestHeader(), page_token=page[0].page_token)
            views.close()
            await scanned(writer, kv_pb2.RequestHeader(), resumable=True)
            await scanned(writer, kv_pb2.RequestHeader(), resumable=True, limit=1_000)
            assert len(views) == 2
            await world.sleep_ms(ENDED_TTL_MS + 1)
            assert len(views) == 0
            request = kv_pb2.ScanRequest(resumable=True)
            messages = cast("Messages", writer.kv.scan(request, CALL))
            first = await anext(messages)
            await world.sleep_ms(100_000)  # nobody takes it
            assert len(views) == 0
            await messages.aclose()
            assert len(views) == 1
            await world.sleep_ms(59_000)
            rest = await scanned(writer, kv_pb2.RequestHeader(), page_token=first.page_token)
            assert pairs([first, *rest]) == pairs(whole)

    simulate(1, main)
