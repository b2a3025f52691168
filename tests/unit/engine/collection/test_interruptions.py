"""Whatever happens between two requests of a collection, nothing is deleted that is needed (F3).

Each test lets something happen before the first request of a collection, before the second, and
so on until the collection has ended before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import pytest

from shalekv.errors import LeaseLost, SnapshotNotFound
from shalekv.format import names
from shalekv.store.api import NO_METADATA, Created, CreateOutcome
from tests.kit.engine.collection import TTL_S, Ground
from tests.kit.engine.interrupted_store import InterruptedStore

Prepare = Callable[[Ground], Awaitable["Happening"]]
Happening = Callable[[], Awaitable[None]]


async def base() -> Ground:
    """A database with garbage of every kind, all old enough."""
    ground = await Ground.created()
    await ground.wal(6)
    await ground.compact(2)
    await ground.merge()
    await ground.fence()
    await ground.wal(2)
    await ground.compact(5)
    ground.pass_time()
    return ground


async def collections_until_over(prepare: Prepare, *, deletes_per_s_count: int = 2) -> int:
    """How often something happened within a collection; each time I8 is checked."""
    at = 0
    while True:
        ground = await base()
        happening = await prepare(ground)

        async def before(number: int, happening: Happening = happening, at: int = at) -> None:
            if number == at:
                await happening()

        store = InterruptedStore(ground.store, before)
        await ground.collecting(store, deletes_per_s_count=deletes_per_s_count).collect()
        await ground.check_reachable()
        if store.requests <= at:
            return at
        ground.pass_time()
        await ground.collecting().collect()
        await ground.check_reachable()
        at += 1


async def test_object_that_is_published_meanwhile_is_not_deleted() -> None:
    """Under a lease that lives, a job publishes at any moment of a collection."""

    async def prepare(ground: Ground) -> Happening:
        lease = await ground.lease(ttl_s=1_000)
        info = await ground.write_sst(lease)
        ground.pass_time()

        async def publish() -> None:
            await ground.publish(lease, info, c=7)

        return publish

    assert await collections_until_over(prepare) > 20


async def test_object_under_an_expired_lease_is_published_or_deleted() -> None:
    """A job that is late either publishes before the collector's edit, or is told; never both."""
    published = []

    async def prepare(ground: Ground) -> Happening:
        lease = await ground.lease(ttl_s=TTL_S)
        info = await ground.write_sst(lease)
        ground.pass_time(TTL_S + 1)

        async def publish() -> None:
            try:
                await ground.publish(lease, info)
                published.append(True)
            except LeaseLost:
                published.append(False)

        return publish

    assert await collections_until_over(prepare) > 20
    assert published == sorted(published, reverse=True)  # a first part of them succeeded
    assert {*published} == {True, False}


async def test_snapshot_that_is_renewed_meanwhile_keeps_its_objects() -> None:
    """One that is about to expire is renewed in time, or is told that it is gone."""
    renewed = []

    async def prepare(ground: Ground) -> Happening:
        snapshots = ground.snapshots()
        snapshot = await snapshots.create(ttl_ms=1_000 * TTL_S)
        await ground.merge()
        ground.pass_time(TTL_S - 0.001)

        async def renew() -> None:
            try:
                await snapshots.renew(snapshot.id.hex(), ttl_ms=10_000_000)
                renewed.append(True)
            except SnapshotNotFound:
                renewed.append(False)

        return renew

    assert await collections_until_over(prepare) > 20
    assert all(renewed)  # its time was not over when the collections began


async def test_snapshot_that_is_created_or_shared_meanwhile_keeps_its_objects() -> None:
    """A new snapshot names what is current; a shared one what an unexpired one names."""

    async def prepare(ground: Ground) -> Happening:
        snapshots = ground.snapshots()
        await snapshots.create(name="old", ttl_ms=None)
        await ground.merge()
        ground.pass_time()

        async def share_and_create() -> None:
            await snapshots.share("old", ttl_ms=None)
            await snapshots.delete("old")
            await ground.merge()
            await snapshots.create(ttl_ms=None)
            await ground.merge()

        return share_and_create

    assert await collections_until_over(prepare) > 20


async def test_two_collectors_at_once_are_safe() -> None:
    """A whole collection of another collector fits between any two requests."""

    async def prepare(ground: Ground) -> Happening:
        lease = await ground.lease(ttl_s=5)
        await ground.write_sst(lease)
        await ground.snapshots().create(ttl_ms=5_000)
        await ground.merge()
        ground.pass_time()
        other = ground.collecting()

        async def collect() -> None:
            await other.collect()

        return collect

    assert await collections_until_over(prepare) > 10


async def test_snapshot_that_another_collector_drops_meanwhile_is_no_error() -> None:
    """Its manifest is gone when it is read, and the current manifest tells why."""
    at = 0
    while True:
        ground = await base()
        await ground.snapshots().create(ttl_ms=TTL_S * 1_000)
        await ground.merge()
        ground.pass_time(TTL_S)

        async def expire(number: int, ground: Ground = ground, at: int = at) -> None:
            if number == at:
                ground.pass_time(2)
                await ground.collecting().collect()

        store = InterruptedStore(ground.store, expire)
        await ground.collecting(store).collect()
        await ground.check_reachable()
        if store.requests <= at:
            break
        at += 1
    assert at > 10


@pytest.mark.parametrize("is_data", [True, False])
async def test_writes_go_on_meanwhile(*, is_data: bool) -> None:
    """Slots that are filled, compacted and collected while another collection is under way."""

    async def prepare(ground: Ground) -> Happening:
        async def write() -> None:
            await (ground.wal(4) if is_data else ground.fence())
            await ground.compact(ground.last_wal_id)

        return write

    assert await collections_until_over(prepare) > 10


async def test_stalled_collector_deletes_nothing_that_came_later() -> None:
    """It wakes before its first deletion, long after all that it knows has changed."""
    ground = await base()
    lease = await ground.lease(ttl_s=1_000)
    info = await ground.write_sst(lease)
    ground.pass_time()
    is_first = True

    class Stalling(InterruptedStore):
        async def delete(self, names: object) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                await ground.publish(lease, info)
                await ground.snapshots().create(ttl_ms=None)
                for _ in range(3):
                    await ground.wal(3)
                    await ground.compact(ground.last_wal_id)
                    ground.pass_time(100)
                    await ground.collecting().collect()
            assert isinstance(names, tuple)
            await super().delete(names)

    await ground.collecting(Stalling(ground.store, nothing), deletes_per_s_count=1).collect()
    assert not is_first
    await ground.check_reachable()


async def test_edit_at_a_recycled_id_does_not_count() -> None:
    """Whoever creates a manifest id that was collected finds that it is not the highest (F2)."""
    ground = await base()
    created: list[tuple[str, CreateOutcome]] = []

    class Late(InterruptedStore):
        """Before its first create, others edit the manifest, and what is old is collected."""

        async def create(
            self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
        ) -> CreateOutcome:
            if not created:
                for _ in range(3):
                    await ground.merge()
                ground.pass_time()
                await ground.collecting().collect()
            outcome = await super().create(name, data, metadata)
            created.append((name, outcome))
            return outcome

    snapshot = await ground.snapshots(Late(ground.store, nothing)).create(ttl_ms=None)
    assert [outcome for _, outcome in created] == [Created(), Created()]  # the first at an old id
    assert created[1][0] == names.manifest_name(snapshot.manifest_id) > created[0][0]
    current = await ground.manifest()
    assert [s.id for s in current.snapshots] == [snapshot.id]
    assert names.manifest_name(current.manifest_id) == created[1][0]
    ground.pass_time()
    await ground.collecting().collect()
    assert ground.names() == await ground.needed()


async def test_collectors_edit_at_a_recycled_id_does_not_count() -> None:
    """A collector that comes late edits again: what has expired does not stay (F2)."""
    ground = await base()
    await ground.lease(ttl_s=1)
    ground.pass_time()
    creates = 0

    class Late(InterruptedStore):
        async def create(
            self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
        ) -> CreateOutcome:
            nonlocal creates
            creates += 1
            if creates == 1:
                for _ in range(3):
                    await ground.merge()
                await ground.store.delete([name])  # as it would be in the end
            return await super().create(name, data, metadata)

    report = await ground.collecting(Late(ground.store, nothing)).collect()
    current = await ground.manifest()
    assert creates == 2
    assert report.manifest_id == current.manifest_id
    assert current.leases == ()
    await ground.check_reachable()


async def nothing(_number: int) -> None:
    """What interrupts no request."""
