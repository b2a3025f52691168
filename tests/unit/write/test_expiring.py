"""Tests of expiry: the index of expiring values, their sweep, and the edit before deletions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.manifest import Lease, Manifest, Snapshot
from shalekv.protocol.retention import Folder, Listed, expire, is_edit_needed, is_expiry_published
from shalekv.protocol.snapshot import NEVER
from shalekv.protocol.transaction import Add, Change, Expire, Get, Put, Transaction
from shalekv.write.expiry_sweep import BUCKET_MS, VALUE_BYTES, Expiring, ExpiringValues
from tests.kit.states import NOW_MS, DictState, entry_of, state_of

UNLIMITED = 1 << 30


def put(key: bytes, seq: int, expire_at_ms: int = 0) -> Entry:
    return Entry(key, seq, Kind.PUT, b"v", expire_at_ms)


def delete(key: bytes, seq: int) -> Entry:
    return Entry(key, seq, Kind.TOMBSTONE)


def values(*entries: Entry, bytes_max: int = UNLIMITED) -> ExpiringValues:
    found = ExpiringValues(bytes_max=bytes_max, through_seq=0)
    found.add(entries)
    return found


def due(found: ExpiringValues, now_ms: int, count_max: int = 100) -> set[Expiring]:
    return set(found.take_due(now_ms, count_max))


def test_newer_versions_replace_and_older_ones_do_not() -> None:
    """A newer version of a key replaces the known one, and an older one does not."""
    found = values(put(b"a", 1, 10), put(b"b", 2, 10), put(b"c", 3, 10), put(b"d", 9, 20))
    found.add([delete(b"a", 4), put(b"b", 5), put(b"c", 6, 90_000), put(b"d", 7, 10)])
    assert due(found, 50_000) == {Expiring(b"d", 9, 20)}
    assert due(found, 100_000) == {Expiring(b"c", 6, 90_000)}


def test_what_was_taken_can_be_put_back_or_dropped() -> None:
    """A taken value can be put back or dropped, unless it was replaced meanwhile."""
    found = values(*(put(b"%d" % n, n, 10) for n in range(1, 5)))
    taken = found.take_due(10_000, 2)
    assert len(taken) == 2
    replaced, kept = taken
    found.add([delete(replaced.key, 8)])
    assert [found.holds(each) for each in taken] == [False, True]
    found.put_back(taken)
    rest = due(found, 10_000)
    assert len(rest) == 3
    assert kept in rest
    found.drop(rest)
    assert (len(found), found.size_bytes) == (0, 0)


def test_values_that_expire_last_are_dropped() -> None:
    """Beyond the bound the values that expire last are dropped, and `through_seq` covers them."""
    entries = [put(b"%04d" % n, n, (200 - n) * BUCKET_MS) for n in range(100)]
    found = values(*entries, bytes_max=50 * (VALUE_BYTES + 4))
    assert 40 < len(found) <= 50
    left = due(found, 10**9)
    soonest = sorted(entries, key=lambda entry: entry.expire_at_ms)
    missing = {entry.seq for entry in entries} - {each.seq for each in left}
    assert {each.seq for each in left} <= {entry.seq for entry in soonest[:50]}
    assert found.through_seq == max(missing)


def test_loads_and_range_deletes_are_recorded() -> None:
    """A range delete raises `uncertain_seq`; a load, which may have written, both limits."""
    found = values()
    found.mark_uncertain(7)
    assert (found.through_seq, found.uncertain_seq) == (0, 7)
    found.mark_untracked(9)
    found.mark_uncertain(8)
    assert (found.through_seq, found.uncertain_seq) == (9, 9)


EXPIRED = entry_of(b"k", b"v", 5, NOW_MS)


def sweep(state: DictState, known: Entry | None = None) -> list[Change]:
    return [*Transaction([Expire(b"k", known)]).decide(state).changes]


def test_expired_value_becomes_a_tombstone_that_says_so() -> None:
    """The tombstone has the expiry of the value, whether that is in memory or in the levels."""
    expected = [Change(b"k", Kind.TOMBSTONE, b"", NOW_MS)]
    assert sweep(state_of(EXPIRED)) == expected
    assert sweep(state_of(), EXPIRED) == expected


@pytest.mark.parametrize(
    "newest",
    [
        entry_of(b"k", b"v", 6),
        entry_of(b"k", b"v", 6, NOW_MS + 1),
        Entry(b"k", 6, Kind.TOMBSTONE),
        Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS),
        Entry(b"a", 6, Kind.RANGE_TOMBSTONE, b"z"),
    ],
)
def test_newer_versions_stay(newest: Entry) -> None:
    """A sweep changes nothing if the newest version is not an expired value."""
    state = DictState({b"k": newest})
    assert sweep(state) == []
    assert sweep(state, EXPIRED) == []


def test_sweep_rests_on_state_and_asks_for_what_it_does_not_know() -> None:
    """A sweep depends on earlier commits, and reads only keys whose version is not known."""
    transaction = Transaction([Expire(b"a"), Expire(b"b", EXPIRED), Expire(b"c")])
    assert transaction.depends_on_state
    assert transaction.needs().keys == (b"a", b"c")
    assert not Transaction([Put(b"k", b"v")]).depends_on_state


def test_tombstone_of_a_sweep_is_one_like_any_other() -> None:
    """After a sweep reads find nothing, a range is empty, and a counter begins anew."""
    swept = DictState({b"k": Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS - 1)})
    assert swept.visible(b"k") is None
    assert not swept.has_keys(KeyRange(b"", b""))
    decision = Transaction([Get(b"k"), Add(b"k", 3)]).decide(swept)
    assert decision.results[1] == 3
    assert not Entry(b"k", 6, Kind.TOMBSTONE, b"", NOW_MS + 1).is_visible(NOW_MS)


NOW_S = 1_000
EMPTY = Manifest(database_id=bytes(16), manifest_id=3, write_id=bytes(16), gc_cutoff_ms=500)
FULL = replace(
    EMPTY,
    snapshots=tuple(Snapshot(bytes([t % 251]) * 16, 1, t) for t in (NEVER, 999, 1_000, 1_001)),
    leases=tuple(Lease(bytes([t % 251]) * 16, t, "job") for t in (NEVER, 999, 1_000, 1_001)),
)
SST = Listed(Folder.LEVELS, "levels/x", 1, 500, sst_id=bytes(16))


def test_what_has_expired_is_dropped() -> None:
    """Snapshots and leases are dropped if their expiry is before now; 0 is never."""
    expired = expire(FULL, NOW_S, 0)
    assert [s.snapshot_expire_time_s for s in expired.snapshots] == [NEVER, 1_000, 1_001]
    assert [lease.expire_time_s for lease in expired.leases] == [NEVER, 1_000, 1_001]
    assert expire(FULL, NOW_S + 0.001, 0).leases == (FULL.leases[0], FULL.leases[3])


def test_cutoff_is_raised_and_never_lowered() -> None:
    """The later of the published cutoff and the new one is kept."""
    assert expire(EMPTY, NOW_S, 501).gc_cutoff_ms == 501
    assert expire(EMPTY, NOW_S, 499).gc_cutoff_ms == 500


def test_edit_is_found_in_what_follows_it() -> None:
    """A manifest contains the edit if it has nothing expired and a cutoff that is high enough."""
    edited = expire(FULL, NOW_S, 600)
    assert is_expiry_published(edited, NOW_S, 600)
    assert is_expiry_published(replace(edited, gc_cutoff_ms=700, manifest_id=9), NOW_S, 600)
    assert not is_expiry_published(replace(edited, gc_cutoff_ms=599), NOW_S, 600)
    assert not is_expiry_published(replace(edited, snapshots=FULL.snapshots), NOW_S, 600)
    assert not is_expiry_published(replace(edited, leases=FULL.leases), NOW_S, 600)


def test_edit_is_needed_for_what_has_expired() -> None:
    """An expired snapshot or lease needs an edit even if nothing is deleted."""
    for part in ({"snapshots": FULL.snapshots}, {"leases": FULL.leases}):
        current = replace(EMPTY, **part)
        assert is_edit_needed(current, expire(current, NOW_S, 0), [])
    assert not is_edit_needed(EMPTY, expire(EMPTY, NOW_S, 600), [])


def test_edit_is_needed_for_ssts_that_the_cutoff_does_not_cover() -> None:
    """Objects older than the published cutoff can be deleted without another edit."""
    raised = expire(EMPTY, NOW_S, 600)
    for listed in (SST, replace(SST, folder=Folder.WAL, number=3, sst_id=None)):
        assert is_edit_needed(EMPTY, raised, [listed])
        assert not is_edit_needed(EMPTY, raised, [replace(listed, modified_ms=499)])
