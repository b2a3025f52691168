"""Snapshots, and scans that are resumed: one state at every server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import OutcomeUnknown, PageExpired, SnapshotNotFound, StoreUnavailable
from shalekv.format import names
from shalekv.protocol.snapshot import remove_snapshots
from shalekv.runtime import Runtime
from shalekv.server.reader import Reader
from shalekv.server.scans import ENDED_TTL_MS
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.settings import LimitSettings, ReaderConfig, UrlSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.serving.answers import answered, scan_of
from tests.kit.serving.roles import (
    CALL,
    HOUR_MS,
    Serving,
    delete,
    delete_range,
    pairs,
    put,
    serving,
)
from tests.kit.serving.sweeping import compact
from tests.kit.store import Request, nothing
from tests.kit.virtual_time import virtual_time, with_simulation
from tests.sim.simulation import Simulation


async def test_snapshot_holds_what_was_acknowledged_behind_a_gap() -> None:
    """A snapshot waits for the gap before an acknowledged object that landed ahead of its turn."""
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


@virtual_time()
@pytest.mark.parametrize("edit", ["create", "renew", "delete"])
async def test_outcome_is_unknown_when_the_store_fails_after_an_edit(edit: str) -> None:
    """A store that stops answering after an edit of the manifest does not hide that it was made."""
    async with serving(fence_poll_ms=HOUR_MS, open_timeout_ms=HOUR_MS) as writer:
        admin = writer.admin.snapshots
        if edit != "create":
            await create(admin, name="s")
        edits = len(writer.faulty.asked("create", names.MANIFEST_FOLDER))

        async def fail_after_edit(request: Request) -> None:
            if request.operation == "list" and edits < len(
                writer.faulty.asked("create", names.MANIFEST_FOLDER)
            ):
                raise StoreUnavailable("store", "list", request.name, "no answer")

        writer.faulty.before = fail_after_edit
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: create(admin, name="s"),
            "renew": lambda: admin.renew(admin_pb2.RenewSnapshotRequest(name="s", ttl_s=60), CALL),
            "delete": lambda: admin.delete(admin_pb2.DeleteSnapshotRequest(name="s"), CALL),
        }
        with pytest.raises(OutcomeUnknown, match="no answer"):
            await calls[edit]()
        writer.faulty.before = nothing
        listed = await admin.list(admin_pb2.ListSnapshotsRequest(), CALL)
        assert ("s" in [each.name for each in listed.snapshots]) == (edit != "delete")


async def test_objects_that_go_with_the_snapshot_are_not_missed() -> None:
    """A reader that finds an SST gone because its snapshot was deleted reports the deletion."""
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


@asynccontextmanager
async def replica(database: Database, limits: LimitSettings | None = None) -> AsyncIterator[Reader]:
    settings = ReaderConfig(
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
    server: Serving | Reader, header: kv_pb2.RequestHeader, **fields: Any
) -> list[kv_pb2.ScanReply]:
    request = kv_pb2.ScanRequest(header=header, **fields)
    return await gathered(scan_of(server.kv, request, CALL))


async def got(
    server: Serving | Reader, header: kv_pb2.RequestHeader, *keys: bytes
) -> kv_pb2.BatchGetReply:
    answer = server.kv.batch_get(kv_pb2.BatchGetRequest(header=header, keys=keys), CALL)
    return await answered(kv_pb2.BatchGetReply, answer)


SMALL_MESSAGES = LimitSettings(scan_message_bytes=1_024)
KEYS = [b"%03d" % number for number in range(400)]
Messages = AsyncGenerator[kv_pb2.ScanReply, None]


async def churn(writer: Serving, version: int) -> None:
    """Change and delete some keys, and empty a range."""
    changed = [put(key, b"%d" % version * 50) for key in KEYS[version::7]]
    await writer.ask(kv_pb2.WriteRequest(changes=changed))
    deleted = [delete(key) for key in KEYS[version + 3 :: 13]]
    emptied = delete_range(start=b"%03d" % (70 * version), end=b"%03d" % (70 * version + 9))
    await writer.ask(kv_pb2.WriteRequest(changes=[*deleted, emptied]))


async def one_message(
    server: Serving | Reader, header: kv_pb2.RequestHeader, token: bytes, **fields: Any
) -> kv_pb2.ScanReply:
    """The first message of a scan whose caller then goes away."""
    request = kv_pb2.ScanRequest(header=header, resumable=True, page_token=token, **fields)
    messages = scan_of(server.kv, request, CALL)
    message = await anext(messages)
    await messages.aclose()
    return message


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limits", [{}, {"limit": 7}, {"limit_bytes": 700}], ids=str)
@pytest.mark.parametrize(
    "key_range", [{}, {"prefix": b"1"}, {"start": b"077", "end": b"301"}], ids=str
)
async def test_scan_of_a_snapshot_goes_on_at_any_server(
    key_range: dict[str, bytes], limits: dict[str, int], *, reverse: bool
) -> None:
    """A scan resumed at the writer, a replica or the next writer after any message is one scan."""
    database = await Database.created()
    fields = {"range": kv_pb2.KeyRange(**key_range), "reverse": reverse}
    async with serving(database, limits=SMALL_MESSAGES, fence_poll_ms=10) as writer:
        await writer.ask(kv_pb2.WriteRequest(changes=[put(key, b"v" * 60) for key in KEYS]))
        await compact(database)
        await churn(writer, 1)
        info = await create(writer.admin.snapshots)
        header = at(info.id)
        whole = await scanned(writer, header, **fields)
        async with replica(database, SMALL_MESSAGES) as reader:
            servers: list[Serving | Reader] = [writer, reader]
            found, token = [], b""
            for number, server in enumerate(cycle(servers)):
                message = await one_message(server, header, token, **limits, **fields)
                assert message.header.seq == info.seq
                found.append(message)
                token = message.page_token
                if not token:
                    break
                if number == 1:
                    await churn(writer, 2)
            assert len(found) > 3
            assert pairs(found) == pairs(whole)
            assert len(reader.kv.scans.views) == len(writer.kv.scans.views) == 0
    async with serving(database, limits=SMALL_MESSAGES) as writer:
        rest = await scanned(writer, header, page_token=found[0].page_token, **fields)
        assert pairs([found[0], *rest]) == pairs(whole)


@with_simulation(seed=1)
async def test_view_of_a_resumable_scan_does_not_stay(sim: Simulation) -> None:
    """The view of a resumable scan that has ended is kept briefly, and dropped first; if its caller
    went away before the end, it is kept as long as that of any page.
    """
    limits = LimitSettings(scan_message_bytes=1_024, scan_view_ttl_ms=60_000, scan_view_count_max=2)
    async with serving(limits=limits) as writer:
        many = [put(b"%03d" % number, b"v" * 100) for number in range(50)]
        await writer.ask(kv_pb2.WriteRequest(changes=many))
        views = writer.kv.scans.views
        whole = await scanned(writer, kv_pb2.RequestHeader(), resumable=True)
        rest = await scanned(writer, kv_pb2.RequestHeader(), page_token=whole[-2].page_token)
        assert pairs(rest) == pairs(whole[-1:])  # its last message was lost on its way
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
        await sim.sleep_ms(ENDED_TTL_MS + 1)
        assert len(views) == 0
        request = kv_pb2.ScanRequest(resumable=True)
        messages = scan_of(writer.kv, request, CALL)
        first = await anext(messages)
        await sim.sleep_ms(100_000)  # its next message is not taken
        assert len(views) == 0
        await messages.aclose()
        assert len(views) == 1
        await sim.sleep_ms(59_000)
        rest = await scanned(writer, kv_pb2.RequestHeader(), page_token=first.page_token)
        assert pairs([first, *rest]) == pairs(whole)
