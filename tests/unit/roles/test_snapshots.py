"""Snapshots, and scans that are resumed: one state at every server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Protocol, cast

import pytest

from shalekv.clock import LoopClock
from shalekv.core.snapshot import remove_snapshots
from shalekv.errors import (
    PageExpired,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.roles.open_views import ENDED_TTL_MS
from shalekv.roles.reader import Reader
from shalekv.roles.service import KvService
from shalekv.roles.snapshots import SnapshotAdmin
from shalekv.runtime import Runtime
from shalekv.settings import LimitSettings, ReadSettings, UrlSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.seeds import random_of
from tests.kit.serving.messages import delete, delete_range, put
from tests.kit.serving.roles import (
    CALL,
    Serving,
    pairs,
    serving,
)
from tests.kit.serving.sweeping import compact
from tests.sim.run import simulate
from tests.sim.world import World


async def test_snapshot_holds_what_was_acknowledged_behind_a_gap() -> None:
    """An object that landed ahead of its turn is acknowledged: the gap before it is waited for."""
    async with serving(max_parallel_writes=2) as writer:
        store = writer.store
        store.is_holding, begun = True, len(store.held)
        first = asyncio.ensure_future(writer.put(b"a"))
        held = await store.arrived(begun + 1)
        second = asyncio.ensure_future(writer.put(b"b"))
        (await store.arrived(begun + 2)).release()
        await second
        creating = asyncio.ensure_future(create(writer.admin.snapshots))
        await quiesce()
        assert not creating.done()
        held.release()
        await first
        info = await creating
        assert all(each.found for each in (await got(writer, at(info.id), b"a", b"b")).results)


async def test_objects_that_go_with_the_snapshot_are_not_missed() -> None:
    """Who has not heard yet that it was deleted, and finds an SST gone, is told that it is."""
    database = await Database.created()
    limits = LimitSettings(scan_message_bytes=1_024)
    many = [b"%05d" % number for number in range(1_000)]
    async with serving(database, limits=limits, fence_poll_ms=10) as writer:
        changes = [put(key, b"v" * 100) for key in many]
        await writer.ask(kv_pb2.WriteRequest(changes=changes))
        await compact(database)
        info = await create(writer.admin.snapshots)
        assert (await got(writer, at(info.id), many[0])).results[0].found
        listed = (await database.manifest()).leveled_ssts
        await database.edit(lambda manifest: remove_snapshots(manifest, {info.id}))
        await database.remove(*(names.level_name(each.id) for each in listed))
        for reading in (
            got(writer, at(info.id), many[500]),
            scanned(writer, at(info.id)),
        ):
            with pytest.raises(SnapshotNotFound):
                await reading


TTL_S = 3_600


class Serves(Protocol):
    """A writer or a replica."""

    @property
    def kv(self) -> KvService: ...


@asynccontextmanager
async def replica(database: Database, limits: LimitSettings | None = None) -> AsyncIterator[Reader]:
    settings = ReadSettings(
        database=UrlSettings(url="memory://test"), limits=limits or LimitSettings()
    )
    runtime = Runtime(LoopClock(), database.runtime().random, InlineWorkers())
    reader = await Reader.open(database.another_store(), settings=settings, runtime=runtime)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run())
        try:
            yield reader
        finally:
            reader.close()


async def create(
    admin: SnapshotAdmin, *, ttl_s: int = TTL_S, **fields: Any
) -> admin_pb2.SnapshotInfo:
    request = admin_pb2.CreateSnapshotRequest(ttl_s=ttl_s, **fields)
    return (await admin.create(request, CALL)).snapshot


def at(snapshot_id: bytes, **fields: Any) -> kv_pb2.RequestHeader:
    return kv_pb2.RequestHeader(snapshot_id=snapshot_id, **fields)


async def scanned(
    server: Serving | Serves, header: kv_pb2.RequestHeader, **fields: Any
) -> list[kv_pb2.ScanReply]:
    request = kv_pb2.ScanRequest(header=header, **fields)
    return await gathered(server.kv.scan(request, CALL))


async def got(
    server: Serving | Serves, header: kv_pb2.RequestHeader, *keys: bytes
) -> kv_pb2.BatchGetReply:
    answer = server.kv.batch_get(kv_pb2.BatchGetRequest(header=header, keys=keys), CALL)
    return answer if isinstance(answer, kv_pb2.BatchGetReply) else await answer


SMALL_MESSAGES = LimitSettings(scan_message_bytes=1_024)
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
    return random.choice([{}, {"limit": random.randint(1, 40)}, {"limit_bytes": 700}])


async def fill_levels(writer: Serving, random: Random, database: Database) -> None:
    """Keys in levels and memory, with deletes of all kinds above them."""
    keys = [b"%03d" % number for number in range(400)]
    await writer.ask(kv_pb2.WriteRequest(changes=[put(k, random.randbytes(60)) for k in keys]))
    await compact(database)
    await churn(writer, random, keys)


async def churn(writer: Serving, random: Random, keys: Sequence[bytes]) -> None:
    changed = [put(key, random.randbytes(50)) for key in random.sample(keys, 60)]
    deleted = [delete(key) for key in random.sample(keys, 30)]
    start = random.randrange(390)
    await writer.ask(kv_pb2.WriteRequest(changes=[*changed, *deleted]))
    emptied = delete_range(start=b"%03d" % start, end=b"%03d" % (start + 9))
    await writer.ask(kv_pb2.WriteRequest(changes=[emptied]))


@pytest.mark.parametrize("seed", range(2))
async def test_scan_of_a_snapshot_goes_on_at_any_server(seed: int) -> None:
    """Cut anywhere, resumed at the writer, a replica or the next writer, it is one scan."""
    random = random_of(f"snapshots/{seed}")
    database = await Database.created(seed)
    async with serving(database, limits=SMALL_MESSAGES, fence_poll_ms=10) as writer:
        await fill_levels(writer, random, database)
        info = await create(writer.admin.snapshots)
        header = at(info.id)
        async with replica(database, SMALL_MESSAGES) as reader:
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
    async with serving(database, limits=SMALL_MESSAGES) as writer:
        rest = await scanned(writer, header, page_token=first.page_token)
        assert pairs([first, *rest]) == whole


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
