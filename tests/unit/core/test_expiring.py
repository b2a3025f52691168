"""Which values expire when: the newest version of each key, as many as there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import Entry, Kind
from shalekv.core.expiring import BUCKET_MS, VALUE_BYTES, Expiring, ExpiringValues

ROOMY = 1 << 30


def put(key: bytes, seq: int, expire_at_ms: int = 0) -> Entry:
    """A value, for ever or for a time."""
    return Entry(key, seq, Kind.PUT, b"v", expire_at_ms)


def delete(key: bytes, seq: int) -> Entry:
    """A delete."""
    return Entry(key, seq, Kind.TOMBSTONE)


def values(*entries: Entry, bytes_max: int = ROOMY) -> ExpiringValues:
    """These were written in this order."""
    found = ExpiringValues(bytes_max=bytes_max, through_seq=0)
    found.note(entries)
    return found


def due(found: ExpiringValues, now_ms: int, count_max: int = 100) -> set[Expiring]:
    """What is taken."""
    return set(found.take_due(now_ms, count_max))


def test_newer_versions_replace_and_older_ones_do_not() -> None:
    """A delete, a value for ever and one for another time do; what lands late does not."""
    found = values(put(b"a", 1, 10), put(b"b", 2, 10), put(b"c", 3, 10), put(b"d", 9, 20))
    found.note([delete(b"a", 4), put(b"b", 5), put(b"c", 6, 90_000), put(b"d", 7, 10)])
    assert due(found, 50_000) == {Expiring(b"d", 9, 20)}
    assert due(found, 100_000) == {Expiring(b"c", 6, 90_000)}


def test_what_was_taken_can_be_put_back_or_dropped() -> None:
    """Unless it was replaced meanwhile, which is noticed although it is not due any more."""
    found = values(*(put(b"%d" % n, n, 10) for n in range(1, 5)))
    taken = found.take_due(10_000, 2)
    assert len(taken) == 2
    replaced, kept = taken
    found.note([delete(replaced.key, 8)])
    assert [found.holds(each) for each in taken] == [False, True]
    found.put_back(taken)
    rest = due(found, 10_000)
    assert len(rest) == 3
    assert kept in rest
    found.drop(rest)
    assert (len(found), found.size_bytes) == (0, 0)


def test_those_that_expire_last_make_room() -> None:
    """Where they stood in the log is told: what is not newer has to be looked for elsewhere."""
    entries = [put(b"%04d" % n, n, (200 - n) * BUCKET_MS) for n in range(100)]
    found = values(*entries, bytes_max=50 * (VALUE_BYTES + 4))
    assert 40 < len(found) <= 50
    left = due(found, 10**9)
    soonest = sorted(entries, key=lambda entry: entry.expire_at_ms)
    missing = {entry.seq for entry in entries} - {each.seq for each in left}
    assert {each.seq for each in left} <= {entry.seq for entry in soonest[:50]}
    assert found.through_seq == max(missing)


def test_loads_and_range_deletes_cast_doubt() -> None:
    """A load may have written, too, so that there is more to look for than what is here."""
    found = values()
    found.doubt(7)
    assert (found.through_seq, found.doubtful_seq) == (0, 7)
    found.miss(9)
    found.doubt(8)
    assert (found.through_seq, found.doubtful_seq) == (9, 9)


WRITES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 1, 900, 5_000, 70_000]), st.booleans()),
    max_size=60,
)


@given(writes=WRITES, looks=st.lists(st.integers(0, 80_000), max_size=8))
def test_whatever_is_newest_and_expires_is_due_once(
    writes: list[tuple[int, int, bool]], looks: list[int]
) -> None:
    """In any history, what is taken are the newest versions that have expired, and all of them."""
    found = ExpiringValues(bytes_max=ROOMY, through_seq=0)
    newest: dict[bytes, Entry] = {}
    for seq, (number, expire_at_ms, is_delete) in enumerate(writes, 1):
        key = b"%d" % number
        entry = delete(key, seq) if is_delete else put(key, seq, expire_at_ms)
        newest[key] = entry
        found.note([entry])
    for now_ms in sorted(looks):
        taken = found.take_due(now_ms, 3)
        for each in taken:
            entry = newest.pop(each.key)
            assert (entry.seq, entry.expire_at_ms) == (each.seq, each.expire_at_ms)
            assert 0 < each.expire_at_ms <= now_ms
        found.drop(taken)
    left = {key for key, entry in newest.items() if entry.expire_at_ms}
    assert {each.key for each in found.take_due(10**6, 100)} == left
    assert found.size_bytes == len(left) * (VALUE_BYTES + 1)
