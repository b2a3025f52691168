"""Damage of the levels is found where it was planted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shalekv.format.footer import Footer, read_footer
from shalekv.format.names import manifest_name
from shalekv.jobs.fsck import objects
from shalekv.protocol.audit import FindingKind as Kind
from shalekv.protocol.manifest import SYSTEM_LEVEL
from tests.kit.engine.damage import (
    CURRENT,
    L0_SST,
    LEFT_SST,
    LOADED_SST,
    LOWEST_SST,
    PINNED,
    RIGHT_SST,
    SYSTEM_SST,
    Plant,
    Planted,
    case,
    findings,
    found,
    record,
    sst_name,
)
from tests.kit.forging import patched, resealed
from tests.kit.samples import put, range_tombstone, tombstone

OLD, NOW = manifest_name(PINNED), manifest_name(CURRENT)
L0, LEFT, RIGHT, LOWEST, SYSTEM, LOADED = (
    sst_name(number) for number in (L0_SST, LEFT_SST, RIGHT_SST, LOWEST_SST, SYSTEM_SST, LOADED_SST)
)


def _swapped(planted: Planted, number: int, other: int) -> None:
    planted.write(sst_name(number), planted.data(sst_name(other)))


def _forged(planted: Planted, at: Callable[[Footer], int], new: Callable[[Footer], bytes]) -> None:
    """Change bytes of an SST, and make all checksums and the manifest match the result."""
    name = RIGHT
    data = planted.data(name)
    footer = read_footer(name, data, len(data), database_id=None)
    forged = resealed(name, data, patched(data, at(footer), new(footer)))
    planted.write(name, forged)
    checksum = read_footer(name, forged, len(forged), database_id=None).checksum
    planted.edit_sst(RIGHT_SST, checksum=checksum)


def _denying(planted: Planted) -> None:
    header = 16
    _forged(
        planted,
        lambda footer: footer.layout.filter_offset + header,
        lambda footer: bytes(footer.layout.filter_len - header),
    )


def _boasting(planted: Planted) -> None:
    """Make the footer claim more bytes of values than there are."""
    value_bytes_at = 64 + 9 * 8
    _forged(
        planted,
        lambda footer: footer.layout.index_offset + footer.layout.index_len + value_bytes_at,
        lambda _: b"\xff",
    )


SSTS = [
    case("a block", lambda p: p.flip(L0, 3), (L0, Kind.BAD_CHECKSUM)),
    case("what only a load needs", lambda p: p.flip(LOADED, 3), (LOADED, Kind.BAD_CHECKSUM)),
    case("gone", lambda p: p.objects.remove(LEFT), (LEFT, Kind.MISSING)),
    case("gone of a load", lambda p: p.objects.remove(LOADED), (LOADED, Kind.MISSING)),
    case(
        "another object",
        lambda p: _swapped(p, LEFT_SST, RIGHT_SST),
        (LEFT, Kind.SST_MISMATCH),
        (LEFT, Kind.WRONG_OBJECT),
    ),
    case(
        "an older object of the same name",
        lambda p: p.sst(RIGHT_SST, 1, [put(b"m", 14), tombstone(b"p", 14)]),
        (RIGHT, Kind.SST_MISMATCH),
        (RIGHT, Kind.WRONG_OBJECT),
    ),
    case(
        "longer than it says",
        lambda p: p.write(LEFT, p.data(LEFT) + b"x"),
        (LEFT, Kind.BAD_MAGIC),
        (LEFT, Kind.SST_MISMATCH),
    ),
    case(
        "the manifest says another range",
        lambda p: p.edit_sst(LEFT_SST, first_key=b"b"),
        (LEFT, Kind.SST_MISMATCH),
    ),
    case(
        "two manifests do not say the same",
        lambda p: p.edit_sst(LOWEST_SST, entry_count=9),
        (OLD, Kind.SST_ROW),
        (LOWEST, Kind.SST_MISMATCH),
    ),
    case("the footer counts wrong", _boasting, (RIGHT, Kind.BAD_STRUCTURE)),
    case("the filter denies a key", _denying, (RIGHT, Kind.BAD_STRUCTURE)),
    case(
        "ranges that overlap",
        lambda p: p.rewrite(LEFT_SST, 1, [put(b"a", 11), put(b"n", 12)]),
        (NOW, Kind.LEVEL_OVERLAP),
    ),
    case(
        "a range tombstone that is not clipped",
        lambda p: p.rewrite(LEFT_SST, 1, [put(b"a", 11)], [range_tombstone(b"d", b"z", 13)]),
        (NOW, Kind.LEVEL_OVERLAP),
    ),
    case(
        "L0 without an order",
        lambda p: p.rewrite(LEFT_SST, 0, [put(b"a", 32), put(b"c", 33)]),
        (NOW, Kind.LEVEL_SEQUENCE),
    ),
    case(
        "records among keys",
        lambda p: p.rewrite(LEFT_SST, 1, [put(b"a", 11)], system=[record(b"k", 12)]),
        (LEFT, Kind.LEVEL_SECTION),
    ),
    case(
        "keys among records",
        lambda p: p.rewrite(SYSTEM_SST, SYSTEM_LEVEL, [put(b"a", 11)], system=[record(b"k", 12)]),
        (SYSTEM, Kind.LEVEL_SECTION),
    ),
    case(
        "two versions of a key",
        lambda p: p.rewrite(LEFT_SST, 1, [put(b"a", 12), put(b"a", 11)]),
        (LEFT, Kind.REPEATED_KEY),
    ),
    case(
        "numbers that are not compacted",
        lambda p: p.rewrite(LEFT_SST, 1, [put(b"a", 41)]),
        (NOW, Kind.SST_ROW),
    ),
    case(
        "a level that does not exist", lambda p: p.edit_sst(LEFT_SST, level=64), (NOW, Kind.SST_ROW)
    ),
    case(
        "an id that is none",
        lambda p: p.edit_sst(L0_SST, id=bytes(16)),
        (NOW, Kind.SST_ROW),
        (L0, Kind.ORPHAN),
    ),
    case(
        "a range upside down",
        lambda p: p.edit_sst(L0_SST, first_key=b"z"),
        (NOW, Kind.SST_ROW),
        (L0, Kind.SST_MISMATCH),
    ),
]


@pytest.mark.parametrize(("plant", "expected"), SSTS)
async def test_damage_of_the_levels(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """Damaged bytes, objects other than those of the manifest, and violated rules of levels are
    found.
    """
    planted = Planted()
    plant(planted)
    assert await found(planted) == expected


async def test_orphans_are_reported_and_are_no_damage() -> None:
    """Objects that no manifest references and no lease protects are listed, also foreign files."""
    planted = Planted()
    planted.sst(99, 0, [put(b"a", 1)])
    planted.write("levels/notes.txt", b"mine")
    listed = await findings(planted)
    assert [(each.name, each.kind) for each in listed] == [
        (sst_name(99), Kind.ORPHAN),
        ("levels/notes.txt", Kind.ORPHAN),
    ]
    assert not any(each.kind.is_damage for each in listed)
    planted.edit(leases=())
    assert len(await findings(planted)) == 3


async def test_all_damage_of_one_object_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every damaged block is reported with its offset, and the filter as well; large objects are
    read in pieces.
    """
    monkeypatch.setattr(objects, "PIECE_BYTES", 100)
    planted = Planted()
    rows = [put(b"%03d" % number, 12, b"v" * 40) for number in range(20)]
    planted.rewrite(LEFT_SST, 1, rows)
    name = LEFT
    data = planted.data(name)
    layout = read_footer(name, data, len(data), database_id=None).layout
    damaged = (0, layout.filter_offset // 2, layout.filter_offset + 20)
    for at in damaged:
        planted.flip(name, at)
    listed = await findings(planted)
    assert {each.kind for each in listed} == {Kind.BAD_CHECKSUM}
    offsets = [each.offset for each in listed if each.offset is not None]
    assert len(offsets) == 3
    assert offsets[0] == layout.filter_offset
    assert offsets[1] == 0
    assert 0 < offsets[2] <= damaged[1]


STALE = [
    case(
        "a newer version below",
        lambda p: p.rewrite(L0_SST, 0, [put(b"c", 7), put(b"p", 31)]),
        (L0, Kind.STALE_VERSION),
    ),
    case(
        "the same version below",
        lambda p: p.rewrite(L0_SST, 0, [put(b"c", 12), put(b"p", 31)]),
        (L0, Kind.STALE_VERSION),
    ),
    case(
        "a newer range tombstone below",
        lambda p: p.rewrite(L0_SST, 0, [put(b"e", 12), put(b"p", 31)]),
        (L0, Kind.STALE_VERSION),
    ),
    case(
        "an older range tombstone above",
        lambda p: p.rewrite(L0_SST, 0, [put(b"p", 31)], [range_tombstone(b"a", b"b", 5)]),
        (L0, Kind.STALE_VERSION),
    ),
]


@pytest.mark.parametrize(("plant", "expected"), STALE)
async def test_versions_above_newer_ones(plant: Plant, expected: list[tuple[str, Kind]]) -> None:
    """Only the deep check merges keys, and reports those that are above newer ones."""
    planted = Planted()
    plant(planted)
    assert await findings(planted) == []
    assert await found(planted, is_deep=True) == expected


async def test_a_deep_check_of_damaged_levels_ends() -> None:
    """A deep check of levels that cannot be merged ends; the damage is reported once."""
    planted = Planted()
    planted.flip(LEFT, 3)
    assert await found(planted, is_deep=True) == [(LEFT, Kind.BAD_CHECKSUM)]
    planted = Planted()
    planted.rewrite(LEFT_SST, 1, [put(b"a", 11), put(b"n", 12)])
    assert await found(planted, is_deep=True) == [(NOW, Kind.LEVEL_OVERLAP)]
