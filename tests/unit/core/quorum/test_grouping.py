"""Where objects of the archive begin and end, as the writer decides it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.quorum.grouping import (
    CHARGED_INTERVAL_MS,
    FREE_INTERVAL_MS,
    Grouping,
    GroupingPolicy,
    Place,
)

POLICY = GroupingPolicy(interval_ms=100, object_bytes=1_000)
DAY_MS = 24 * 60 * 60 * 1_000


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


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 150), st.integers(1, 1_500), st.booleans()), max_size=40
    ),
    interval_ms=st.sampled_from([0, 100]),
)
def test_objects_follow_each_other(steps: list[tuple[int, int, bool]], interval_ms: int) -> None:
    """Ids rise by one, nothing follows an end, and no object outlives its interval by more than
    the record that ends it.
    """
    grouping = Grouping(GroupingPolicy(interval_ms, 1_000), next_wal_id=5)
    now_ms, last = 0, Place(4, ends_object=True)
    begun_ms, size_bytes = 0, 0
    for wait_ms, record_bytes, is_alone in steps:
        now_ms += wait_ms
        place, grouping = grouping.take_alone() if is_alone else grouping.take(record_bytes, now_ms)
        if place.wal_id == last.wal_id:
            assert not last.ends_object
            assert now_ms < begun_ms + interval_ms or place.ends_object
            size_bytes += record_bytes
            assert size_bytes <= 1_000
        else:
            assert place.wal_id == last.wal_id + 1
            begun_ms, size_bytes = now_ms, record_bytes
        assert place.ends_object or (interval_ms and size_bytes < 1_000)
        assert (grouping.begun is None) == place.ends_object
        last = place


def test_the_default_spacing_keeps_requests_few() -> None:
    """At most 20 objects a second where requests are free, and 4 where they are paid for."""
    assert 1_000 / FREE_INTERVAL_MS <= 20
    assert DAY_MS // FREE_INTERVAL_MS == 1_728_000
    assert 1_000 / CHARGED_INTERVAL_MS <= 4
    assert DAY_MS // CHARGED_INTERVAL_MS == 345_600
