"""The calls about snapshots, and reads at them, at a writer and at its replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.core.snapshot import NEVER, remove_snapshots
from shalekv.errors import (
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    ShaleError,
    SnapshotExists,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.roles.service import Call
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.messages import delete_range, put
from tests.kit.serving.roles import (
    CALL,
    LINEARIZABLE,
    MEMORY,
    UNCOMMITTED,
    Serving,
    pairs,
    serving,
)
from tests.unit.roles.snapshot_world import at, create, got, replica, scanned
from tests.unit.roles.test_records_in_levels import compact

KEYS = [b"%03d" % number for number in range(50)]
DAY_S = 86_400


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


async def test_level_of_a_read_says_nothing_at_a_snapshot() -> None:
    """It is durable state that does not change: any level is answered, by a replica, too."""
    database = await Database.created()
    async with serving(database) as writer, replica(database) as reader:
        await fill(writer, b"1")
        info = await create(writer.admin.snapshots)
        await writer.put(KEYS[0], b"2", durability=MEMORY)
        for server in (writer, reader):
            for level in (LINEARIZABLE, UNCOMMITTED):
                reply = await got(server, at(info.id, read_level=level), KEYS[0])
                assert reply.results[0].value == b"1"
                replies = await scanned(server, at(info.id, read_level=level), limit=1)
                assert pairs(replies) == [(KEYS[0], b"1")]


async def test_commit_that_a_snapshot_will_never_hold() -> None:
    """A `min_seq` behind it is a mistake, told at once; one that it holds is no demand."""
    async with serving() as writer:
        await fill(writer, b"1")
        info = await create(writer.admin.snapshots)
        later = (await writer.put(b"later")).header.seq
        reply = await got(writer, at(info.id, min_seq=info.seq, max_staleness_ms=1), KEYS[0])
        assert reply.results[0].found
        for reading in (
            got(writer, at(info.id, min_seq=later), KEYS[0]),
            scanned(writer, at(info.id, min_seq=info.seq + 1)),
        ):
            with pytest.raises(InvalidRequest, match="for ever") as caught:
                await reading
            assert caught.value.field == "header.min_seq"


WRITES = [
    kv_pb2.PutRequest(key=b"k"),
    kv_pb2.DeleteRequest(key=b"k"),
    kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"k")),
    kv_pb2.WriteRequest(changes=[put(b"k")]),
    kv_pb2.TxnRequest(then=[kv_pb2.TxnOperation(change=put(b"k"))]),
]


@pytest.mark.parametrize("request_", WRITES, ids=lambda each: type(each).__name__)
async def test_nothing_is_written_at_a_snapshot(request_: Any) -> None:
    """Every write that names one is refused, and changes nothing."""
    async with serving() as writer:
        info = await create(writer.admin.snapshots)
        request_.header.snapshot_id = info.id
        with pytest.raises(InvalidRequest, match="never written") as caught:
            await writer.ask(request_)
        assert caught.value.field == "header.snapshot_id"
        assert not (await writer.get(b"k")).found


async def test_snapshot_that_is_not_there() -> None:
    """Every read at it says so; what is no id is a mistake of the request."""
    async with serving() as writer:
        for reading in (
            got(writer, at(bytes(16)), b"k"),
            scanned(writer, at(bytes(16))),
            delete(writer, id=bytes(16)),
            delete(writer, name="nobody"),
            renew(writer, name="nobody", ttl_s=1),
        ):
            with pytest.raises(SnapshotNotFound):
                await reading
        with pytest.raises(InvalidRequest, match="16"):
            await got(writer, at(b"short"), b"k")


async def delete(writer: Serving, **fields: Any) -> None:
    """Delete a snapshot."""
    await writer.admin.snapshots.delete(admin_pb2.DeleteSnapshotRequest(**fields), CALL)


async def renew(writer: Serving, **fields: Any) -> admin_pb2.SnapshotInfo:
    """Renew a snapshot."""
    request = admin_pb2.RenewSnapshotRequest(**fields)
    return (await writer.admin.snapshots.renew(request, CALL)).snapshot


async def named(writer: Serving) -> list[str]:
    """The names of all snapshots that have one."""
    reply = await writer.admin.snapshots.list(admin_pb2.ListSnapshotsRequest(), CALL)
    return [each.name for each in reply.snapshots if each.name]


async def test_snapshots_are_renewed_listed_and_deleted() -> None:
    """By id or by name; a list has the snapshots of servers, too, and tells each as it is."""
    async with serving() as writer:
        await fill(writer, b"1")
        infos = [await create(writer.admin.snapshots, name=name) for name in ("a", "b", "c", "")]
        reply = await writer.admin.snapshots.list(admin_pb2.ListSnapshotsRequest(), CALL)
        assert list(reply.snapshots[-4:]) == infos
        assert len(reply.snapshots) == 5
        assert reply.header.seq >= infos[0].seq
        later = await renew(writer, name="a", ttl_s=DAY_S)
        assert later.expire_time_s - infos[0].expire_time_s >= DAY_S - 3_600
        assert (later.id, later.seq) == (infos[0].id, infos[0].seq)
        assert (await renew(writer, id=infos[1].id, forever=True)).expire_time_s == NEVER
        await delete(writer, name="a")
        await delete(writer, id=infos[1].id)
        assert await named(writer) == ["c"]
        for gone in (infos[0], infos[1]):
            with pytest.raises(SnapshotNotFound):
                await got(writer, at(gone.id), KEYS[0])
        with pytest.raises(SnapshotExists):
            await create(writer.admin.snapshots, name="c")
        await create(writer.admin.snapshots, name="a")


CREATE = admin_pb2.CreateSnapshotRequest
RENEW = admin_pb2.RenewSnapshotRequest
DELETE = admin_pb2.DeleteSnapshotRequest
LIST = admin_pb2.ListSnapshotsRequest
MISTAKES: list[tuple[Any, str]] = [
    (CREATE(), "ttl_s"),
    (CREATE(ttl_s=1, forever=True), "forever"),
    (CREATE(ttl_s=DAY_S + 1), "ttl_s"),
    (CREATE(ttl_s=2**64 - 1), "ttl_s"),
    (CREATE(ttl_s=1, name="x" * 129), "name"),
    (CREATE(ttl_s=1, name="a\nb"), "name"),
    (CREATE(ttl_s=1, name="0123456789abcdef0123456789ABCDEF"), "name"),
    (CREATE(ttl_s=1, header=at(bytes(16))), "header.snapshot_id"),
    (CREATE(ttl_s=1, header=kv_pb2.RequestHeader(idempotency_key=b"k")), "header.idempotency_key"),
    (RENEW(ttl_s=1), "id"),
    (RENEW(ttl_s=1, id=b"short"), "id"),
    (RENEW(ttl_s=1, id=bytes(16), name="both"), "name"),
    (RENEW(id=bytes(16)), "ttl_s"),
    (RENEW(id=bytes(16), ttl_s=1, forever=True), "forever"),
    (DELETE(), "id"),
    (DELETE(id=bytes(16), name="both"), "name"),
    (DELETE(id=bytes(17)), "id"),
    (LIST(header=at(bytes(16))), "header.snapshot_id"),
    (LIST(header=kv_pb2.RequestHeader(read_level=99)), "header.read_level"),  # type: ignore[arg-type]  # as a later client might
]


@pytest.mark.parametrize(("request_", "field"), MISTAKES, ids=lambda each: str(each)[:40])
async def test_mistakes_are_told_by_their_field(request_: Any, field: str) -> None:
    """And nothing is done."""
    async with serving(limits=LimitSettings(snapshot_ttl_s_max=DAY_S)) as writer:
        before = writer.engine.manifest.current.manifest_id
        methods = {CREATE: "create", RENEW: "renew", DELETE: "delete", LIST: "list"}
        method = getattr(writer.admin.snapshots, methods[type(request_)])
        with pytest.raises(InvalidRequest) as caught:
            await method(request_, CALL)
        assert caught.value.field == field
        assert (await writer.engine.manifest.refresh()).manifest_id == before


async def test_calls_that_come_too_late() -> None:
    """After the deadline, and when the writer has been stopped, nothing is done."""
    async with serving() as writer:
        late = Call(deadline_ms=0)
        with pytest.raises(DeadlinePassed):
            await writer.admin.snapshots.create(CREATE(ttl_s=1), late)


async def test_snapshots_of_a_database_are_bounded() -> None:
    """Beyond `snapshot_count_max` none is made until others are gone."""
    async with serving(limits=LimitSettings(snapshot_count_max=3)) as writer:
        infos = [await create(writer.admin.snapshots) for _ in range(2)]
        with pytest.raises(Overloaded, match="snapshot_count_max is 3"):
            await create(writer.admin.snapshots)
        await delete(writer, id=infos[0].id)
        await create(writer.admin.snapshots)


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
