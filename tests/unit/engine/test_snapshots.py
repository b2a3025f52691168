"""Named snapshots: what they show, how long, and what those are told who come too late."""

from __future__ import annotations

from contextlib import suppress

import pytest

from shalekv.core.manifest import Snapshot
from shalekv.core.snapshot import NEVER, find_snapshot
from shalekv.engine.snapshots import NAME_CHARS_MAX
from shalekv.errors import IllegalState, InvalidRequest, SnapshotExists, SnapshotNotFound
from shalekv.format import names
from shalekv.format.coding import crc32c
from tests.kit.engine.collection import Ground
from tests.kit.store import FaultyStore, Request


async def test_snapshot_names_the_manifest_that_creates_it() -> None:
    """It reads the manifest in which it stands first, and lives by the store's clock."""
    ground = await Ground.created()
    ground.now_ms += 1
    created = await ground.snapshots().create(name="nightly", ttl_ms=60_000)
    manifest = await ground.manifest()
    assert manifest.snapshots == (created,)
    assert created.manifest_id == manifest.manifest_id == 1
    assert created.snapshot_expire_time_s == ground.now_ms // 1_000 + 61  # never too short
    assert (created.name, created.manifest_checksum, len(created.id)) == ("nightly", 0, 16)
    forever = await ground.snapshots().create(ttl_ms=None)
    assert forever.snapshot_expire_time_s == NEVER
    assert forever.id != created.id


async def test_snapshot_includes_the_wal_up_to_the_first_gap() -> None:
    """`wal_id_last_seen` becomes the last contiguous WAL object, and never goes back."""
    ground = await Ground.created()
    await ground.snapshots().create(ttl_ms=None)
    assert (await ground.manifest()).wal_id_last_seen is None
    await ground.wal(3)
    ground.last_wal_id += 1
    await ground.wal(1)
    await ground.snapshots().create(ttl_ms=None)
    assert (await ground.manifest()).wal_id_last_seen == 2
    await ground.compact(1)
    await ground.store.delete([names.wal_name(2)])
    await ground.snapshots().create(ttl_ms=None)
    assert (await ground.manifest()).wal_id_last_seen == 2


async def test_wal_is_listed_again_when_another_edits_first() -> None:
    """What was seen before a conflict may be collected; the list counts that follows the manifest.

    The snapshot's id stays the same.
    """
    ground = await Ground.created()
    await ground.wal(2)

    async def conflict(request: Request) -> None:
        if request.operation == "create" and len(store.asked("create")) <= 3:
            await ground.wal(1)
            await ground.compact(ground.last_wal_id)
            ground.pass_time()
            await ground.collecting().collect()

    store = FaultyStore(ground.store, before=conflict)
    created = await ground.snapshots(store).create(ttl_ms=None)
    manifest = await ground.manifest()
    assert [s.id for s in manifest.snapshots] == [created.id]
    assert created.manifest_id == manifest.manifest_id
    assert manifest.wal_id_last_seen == ground.last_wal_id == 4


async def test_shared_snapshot_names_the_same_manifest() -> None:
    """It has an id and a time of its own, and the checksum of the manifest that it names."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    first = await snapshots.create(name="first", ttl_ms=60_000)
    await ground.merge()
    second = await snapshots.share("first", name="second", ttl_ms=None)
    third = await snapshots.share(second.id.hex(), ttl_ms=None)
    stored = ground.objects.find(names.manifest_name(first.manifest_id))
    assert stored is not None
    for shared in (second, third):
        assert shared.manifest_id == first.manifest_id
        assert shared.manifest_checksum == crc32c(stored.data)
    assert len({first.id, second.id, third.id}) == 3
    ground.pass_time(100)
    await ground.collecting().collect()
    assert [s.name for s in (await ground.manifest()).snapshots] == ["second", ""]
    await ground.check_reachable()


async def test_expired_snapshot_is_not_shared_or_renewed() -> None:
    """From the moment when its time is over, whether it was dropped or not (F3)."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    await snapshots.create(name="short", ttl_ms=1_000)
    ground.pass_time(1)
    assert (await snapshots.renew("short", ttl_ms=1_000)).name == "short"
    ground.pass_time(1.001)
    for late in (snapshots.renew("short", ttl_ms=1_000), snapshots.share("short", ttl_ms=None)):
        with pytest.raises(SnapshotNotFound):
            await late
    await ground.collecting().collect()
    for late in (snapshots.renew("short", ttl_ms=1_000), snapshots.share("short", ttl_ms=None)):
        with pytest.raises(SnapshotNotFound, match="short"):
            await late


@pytest.mark.parametrize("is_shared", [True, False])
async def test_snapshot_that_is_collected_meanwhile_is_no_damage(*, is_shared: bool) -> None:
    """Whoever has seen it, and finds its manifest gone, looks at the current manifest again."""
    at = 0
    while True:
        ground = await Ground.created()
        await ground.snapshots().create(name="short", ttl_ms=5_000)
        await ground.merge()
        ground.pass_time(5)

        async def expire(request: Request, ground: Ground = ground, at: int = at) -> None:
            if request.number == at:
                ground.pass_time()
                await ground.collecting().collect()

        store = FaultyStore(ground.store, before=expire)
        late = ground.snapshots(store)
        if is_shared:
            with suppress(SnapshotNotFound):
                await late.share("short", ttl_ms=None)
        else:
            await late.list()
        if len(store.requests) <= at:
            break
        at += 1
    assert at > 3


@pytest.mark.parametrize("edit", ["create", "share", "renew", "delete"])
async def test_edit_at_a_recycled_id_does_not_count(edit: str) -> None:
    """What was created at a manifest id that had been deleted is done again (F2)."""
    ground = await Ground.created()
    first = await ground.snapshots().create(name="first", ttl_ms=60_000)

    async def recycle(request: Request) -> None:
        if request.operation == "create" and len(store.asked("create")) == 1:
            for _ in range(2):
                await ground.merge()
            await ground.store.delete([request.name])  # as a collector does in the end

    store = FaultyStore(ground.store, before=recycle)
    snapshots = ground.snapshots(store)
    done: Snapshot | None = None
    match edit:
        case "create":
            done = await snapshots.create(ttl_ms=None)
        case "share":
            done = await snapshots.share("first", ttl_ms=None)
        case "renew":
            done = await snapshots.renew("first", ttl_ms=None)
        case _:
            await snapshots.delete("first")
    assert len(store.asked("create")) == 2
    expected = {"create": (first, done), "share": (first, done), "renew": (done,), "delete": ()}
    assert (await ground.manifest()).snapshots == expected[edit]


async def test_snapshot_is_renewed_and_deleted_by_id_or_name() -> None:
    """A UUID with or without dashes, or the name; what is not there is told."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    named = await snapshots.create(name="named", ttl_ms=1_000)
    await snapshots.create(ttl_ms=1_000)
    renewed = await snapshots.renew("named", ttl_ms=None)
    assert renewed.snapshot_expire_time_s == NEVER
    text = named.id.hex().upper()
    assert (await snapshots.find(f"{text[:8]}-{text[8:]}")).id == named.id
    await snapshots.delete(text)
    left = await ground.manifest()
    assert find_snapshot(left, named.id) is None
    assert len(left.snapshots) == 1
    for called in ("named", text, "", "ffff"):
        with pytest.raises(SnapshotNotFound):
            await snapshots.delete(called)


async def test_names_are_unique_and_no_ids() -> None:
    """A name belongs to one snapshot at a time, and can be printed and told from an id."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    await snapshots.create(name="one", ttl_ms=None)
    with pytest.raises(SnapshotExists):
        await snapshots.create(name="one", ttl_ms=None)
    with pytest.raises(SnapshotExists):
        await snapshots.share("one", name="one", ttl_ms=None)
    for name in ("a" * 32, "a\n", " a", "x" * (NAME_CHARS_MAX + 1)):
        with pytest.raises(InvalidRequest):
            await snapshots.create(name=name, ttl_ms=None)
    await snapshots.create(name="x" * NAME_CHARS_MAX, ttl_ms=None)


async def test_list_says_what_each_snapshot_pins() -> None:
    """Bytes of SSTs and WAL that the current manifest does not keep; alone: nor any other."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    await ground.wal(4)
    merged_away = await ground.compact(1)
    await snapshots.create(name="old", ttl_ms=None)
    await ground.merge()
    await ground.publish(await ground.lease(), c=3)
    await snapshots.create(name="new", ttl_ms=None)
    await snapshots.create(name="over", ttl_ms=1_000)
    ground.pass_time()
    old, new, over = await snapshots.list()
    wal = [ground.objects.find(names.wal_name(n)) for n in (1, 2)]
    wal_bytes = sum(each.info.size_bytes for each in wal if each)
    assert old.pinned is not None
    assert old.pinned.alone_bytes == old.pinned.size_bytes == merged_away.size_bytes + wal_bytes
    assert old.manifest is not None
    assert (old.manifest.wal_id_last_compacted, old.manifest.wal_id_last_seen) == (1, 3)
    assert new.pinned is not None
    assert (new.snapshot.name, new.pinned.size_bytes) == ("new", 0)
    assert (over.snapshot.name, over.manifest, over.pinned) == ("over", None, None)
    await snapshots.share("old", ttl_ms=None)
    old, *_, twin = await snapshots.list()
    for each in (old, twin):
        assert each.pinned is not None
        assert (each.pinned.alone_bytes, each.pinned.size_bytes) == (
            0,
            merged_away.size_bytes + wal_bytes,
        )


async def test_pinned_manifest_that_is_missing_is_told() -> None:
    """A snapshot whose manifest is gone is not listed as if nothing were wrong."""
    ground = await Ground.created()
    snapshots = ground.snapshots()
    created = await snapshots.create(ttl_ms=None)
    await ground.merge()
    await ground.store.delete([names.manifest_name(created.manifest_id)])
    with pytest.raises(IllegalState, match=names.manifest_name(created.manifest_id)):
        await snapshots.list()
