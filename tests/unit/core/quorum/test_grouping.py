"""Where objects of the archive begin and end, as the writer decides it."""

from __future__ import annotations

from shalekv.core.quorum.grouping import (
    Grouping,
    GroupingPolicy,
    Place,
)

POLICY = GroupingPolicy(interval_ms=100, object_bytes=1_000)
def test_records_of_one_interval_share_an_object() -> None:
    """Whatever comes before the interval is over goes into one object, what ends it included."""
    grouping = Grouping(POLICY, next_wal_id=7)
    places = []
    for now_ms in (0, 1, 99, 100, 101):
        place, grouping = grouping.take(10, now_ms)
        places.append(place)
    assert places == [
        Place(7, ends_object=False),
        Place(7, ends_object=False),
        Place(7, ends_object=False),
        Place(7, ends_object=True),
        Place(8, ends_object=False),
    ]


def test_an_object_passes_its_size_only_by_one_record() -> None:
    """A record that would make an object too large begins another; one that fills it ends it."""
    grouping = Grouping(POLICY, next_wal_id=0)
    places = []
    for size_bytes in (600, 500, 500, 5_000, 1):
        place, grouping = grouping.take(size_bytes, 0)
        places.append(place)
    assert places == [
        Place(0, ends_object=False),
        Place(1, ends_object=False),
        Place(1, ends_object=True),
        Place(2, ends_object=True),
        Place(3, ends_object=False),
    ]


def test_fences_and_loads_are_alone() -> None:
    """What is taken alone begins an object and ends it, also while another is open."""
    _, grouping = Grouping(POLICY, next_wal_id=3).take(10, 0)
    place, grouping = grouping.take_alone()
    assert place == Place(4, ends_object=True)
    assert grouping.take(10, 1)[0] == Place(5, ends_object=False)


def test_an_idle_object_is_sealed_when_its_interval_is_over() -> None:
    """An open object has a time when it is to be sealed; sealed, none is open."""
    grouping = Grouping(POLICY, next_wal_id=3)
    assert grouping.seal() is None
    assert grouping.seal_due_ms is None
    _, grouping = grouping.take(10, 50)
    assert grouping.seal_due_ms == 150
    sealed = grouping.seal()
    assert sealed is not None
    place, grouping = sealed
    assert place == Place(3, ends_object=True)
    assert grouping.seal() is None
    assert grouping.take(10, 151)[0].wal_id == 4
