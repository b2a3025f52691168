"""A restored database is like any other, and is not confused with its source."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv.errors import DatabaseExists, DatabaseNotFound, Fenced, IllegalState
from shalekv.jobs.backup.plan import EPOCH_GAP, MANIFEST_ID_GAP
from shalekv.protocol.access import Policy
from shalekv.protocol.fencing import (
    WriterId,
    check_owner,
)
from shalekv.protocol.opening import (
    SEQ_GAP,
)
from shalekv.store.api import ObjectStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore
from shalekv.store.policies import StoredPolicy
from shalekv.v1 import kv_pb2
from shalekv.watch.consumers import ConsumerLeases
from shalekv.write.snapshots import Snapshots
from tests.kit.engine.backups import (
    Place,
    back_up,
    database,
    in_process_cluster,
    new_database,
    restore,
    scanned,
    write,
)
from tests.kit.in_process_cluster import CALL
from tests.kit.policies import POLICY
from tests.kit.processes.in_process import wall_clock_ms
from tests.kit.store import FaultyStore, MortalProcess, Request

HOUR_MS = 3_600_000


class PlaceInThePast(Place):
    """A place with a clock of 1970."""

    def store(self) -> ObjectStore:
        return MemoryStore(lambda: 5_000_000, objects=self.objects)


async def set_policy(place: Place, policy: Policy) -> Policy:
    manifest = await place.manifest()
    return await StoredPolicy(place.cas(), manifest.database_id).replace(policy)


async def policy_of(place: Place) -> Policy:
    manifest = await place.manifest()
    return await StoredPolicy(place.cas(), manifest.database_id).refresh()


async def test_the_access_policy_is_restored_with_a_secret_of_its_own() -> None:
    """The newest one is in the backup, without its secret, and becomes version 1."""
    source, _ = await database()
    await set_policy(source, Policy())
    original = await set_policy(source, replace(POLICY, version=1))
    repository, target = Place(), Place()
    made = await back_up(source, repository)
    assert made.policy == replace(original, secret=b"")
    assert not any(original.secret in repository.data(name) for name in repository.names())
    await restore(repository, target)
    restored = await policy_of(target)
    assert restored == replace(original, version=1, secret=restored.secret)
    assert restored.secret not in (b"", original.secret)
    await target.check()


async def test_a_restored_database_is_never_open() -> None:
    """Its policy is there before its manifest, wherever the restoration is interrupted."""
    source, _ = await database()
    await set_policy(source, replace(POLICY, version=0))
    repository = Place()
    await back_up(source, repository)
    names, target = list[str](), Place()

    async def note(request: Request) -> None:
        if request.operation == "create":
            names.append(request.name.partition("/")[0])

    await restore(repository, target, written=FaultyStore(target.store(), before=note))
    assert [*dict.fromkeys(names)][-2:] == ["access", "manifest"]
    await restore(repository, target)
    assert (await policy_of(target)).version == 1


@pytest.mark.parametrize("is_in_backup", [True, False])
async def test_another_access_policy_is_not_taken_over(*, is_in_backup: bool) -> None:
    """Remains of a database at the place end a restoration, before there is a manifest."""
    source, _ = await database()
    if is_in_backup:
        await set_policy(source, replace(POLICY, version=0))
    repository, target = Place(), Place()
    await back_up(source, repository)
    stored = StoredPolicy(target.cas(), (await source.manifest()).database_id)
    await stored.replace(replace(POLICY, version=0, roles=(), grants=()))
    with pytest.raises(IllegalState, match="holds an access policy"):
        await restore(repository, target)
    with pytest.raises(DatabaseNotFound):
        await target.manifest()


async def test_restored_database_is_like_any_other() -> None:
    """A restored database stays sound when it is collected by any clock, written and compacted, and
    the source does not change.
    """
    source, pairs = await database()
    assert (await source.manifest()).gc_cutoff_ms > 0
    repository = Place()
    await back_up(source, repository)
    for target in (PlaceInThePast(), Place()):
        assert (await restore(repository, target)).gc_cutoff_ms == 0
        async with in_process_cluster(target) as roles:
            await roles.collect()
        await target.check()
        assert await scanned(target) == pairs
    for number in range(2):
        await write(target, **{f"added-{number}": "here"})
        async with in_process_cluster(target) as roles:
            await roles.compact()
            await roles.collect()
        await target.check()
    added = {b"added-0": b"here", b"added-1": b"here"}
    assert await scanned(target) == {**pairs, **added}
    assert await scanned(source) == pairs


async def test_what_belongs_to_processes_does_not_come_back() -> None:
    """Snapshots and leases are not restored; the data is the same."""
    source, _ = await database()
    await Snapshots(source.cas()).create(name="kept", ttl_ms=None)
    stored = StoredManifest(source.cas())
    await stored.refresh()
    await ConsumerLeases(source.cas(), stored, ttl_s=600).hold("somebody", 9)
    repository, target = Place(), Place()
    made = await back_up(source, repository)
    manifest = await restore(repository, target)
    assert (manifest.snapshots, manifest.leases, manifest.writer_address) == ((), (), "")
    assert manifest == await target.manifest()
    same = (
        "database_id leveled_ssts last_compacted_seq wal_id_last_compacted wal_id_last_seen "
        "recent_loads fence_width"
    )
    for field in same.split():
        assert getattr(manifest, field) == getattr(made.manifest, field), field


async def test_the_writer_of_a_lost_database_is_fenced_by_what_is_restored_in_its_place() -> None:
    """The writer of a lost database is fenced at its next poll, whatever it has done since the
    backup.
    """
    source, pairs = await database()
    repository = Place()
    await back_up(source, repository)
    await write(source, after="the backup")
    lost = StoredManifest(source.cas())  # of the process that goes on
    seen = await lost.refresh()
    own = WriterId(seen.writer_epoch, seen.writer_nonce)
    source.lose(*source.names())
    restored = await restore(repository, source)
    assert restored.manifest_id - seen.manifest_id > MANIFEST_ID_GAP // 2
    assert restored.writer_epoch - seen.writer_epoch > EPOCH_GAP // 2
    with pytest.raises(Fenced):
        check_owner(await lost.refresh(), own)
    assert await scanned(source) == pairs


async def test_what_had_expired_is_not_restored() -> None:
    """Expired values do not come back, even if nothing was written since and the clock of the new
    place is far behind (I2).
    """
    source, pairs = await database()
    made_ms = wall_clock_ms()
    async with in_process_cluster(source) as roles, roles.writing() as writer:
        dead = kv_pb2.PutChange(key=b"dead", value=b"dead", ttl_ms=HOUR_MS // 2)
        request = kv_pb2.WriteRequest(changes=[kv_pb2.Change(put=dead)])
        answer = writer.kv.write(request, CALL)
        if not isinstance(answer, kv_pb2.WriteReply):
            await answer
    assert b"dead" in await scanned(source)
    repository, target = Place(), Place()
    later = MemoryStore(lambda: wall_clock_ms() + HOUR_MS, objects=source.objects)
    await back_up(source, repository, read=later)
    restored = await restore(repository, target)
    assert restored.logical_time_ms >= made_ms + HOUR_MS
    assert await scanned(target) == pairs


async def test_no_number_is_issued_again() -> None:
    """Numbers that the lost database has issued since the backup are below all new ones (I5)."""
    source, _ = await database()
    repository = Place()
    await back_up(source, repository)
    for number in range(3):
        await write(source, **{f"lost-{number}": "here"})
    shown = (await source.manifest()).writer_first_seq
    target = Place()
    await restore(repository, target)
    await write(target, added="here")
    assert (await target.manifest()).writer_first_seq > shown + SEQ_GAP


async def test_a_database_is_never_overwritten() -> None:
    """Neither another database nor a restored one that was used since is overwritten."""
    source, _ = await database()
    repository, target = Place(), Place()
    await back_up(source, repository)
    other, pairs = await new_database()
    before = other.names()
    with pytest.raises(DatabaseExists):
        await restore(repository, other)
    assert other.names() == before
    assert await scanned(other) == pairs
    first = await restore(repository, target)
    assert await restore(repository, target) == first  # its reply may have been lost
    await write(target, lived="since")
    with pytest.raises(DatabaseExists):
        await restore(repository, target)


async def test_two_restorations_at_once_make_one_database() -> None:
    """Two concurrent restorations of one backup make the same database."""
    source, pairs = await database()
    repository, target = Place(), Place()
    await back_up(source, repository)
    one, other = await asyncio.gather(restore(repository, target), restore(repository, target))
    assert one == other
    await target.check()
    assert await scanned(target) == pairs


async def test_a_restoration_does_not_go_on_with_that_of_another_backup() -> None:
    """A restoration after an unfinished one of another backup, whose log would be mixed with its
    own, is refused with the id of that one.
    """
    source, pairs = await database()
    repository = Place()
    first = await back_up(source, repository)
    await write(source, more="1")
    second = await back_up(source, repository)
    target = Place()
    process = MortalProcess(9)
    assert not await process.run(restore(repository, target, written=process.store(target.store())))
    before = target.names()
    assert len(before) > 1
    with pytest.raises(IllegalState, match="has a part of backup"):
        await restore(repository, target, backup_id=first.backup_id)
    assert target.names() == before
    await restore(repository, target, backup_id=second.backup_id)
    assert await scanned(target) == {**pairs, b"more": b"1"}
