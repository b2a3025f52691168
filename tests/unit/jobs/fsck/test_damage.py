"""Damage of manifests and of the WAL is found; checks during other jobs, or of a failing store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from shalekv.errors import DatabaseNotFound
from shalekv.format.access import encode_policy
from shalekv.format.names import manifest_name, policy_name, wal_name
from shalekv.format.records import load_entry
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.audit import FindingKind as Kind
from shalekv.protocol.manifest import CasMode, Lease, PendingLoad, Snapshot, WalMode
from shalekv.protocol.membership import Member
from shalekv.protocol.sst_table import SstTable
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.damage import (
    CURRENT,
    DATABASE_ID,
    L0_SST,
    LAST_COMPACTED_SEQ,
    LEASE_ID,
    LEFT_SST,
    NONCES,
    NOW_MS,
    NOW_S,
    OLD_SST,
    PINNED,
    SECOND_SEQ,
    Plant,
    Planted,
    case,
    findings,
    found,
    properties,
    sst_name,
)
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.policies import POLICY
from tests.kit.samples import put
from tests.kit.store import FaultyStore, Request

OLD, NOW = manifest_name(PINNED), manifest_name(CURRENT)
W = [wal_name(number) for number in range(14)]

MANIFESTS = [
    case("fence width", lambda p: p.edit(fence_width=0), (NOW, Kind.MANIFEST_FIELD)),
    case(
        "levels without c",
        lambda p: p.edit(wal_id_last_compacted=None),
        (W[0], Kind.MISSING),
        (W[2], Kind.WAL_BOUNDARY),
        (W[3], Kind.WAL_BOUNDARY),
        (NOW, Kind.MANIFEST_FIELD),
        (NOW, Kind.MANIFEST_ORDER),
    ),
    case(
        "a snapshot twice",
        lambda p: p.edit(snapshots=(p.current.snapshots[0], p.current.snapshots[0])),
        (NOW, Kind.MANIFEST_FIELD),
        (NOW, Kind.MANIFEST_FIELD),
    ),
    case(
        "a snapshot of the future",
        lambda p: p.edit(snapshots=(*p.current.snapshots, Snapshot(bytes(16), 9, NOW_S + 9))),
        (NOW, Kind.MANIFEST_FIELD),
    ),
    case(
        "a lease twice",
        lambda p: p.edit(leases=(Lease(LEASE_ID, 0, "a"), Lease(LEASE_ID, 0, "b"))),
        (NOW, Kind.MANIFEST_FIELD),
    ),
    case(
        "a load twice", lambda p: p.edit(pending_loads=(p.load, p.load)), (NOW, Kind.MANIFEST_FIELD)
    ),
    case(
        "an epoch down",
        lambda p: p.edit(writer_epoch=1, writer_nonce=NONCES[1]),
        (NOW, Kind.MANIFEST_ORDER),
        *((W[n], Kind.WAL_EPOCH) for n in (5, 6, 8, 9)),
    ),
    case("another mode", lambda p: p.edit(cas_mode=CasMode.TWO_PHASE), (NOW, Kind.MANIFEST_ORDER)),
    case(
        "an epoch with two winners",
        lambda p: p.edit(compactor_nonce=b"c" * 16),
        (NOW, Kind.MANIFEST_ORDER),
    ),
    case(
        "the manifest of a snapshot is another one",
        lambda p: p.write_manifest(replace(p.pinned, write_id=b"w" * 16)),
        (OLD, Kind.SNAPSHOT_CHECKSUM),
    ),
    case(
        "the manifest of a snapshot is gone", lambda p: p.objects.remove(OLD), (OLD, Kind.MISSING)
    ),
    case(
        "the manifest of a snapshot is damaged", lambda p: p.flip(OLD, 30), (OLD, Kind.BAD_CHECKSUM)
    ),
]


@pytest.mark.parametrize(("plant", "expected"), MANIFESTS)
async def test_damage_of_manifests(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """Manifests that are contradictory, go backwards, are missing or damaged are found."""
    planted = Planted()
    plant(planted)
    assert await found(planted) == expected


async def test_a_damaged_current_manifest_does_not_end_the_check() -> None:
    """A damaged current manifest is reported, and the newest readable one says what to check."""
    planted = Planted()
    planted.flip(NOW, -1)
    planted.flip(W[4], 20)
    kinds = await found(planted)
    assert (NOW, Kind.BAD_CHECKSUM) in kinds
    assert (W[4], Kind.BAD_CHECKSUM) in kinds
    # the contents of that manifest are unknown
    assert Kind.ORPHAN not in [kind for _, kind in kinds]


async def test_no_manifest_that_can_be_read() -> None:
    """If no manifest is readable, all of them are reported, and nothing else."""
    planted = Planted()
    planted.flip(NOW, 0)
    planted.write(OLD, b"cut")
    assert await found(planted) == [(OLD, Kind.TRUNCATED), (NOW, Kind.BAD_MAGIC)]


WAL = [
    case("a block", lambda p: p.flip(W[6], 0), (W[6], Kind.BAD_CHECKSUM)),
    case("a cut", lambda p: p.write(W[4], b"1234"), (W[4], Kind.TRUNCATED)),
    case("another object", lambda p: p.write(W[4], p.data(W[3])), (W[4], Kind.WRONG_OBJECT)),
    case("c is gone", lambda p: p.objects.remove(W[3]), (W[3], Kind.MISSING)),
    case("a hole", lambda p: p.objects.remove(W[7]), (W[7], Kind.MISSING)),
    case("a long hole", lambda p: p.lose(*W[4:8]), (W[4], Kind.MISSING)),
    case("the last one that was seen is gone", lambda p: p.lose(*W[6:10]), (W[6], Kind.MISSING)),
    case(
        "sequence numbers", lambda p: p.wal(6, [put(b"c", 41)], epoch=2), (W[6], Kind.WAL_SEQUENCE)
    ),
    case(
        "an older writer's data",
        lambda p: p.wal(7, [put(b"c", SECOND_SEQ)], epoch=1),
        (W[7], Kind.WAL_EPOCH),
        (W[7], Kind.WAL_SEQUENCE),
    ),
    case(
        "one epoch with two writers",
        lambda p: p.wal(7, epoch=2, nonce=b"a third writer!!"),
        (W[7], Kind.WAL_EPOCH),
    ),
    case("an unknown epoch", lambda p: p.wal(10, epoch=3), (W[10], Kind.WAL_EPOCH)),
    case(
        "compacted, with a number above",
        lambda p: p.wal(3, [put(b"a", LAST_COMPACTED_SEQ + 1)]),
        (W[3], Kind.WAL_BOUNDARY),
        (W[4], Kind.WAL_SEQUENCE),
    ),
    case(
        "not compacted, with a number below",
        lambda p: p.wal(4, [put(b"b", LAST_COMPACTED_SEQ)]),
        (W[4], Kind.WAL_BOUNDARY),
        (W[4], Kind.WAL_SEQUENCE),
    ),
    case(
        "a record that no version knows",
        lambda p: p.wal(8, system=[put(b"\x01k", SECOND_SEQ + 1, b"short")], epoch=2),
        (W[8], Kind.TRUNCATED),
    ),
    case(
        "a load that nothing protects",
        lambda p: p.wal(
            9, control=[load_entry(replace(p.load, load_id="x"), SECOND_SEQ + 2)], epoch=2
        ),
        (W[9], Kind.LOAD),
    ),
]


@pytest.mark.parametrize(("plant", "expected"), WAL)
async def test_damage_of_the_wal(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """Damaged bytes, gaps, and slots that contradict their neighbours are found."""
    planted = Planted()
    plant(planted)
    assert await found(planted) == expected


async def test_a_gap_that_nobody_fills_is_sound() -> None:
    """After the last slot that was certainly written, uploads in flight may have left a gap."""
    planted = Planted()
    planted.edit(fence_width=3, max_parallel_writes=3)
    planted.wal(12, [put(b"z", SECOND_SEQ + 9)], epoch=2)
    assert await findings(planted) == []
    planted.wal(13, [put(b"z", SECOND_SEQ + 10)], epoch=2)
    assert await found(planted) == [(W[10], Kind.MISSING)]


async def test_objects_of_another_database() -> None:
    """An intact object of another database is reported by name."""
    planted = Planted()
    name = W[4]
    foreign = replace(properties(name, 1), database_id=b"another database")
    planted.write(name, encode_sst(foreign, [put(b"b", 41)], block_bytes=64))
    (finding,) = await findings(planted)
    assert (finding.name, finding.kind) == (name, Kind.WRONG_OBJECT)
    assert finding.offset is not None
    assert DATABASE_ID.hex() not in finding.problem


async def listed(store: ObjectStore) -> list[tuple[str, FindingKind]]:
    cas = CasStore(store, inline_runtime(), StoreSettings())
    found: list[Finding] = await gathered(Fsck(cas, parallel=1).findings())
    return sorted((each.name, each.kind) for each in found)


async def listed_when(
    planted: Planted, moment: str, act: Callable[[], object]
) -> list[tuple[str, FindingKind]]:
    """Check, with `act` just before `moment` is first listed or read; return the findings."""

    async def before(request: Request) -> None:
        if request.name == moment and [r.name for r in store.requests].count(moment) == 1:
            act()

    store = FaultyStore(planted.store, before=before)
    return await listed(store)


async def listed_torn(*left_out: str) -> list[tuple[str, FindingKind]]:
    """Check while each list of the WAL omits one of these existing slots; return the findings."""

    async def before(request: Request) -> None:
        if (request.operation, request.name) == ("list", "wal/"):
            lists = len(store.asked("list", "wal/"))
            store.hidden = {*left_out[lists - 1 : lists]}

    store = FaultyStore(Planted().store, before=before)
    return await listed(store)


def _publish(planted: Planted, **changes: object) -> None:
    planted.current = replace(planted.current, manifest_id=planted.current.manifest_id + 1)
    planted.edit(**changes)


async def test_what_is_collected_meanwhile_is_not_missing() -> None:
    """Objects that a compaction has replaced, or that belong to a deleted snapshot, are not missing
    when a collector deletes them.
    """
    planted = Planted()

    def act() -> None:
        others = [each for each in planted.current.leveled_ssts if each.max_seq != 40]
        merged = planted.sst(88, 0, [put(b"a", 40), put(b"p", 31)])
        _publish(planted, leveled_ssts=SstTable.from_infos([*others, merged]), snapshots=())
        gone = (manifest_name(PINNED), manifest_name(CURRENT), wal_name(2))
        for name in (*gone, sst_name(L0_SST), sst_name(OLD_SST)):
            planted.objects.remove(name)

    for moment in ("wal/", wal_name(2), wal_name(3), "levels/", sst_name(LEFT_SST)):
        planted = Planted()
        planted.edit(leases=(replace(planted.current.leases[0], wal_id_min=None),))
        assert await listed_when(planted, moment, act) == [], moment


async def test_torn_lists_are_no_gaps() -> None:
    """A slot is missing if two lists omit it, and not if each omits another one."""
    assert await listed_torn(wal_name(4)) == []
    assert await listed_torn(wal_name(4), wal_name(6)) == []
    found = await listed_torn(wal_name(4), wal_name(4))
    assert found == [(wal_name(4), FindingKind.MISSING)]


@pytest.mark.parametrize(
    ("last_seen", "expected"), [(6, []), (8, [(wal_name(8), FindingKind.MISSING)])]
)
async def test_a_safekeeper_may_leave_a_slot_empty(
    last_seen: int, expected: list[tuple[str, FindingKind]]
) -> None:
    """In the archive of safekeepers a slot before a filled one is missing only if it was seen.

    A safekeeper that archives several objects at once may die before one of them is there.
    """
    planted = Planted()
    members = [Member(bytes([number]) * 16, f"sk{number}:7660") for number in range(3)]
    planted.edit(
        wal_mode=WalMode.QUORUM,
        wal_generation=1,
        wal_members=tuple(map(str, members)),
        wal_id_last_seen=last_seen,
    )
    planted.objects.remove(wal_name(8))
    assert await listed(planted.store) == expected


async def test_what_is_missing_before_and_after_is_reported() -> None:
    """An object that is still referenced is missing, whatever edits of the manifest come in
    between.
    """
    planted = Planted()
    planted.objects.remove(sst_name(LEFT_SST))
    found = await listed_when(planted, "levels/", lambda: _publish(planted))
    assert found == [(sst_name(LEFT_SST), FindingKind.MISSING)]


async def test_what_is_published_meanwhile_is_no_orphan() -> None:
    """An SST that was listed before a manifest references it is not reported."""
    planted = Planted()
    info = replace(planted.sst(88, 2, [put(b"z", 9)]), level=3)
    table = SstTable.from_infos([*planted.current.leveled_ssts, info])
    act = partial(_publish, planted, leveled_ssts=table)
    assert await listed_when(planted, "levels/", act) == []


async def test_a_writer_that_takes_over_meanwhile_is_no_damage() -> None:
    """Slots of an epoch that was won after the check began are sound, and so are later loads."""
    planted = Planted()
    assert await listed_when(planted, "wal/", lambda: _take_over(planted)) == []


def _take_over(planted: Planted) -> None:
    loaded = planted.sst(88, 0, [put(b"n", 0)])
    load = PendingLoad("load-2", SstTable.from_infos([loaded]))
    nonce = b"the third writer"
    _publish(planted, writer_epoch=3, writer_nonce=nonce, pending_loads=(planted.load, load))
    planted.wal(10, epoch=3, nonce=nonce)
    planted.wal(11, control=[load_entry(load, SECOND_SEQ + 3)], epoch=3, nonce=nonce)


async def test_an_object_that_the_store_does_not_return() -> None:
    """An unreadable object is reported, not as damage, and the check goes on."""
    planted = Planted()
    planted.flip(wal_name(4), 20)
    for name, others in (
        (wal_name(3), [(wal_name(4), FindingKind.BAD_CHECKSUM)]),
        (manifest_name(PINNED), [(wal_name(4), FindingKind.BAD_CHECKSUM)]),
    ):
        store = FaultyStore(planted.store)
        store.fail("get", name, times=99)
        assert await listed(store) == sorted([(name, FindingKind.UNREADABLE), *others])
    assert not FindingKind.UNREADABLE.is_damage


def policy_at(version: int, database_id: bytes = DATABASE_ID) -> bytes:
    policy = replace(POLICY, version=version)
    return encode_policy(policy, database_id=database_id, write_id=bytes(16))


async def test_damage_of_access_policies() -> None:
    """Each version is read; none may be missing, or of another database."""
    planted = Planted()
    for version in (1, 2, 4, 5):
        planted.write(policy_name(version), policy_at(version))
    assert await listed(planted.store) == [(policy_name(3), FindingKind.POLICY)]
    planted.write(policy_name(3), policy_at(3))
    assert await listed(planted.store) == []
    planted.flip(policy_name(2), 200)
    planted.lose(policy_name(5))
    planted.write(policy_name(5), policy_at(5, b"another database"))
    assert await listed(planted.store) == [
        (policy_name(2), FindingKind.BAD_CHECKSUM),
        (policy_name(5), FindingKind.WRONG_OBJECT),
    ]


async def test_a_sound_database_has_no_findings() -> None:
    """A database with every kind of object has no findings; all objects are counted, and nothing is
    written.
    """
    planted = Planted()
    store = FaultyStore(planted.store)
    fsck = Fsck(CasStore(store, inline_runtime(), StoreSettings()), parallel=1)
    assert await gathered(fsck.findings()) == []
    seen = fsck.progress
    assert (seen.manifests, seen.wal_objects, seen.fences, seen.ssts) == (2, 8, 2, 7)
    assert seen.objects_total == 15
    infos = [*planted.objects.page("wal/", ""), *planted.objects.page("levels/", "")]
    leased = 1
    assert len(infos) == 15 + leased
    assert 0 < seen.bytes_total < seen.size_bytes < sum(info.size_bytes for info in infos) + 5_000
    assert store.asked("create") == store.asked("delete") == []
    deep = Fsck(planted.cas, is_deep=True)
    assert await gathered(deep.findings()) == []
    assert deep.progress.merged_keys == len({b"a", b"c", b"m", b"p", b"y"})


async def test_where_there_is_no_database() -> None:
    """An empty store is an error, not a clean database."""
    cas = CasStore(MemoryStore(lambda: NOW_MS), inline_runtime(), StoreSettings())
    with pytest.raises(DatabaseNotFound):
        await gathered(Fsck(cas).findings())
