"""The calls about snapshots, and reads at them, at a writer and at its replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.core.snapshot import remove_snapshots
from shalekv.errors import (
    ShaleError,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.messages import delete_range, put
from tests.kit.serving.roles import (
    CALL,
    Serving,
    pairs,
    serving,
)
from tests.kit.serving.sweeping import compact
from tests.unit.roles.snapshot_world import at, create, got, replica, scanned

KEYS = [b"%03d" % number for number in range(50)]


async def fill(writer: Serving, value: bytes, count: int = len(KEYS)) -> None:
    """All keys, in one commit."""
    await writer.ask(kv_pb2.WriteRequest(changes=[put(key, value) for key in KEYS[:count]]))


async def test_snapshot_shows_what_was_there_in_every_process() -> None:
    """Gets, batches and scans at the writer, at a replica, and at the next writer are alike."""
    database = await Database.created()
    async with serving(database, fence_poll_ms=10) as writer:
        await fill(writer, b"1")
        await compact(database)
        await writer.delete(KEYS[0])
        await writer.ask(kv_pb2.WriteRequest(changes=[delete_range(start=KEYS[1], end=KEYS[3])]))
        await writer.put(b"with a life", ttl_ms=1_000_000)
        info = await create(writer.admin.snapshots, name="named")
        expected = [(key, b"1") for key in KEYS[3:]] + [(b"with a life", b"v")]
        await fill(writer, b"2")
        await compact(database)
        await writer.put(b"later")
        async with replica(database) as reader:
            for server in (writer, reader):
                await check(server, info, expected)
    async with serving(database) as writer:
        await check(writer, info, expected)


async def check(
    server: Any, info: admin_pb2.SnapshotInfo, expected: list[tuple[bytes, bytes]]
) -> None:
    """Every kind of read at the snapshot."""
    for reverse in (False, True):
        replies = await scanned(server, at(info.id), reverse=reverse)
        assert pairs(replies) == (expected[::-1] if reverse else expected)
        assert {reply.header.seq for reply in replies} == {info.seq}
    reply = await got(server, at(info.id), *(key for key, _ in expected), KEYS[0], b"later")
    assert [each.value for each in reply.results[:-2]] == [value for _, value in expected]
    assert [each.found for each in reply.results[-2:]] == [False, False]
    answer = server.kv.get(kv_pb2.GetRequest(header=at(info.id), key=KEYS[5]), CALL)
    one = await answer
    assert (one.found, one.value) == (True, b"1")
    for header in (reply.header, one.header):
        assert (header.seq, header.staleness_ms) == (info.seq, 0)


async def test_snapshot_that_a_replica_makes_holds_what_the_writer_has_acknowledged() -> None:
    """Also what the replica has not applied yet: it is made of what the store has."""
    database = await Database.created()
    async with serving(database) as writer, replica(database) as reader:
        for number in range(5):
            value = b"%d" % number
            acknowledged = await writer.put(b"k", value)
            info = await create(reader.admin.snapshots)
            assert info.seq >= acknowledged.header.seq
            assert (await got(reader, at(info.id), b"k")).results[0].value == value
            assert (await got(writer, at(info.id), b"k")).results[0].value == value


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


async def delete(writer: Serving, **fields: Any) -> None:
    """Delete a snapshot."""
    await writer.admin.snapshots.delete(admin_pb2.DeleteSnapshotRequest(**fields), CALL)


async def named(writer: Serving) -> list[str]:
    """The names of all snapshots that have one."""
    reply = await writer.admin.snapshots.list(admin_pb2.ListSnapshotsRequest(), CALL)
    return [each.name for each in reply.snapshots if each.name]


async def test_scan_ends_with_an_error_when_its_snapshot_goes() -> None:
    """In the middle of a scan, at the next look, and never as if that were all."""
    database = await Database.created()
    limits = LimitSettings(scan_message_bytes=1_024)
    async with serving(database, limits=limits, fence_poll_ms=10) as writer:
        many = [put(b"%05d" % number, b"v" * 100) for number in range(1_000)]
        await writer.ask(kv_pb2.WriteRequest(changes=many))
        info = await create(writer.admin.snapshots)
        request = kv_pb2.ScanRequest(header=at(info.id))
        messages = writer.kv.scan(request, CALL)
        first = await anext(messages)
        assert first.entries
        await delete(writer, id=info.id)
        seen = len(first.entries)
        failed: ShaleError | None = None
        try:
            async for message in messages:
                seen += len(message.entries)
        except SnapshotNotFound as error:
            failed = error
        assert failed is not None
        assert seen < len(many)


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
