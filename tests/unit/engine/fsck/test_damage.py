"""Damage of manifests and of the WAL is found where it was planted, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shalekv.core.audit.finding import FindingKind as Kind
from shalekv.core.manifest import CasMode, Lease, Snapshot
from shalekv.format.load_record import load_entry
from shalekv.format.names import manifest_name, wal_name
from shalekv.format.sst_encode import encode_sst
from tests.kit.engine.damage import (
    CURRENT,
    DATABASE_ID,
    LAST_COMPACTED_SEQ,
    LEASE_ID,
    NONCES,
    NOW_S,
    PINNED,
    SECOND_SEQ,
    Planted,
    findings,
    found,
    properties,
)
from tests.kit.samples import put

OLD, NOW = manifest_name(PINNED), manifest_name(CURRENT)
W = [wal_name(number) for number in range(14)]
Plant = Callable[[Planted], object]
Row = tuple[str, Plant, list[tuple[str, Kind]]]

MANIFESTS: list[Row] = [
    ("fence width", lambda p: p.edit(fence_width=0), [(NOW, Kind.MANIFEST_FIELD)]),
    (
        "levels without c",
        lambda p: p.edit(wal_id_last_compacted=None),
        [
            (W[0], Kind.MISSING),
            (W[2], Kind.WAL_BOUNDARY),
            (W[3], Kind.WAL_BOUNDARY),
            (NOW, Kind.MANIFEST_FIELD),
            (NOW, Kind.MANIFEST_ORDER),
        ],
    ),
    (
        "a snapshot twice",
        lambda p: p.edit(snapshots=(p.current.snapshots[0], p.current.snapshots[0])),
        [(NOW, Kind.MANIFEST_FIELD), (NOW, Kind.MANIFEST_FIELD)],  # its id and its name
    ),
    (
        "a snapshot of the future",
        lambda p: p.edit(snapshots=(*p.current.snapshots, Snapshot(bytes(16), 9, NOW_S + 9))),
        [(NOW, Kind.MANIFEST_FIELD)],
    ),
    (
        "a lease twice",
        lambda p: p.edit(leases=(Lease(LEASE_ID, 0, "a"), Lease(LEASE_ID, 0, "b"))),
        [(NOW, Kind.MANIFEST_FIELD)],
    ),
    (
        "a load twice",
        lambda p: p.edit(pending_loads=(p.load, p.load)),
        [(NOW, Kind.MANIFEST_FIELD)],
    ),
    (
        "an epoch down",
        lambda p: p.edit(writer_epoch=1, writer_nonce=NONCES[1]),
        [(NOW, Kind.MANIFEST_ORDER), *((W[n], Kind.WAL_EPOCH) for n in (5, 6, 8, 9))],
    ),
    ("another mode", lambda p: p.edit(cas_mode=CasMode.TWO_PHASE), [(NOW, Kind.MANIFEST_ORDER)]),
    (
        "an epoch with two winners",
        lambda p: p.edit(compactor_nonce=b"c" * 16),
        [(NOW, Kind.MANIFEST_ORDER)],
    ),
    (
        "the manifest of a snapshot is another one",
        lambda p: p.write_manifest(replace(p.pinned, write_id=b"w" * 16)),
        [(OLD, Kind.SNAPSHOT_CHECKSUM)],
    ),
    ("the manifest of a snapshot is gone", lambda p: p.objects.remove(OLD), [(OLD, Kind.MISSING)]),
    (
        "the manifest of a snapshot is damaged",
        lambda p: p.flip(OLD, 30),
        [(OLD, Kind.BAD_CHECKSUM)],
    ),
]


@pytest.mark.parametrize(
    ("plant", "expected"), [row[1:] for row in MANIFESTS], ids=[row[0] for row in MANIFESTS]
)
async def test_damage_of_manifests(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """What contradicts itself, goes down, is gone, or is damaged."""
    planted = Planted()
    plant(planted)
    assert await found(planted) == sorted(expected)


async def test_a_damaged_current_manifest_does_not_end_the_check() -> None:
    """It is told, and the newest one that can be read says what to look at."""
    planted = Planted()
    planted.flip(NOW, -1)
    planted.flip(W[4], 20)
    kinds = await found(planted)
    assert (NOW, Kind.BAD_CHECKSUM) in kinds
    assert (W[4], Kind.BAD_CHECKSUM) in kinds
    assert Kind.ORPHAN not in [kind for _, kind in kinds]  # nobody knows what that manifest names


async def test_no_manifest_that_can_be_read() -> None:
    """All of them are told, and that is all that can be said."""
    planted = Planted()
    planted.flip(NOW, 0)
    planted.write(OLD, b"cut")
    assert await found(planted) == [(OLD, Kind.TRUNCATED), (NOW, Kind.BAD_MAGIC)]


WAL: list[Row] = [
    ("a block", lambda p: p.flip(W[6], 0), [(W[6], Kind.BAD_CHECKSUM)]),
    ("a cut", lambda p: p.write(W[4], b"1234"), [(W[4], Kind.TRUNCATED)]),
    ("another object", lambda p: p.write(W[4], p.data(W[3])), [(W[4], Kind.WRONG_OBJECT)]),
    ("c is gone", lambda p: p.objects.remove(W[3]), [(W[3], Kind.MISSING)]),
    ("a hole", lambda p: p.objects.remove(W[7]), [(W[7], Kind.MISSING)]),
    ("a long hole", lambda p: p.lose(*W[4:8]), [(W[4], Kind.MISSING)]),
    ("the last one that was seen is gone", lambda p: p.lose(*W[6:10]), [(W[6], Kind.MISSING)]),
    ("sequence numbers", lambda p: p.wal(6, [put(b"c", 41)], epoch=2), [(W[6], Kind.WAL_SEQUENCE)]),
    (
        "an older writer's data",
        lambda p: p.wal(7, [put(b"c", SECOND_SEQ)], epoch=1),
        [(W[7], Kind.WAL_EPOCH), (W[7], Kind.WAL_SEQUENCE)],
    ),
    (
        "one epoch with two writers",
        lambda p: p.wal(7, epoch=2, nonce=b"a third writer!!"),
        [(W[7], Kind.WAL_EPOCH)],
    ),
    ("an unknown epoch", lambda p: p.wal(10, epoch=3), [(W[10], Kind.WAL_EPOCH)]),
    (
        "compacted, with a number above",
        lambda p: p.wal(3, [put(b"a", LAST_COMPACTED_SEQ + 1)]),
        [(W[3], Kind.WAL_BOUNDARY), (W[4], Kind.WAL_SEQUENCE)],
    ),
    (
        "not compacted, with a number below",
        lambda p: p.wal(4, [put(b"b", LAST_COMPACTED_SEQ)]),
        [(W[4], Kind.WAL_BOUNDARY), (W[4], Kind.WAL_SEQUENCE)],
    ),
    (
        "a record that no version knows",
        lambda p: p.wal(8, system=[put(b"\x01k", SECOND_SEQ + 1, b"short")], epoch=2),
        [(W[8], Kind.TRUNCATED)],
    ),
    (
        "a load that nothing protects",
        lambda p: p.wal(
            9, control=[load_entry(replace(p.load, load_id="x"), SECOND_SEQ + 2)], epoch=2
        ),
        [(W[9], Kind.LOAD)],
    ),
]


@pytest.mark.parametrize(("plant", "expected"), [r[1:] for r in WAL], ids=[r[0] for r in WAL])
async def test_damage_of_the_wal(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """Bytes, holes, and slots that contradict those around them."""
    planted = Planted()
    plant(planted)
    assert await found(planted) == sorted(expected)


async def test_a_gap_that_nobody_fills_is_sound() -> None:
    """Behind the last slot that was surely written, uploads in flight may have left a gap."""
    planted = Planted()
    planted.edit(fence_width=3, max_parallel_writes=3)
    planted.wal(12, [put(b"z", SECOND_SEQ + 9)], epoch=2)
    assert await findings(planted) == []
    planted.wal(13, [put(b"z", SECOND_SEQ + 10)], epoch=2)
    assert await found(planted) == [(W[10], Kind.MISSING)]


async def test_objects_of_another_database() -> None:
    """An object that is intact and not ours is told by name."""
    planted = Planted()
    name = W[4]
    foreign = replace(properties(name, 1), database_id=b"another database")
    planted.write(name, encode_sst(foreign, [put(b"b", 41)], block_bytes=64))
    (finding,) = await findings(planted)
    assert (finding.name, finding.kind) == (name, Kind.WRONG_OBJECT)
    assert finding.offset is not None
    assert DATABASE_ID.hex() not in finding.problem
