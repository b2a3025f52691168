"""Retention of the WAL: a run without a hole up to c, of the young, and of no more than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.collectable import Folder, Listed
from shalekv.core.manifest import Manifest
from shalekv.core.snapshot import NEVER
from shalekv.core.wal_lease import find_wal_lease, hold_wal
from shalekv.core.wal_retention import HOLDER, WalRetention, retain_wal, retained_from

EMPTY = Manifest(database_id=bytes(16), manifest_id=7, write_id=bytes(16))
AT_5 = replace(EMPTY, wal_id_last_compacted=5)
YOUNG = WalRetention(young_ms=100, bytes_max=1_000)


def wal(number: int, modified_ms: int, size_bytes: int = 10) -> Listed:
    """A WAL object as it was listed."""
    return Listed(Folder.WAL, f"wal/{number}", size_bytes, modified_ms, number=number)


def aged(*modified_ms: int) -> Sequence[Listed]:
    """The WAL objects from 0 on."""
    return [wal(number, at_ms) for number, at_ms in enumerate(modified_ms)]


def claimed(manifest: Manifest) -> int | None:
    """From where on the retention keeps the WAL."""
    lease = find_wal_lease(manifest, HOLDER)
    return lease.wal_id_min if lease is not None else None


def test_run_begins_with_the_oldest_object_that_is_young() -> None:
    """Young is `>=`; an old one among young ones stays as well."""
    assert retained_from(AT_5, aged(1, 1, 99, 100, 101, 102), YOUNG) == 3
    assert retained_from(AT_5, aged(1, 100, 1, 1, 1, 1), YOUNG) == 1
    assert retained_from(AT_5, aged(*[99] * 6), YOUNG) == 5
    assert retained_from(AT_5, aged(*[100] * 6), YOUNG) == 0
    assert retained_from(AT_5, aged(*[100] * 6), None) == 5
    assert retained_from(EMPTY, aged(*[100] * 6), YOUNG) == 0


@given(
    modified_ms=st.lists(st.integers(0, 200), max_size=20),
    gone=st.sets(st.integers(0, 20)),
    c=st.integers(0, 20),
    bytes_max=st.integers(0, 200),
)
def test_whatever_is_retained_is_there_and_reaches_c(
    modified_ms: list[int], gone: set[int], c: int, bytes_max: int
) -> None:
    """Every slot of the run was listed, its first is young, and its bytes are within bounds."""
    listing = [each for each in aged(*modified_ms) if each.number not in gone]
    manifest = replace(EMPTY, wal_id_last_compacted=c)
    first = retained_from(manifest, listing, replace(YOUNG, bytes_max=bytes_max))
    run = [each for each in listing if each.number is not None and first <= each.number < c]
    assert [each.number for each in run] == list(range(first, c))
    assert sum(each.size_bytes for each in run) <= bytes_max
    assert not run or run[0].modified_ms >= YOUNG.young_ms


def test_claim_follows_the_run() -> None:
    """It lives for ever, moves on and never back, and goes when nothing is retained."""
    first = retain_wal(AT_5, 5)
    assert claimed(first) == 5
    assert first.leases[0].expire_time_s == NEVER
    later = replace(first, wal_id_last_compacted=50)
    assert retain_wal(later, 5) == later
    assert retain_wal(later, 3) == later
    assert claimed(retain_wal(later, 20)) == 20
    assert retain_wal(later, None).leases == ()


def test_claim_begins_with_what_is_protected() -> None:
    """What an older manifest has given up may be deleted by whoever judged by that one (F3)."""
    assert claimed(retain_wal(AT_5, 2)) == 5
    held = replace(hold_wal(AT_5, "me", 5, 1), wal_id_last_compacted=50)
    assert claimed(retain_wal(held, 2)) == 5
    assert claimed(retain_wal(held, 9)) == 9
