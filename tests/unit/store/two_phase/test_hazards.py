"""Hazards of two-phase compare-and-swap, one at a time.

Each is a schedule in which a less careful store loses an acknowledged object. Records of another
database, or missing ones, are detected before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import pytest

from shalekv.errors import InvalidRequest, StoreRefused, StoreUnavailable
from shalekv.format.names import manifest_name, temporary_name, wal_name
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import Created, Exists, Repaired, RequestKind, Unknown
from shalekv.store.cas import Claimed, Taken
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.opening import CheckedTwoPhaseStore
from tests.kit.inline_runtime import inline_runtime
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.store import claim
from tests.unit.store.two_phase.cluster import (
    Cluster,
    Fate,
    Fates,
    Process,
    all_answered,
    collect,
    sweep,
)

NAME = wal_name(7)
OURS = b"write id 1: ours"
THEIRS = b"write id 2: theirs"
LOST = (Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE)


def creating(cluster: Cluster, data: bytes, fates: Fates = all_answered) -> Process:
    return Process(cluster.open(fates).create(NAME, data))


def claiming(cluster: Cluster, data: bytes, fates: Fates = all_answered) -> Process:
    return Process(claim(cluster.open(fates), NAME, data, runtime=cluster.runtime))


def sweeping(cluster: Cluster) -> Process:
    return Process(sweep(cluster.open()))


def in_order(request: str, fates: Sequence[Fate]) -> Fates:
    """Return these fates for the next requests of this name, and answer all others."""
    remaining = list(fates)

    def fate(made: str) -> Fate:
        return remaining.pop(0) if made == request and remaining else Fate.ANSWERED

    return fate


@pytest.mark.parametrize("paused_at", ["find", "insert", "delete", "withdraw"])
@pytest.mark.parametrize("resumed_to", ["insert", "copy", "landing"])
def test_a_source_is_deleted_while_its_owner_resumes(paused_at: str, resumed_to: str) -> None:
    """A copy that is in flight when its source is deleted never lands on a rival's object.

    The owner stalls before step 2, a collector deletes the source, and the owner resumes during the
    deletion. A rival finds neither source nor destination, and creates the object.
    """
    cluster = Cluster()
    owner = claiming(cluster, OURS)
    owner.until("insert")
    collector = sweeping(cluster)
    collector.until(paused_at)
    owner.until(resumed_to)
    collector.finish()
    rival = claiming(cluster, THEIRS).finish()
    seen = cluster.data(NAME)
    assert seen == (THEIRS if rival == Claimed() else OURS)
    reported = owner.finish()
    assert cluster.data(NAME) == seen
    assert reported == (Claimed() if seen == OURS else Taken(THEIRS, reported.is_first_owner))


def test_a_source_that_takes_over_is_deleted_while_its_owner_resumes() -> None:
    """The same for a source that is about to take over a dead record: the record changes first."""
    cluster = Cluster()
    cluster.table[Destination("memory://stepped", NAME)] = dead_record()
    owner = claiming(cluster, OURS)
    owner.until("take_over")
    collector = sweeping(cluster)
    collector.until("delete")
    owner.step()
    while owner.next_request in {"copy", "landing"} and not cluster.landings:
        owner.step()
    collector.finish()
    rival = claiming(cluster, THEIRS).finish()
    seen = cluster.data(NAME)
    reported = owner.finish()
    assert cluster.data(NAME) == seen
    assert (reported, rival).count(Claimed()) == 1


def dead_record(number: int = 0) -> CreateRecord:
    destination = Destination("memory://stepped", NAME)
    return CreateRecord(destination, temporary_name(NAME, bytes(16), number))


@pytest.mark.parametrize("begin", [lambda cluster: creating(cluster, OURS), sweeping])
def test_a_record_that_always_changes(begin: Callable[[Cluster], Process]) -> None:
    """A process that always loses its record to others gives up in the end, and has neither put nor
    deleted an object.
    """
    cluster = Cluster()
    crashed = creating(cluster, THEIRS)
    crashed.until("insert")
    crashed.crash()
    sources = cluster.temporary("wal/")
    process = begin(cluster)

    def step_among_others() -> None:
        for number in count():
            record = dead_record(number)
            cluster.table[record.destination] = record
            process.step()

    with pytest.raises(StoreUnavailable, match="times during the"):
        step_among_others()
    assert cluster.temporary("wal/") == sources
    assert cluster.data(NAME) is None


def test_a_copy_that_somebody_else_made() -> None:
    """An owner whose copy has no answer, or no source, checks whether another process made it."""
    cluster = Cluster()
    owner = creating(cluster, OURS, in_order("copy", [Fate.REQUEST_LOST]))
    owner.until("copy")
    assert creating(cluster, THEIRS).finish() == Exists()
    assert owner.finish() == Created()
    cluster = Cluster()
    owner = creating(cluster, OURS, in_order("find", [Fate.REQUEST_LOST]))
    owner.until("copy")
    assert creating(cluster, THEIRS).finish() == Exists()
    assert isinstance(owner.finish(), Unknown)


def test_a_copy_lands_late() -> None:
    """After a copy without an answer the source stays, so that no other object is put in
    its place.
    """
    cluster = Cluster()
    owner = creating(cluster, OURS, in_order("copy", [Fate.LATE]))
    assert isinstance(owner.finish(), Unknown)
    assert creating(cluster, THEIRS).finish() == Exists()
    cluster.land(cluster.landings[0])
    assert cluster.data(NAME) == OURS


@pytest.mark.parametrize("has_landed", [True, False])
def test_an_insert_lands_late(*, has_landed: bool) -> None:
    """After an insert without an answer the source stays for a process that completes it."""
    cluster = Cluster()
    owner = creating(cluster, OURS, in_order("insert", [Fate.LATE]))
    assert isinstance(owner.finish(), Unknown)
    if has_landed:
        cluster.catch_up(cluster.random)
    rival = creating(cluster, THEIRS).finish()
    assert rival == (Exists() if has_landed else Created())
    if not has_landed:
        cluster.catch_up(cluster.random)
    assert cluster.data(NAME) == (OURS if has_landed else THEIRS)


def test_a_doubtful_source_is_not_deleted_under_a_helper() -> None:
    """A process that does not know whether its record exists does not delete a source that a helper
    copies.
    """
    cluster = Cluster()
    fates = {"insert": Fate.REPLY_LOST, "find": Fate.REQUEST_LOST}
    owner = creating(cluster, OURS, lambda request: fates.get(request, Fate.ANSWERED))
    owner.until("find")
    helper = creating(cluster, THEIRS)
    helper.until("landing")
    assert isinstance(owner.finish(), Unknown)
    rival = claiming(cluster, b"write id 3").finish()
    assert rival == Taken(OURS)
    assert helper.finish() == Exists()
    assert cluster.data(NAME) == OURS


def test_a_lost_insert_makes_the_outcome_unknown() -> None:
    """A process that lost the reply to its insert, and finds a rival, reports an unknown
    outcome.
    """
    cluster = Cluster()
    creating(cluster, THEIRS).finish()
    lossy = in_order("insert", [Fate.REQUEST_LOST])
    assert isinstance(creating(cluster, OURS, lossy).finish(), Unknown)
    lossy = in_order("insert", [Fate.REQUEST_LOST])
    assert claiming(cluster, OURS, lossy).finish() == Taken(THEIRS, is_first_owner=False)


@pytest.mark.parametrize("request_name", ["put", "insert", "copy", "commit", "delete"])
@pytest.mark.parametrize("fate", LOST)
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_lost_reply(request_name: str, fate: Fate, *, is_taken: bool) -> None:
    """A claim ends with the true owner, whichever request had no answer."""
    cluster = Cluster()
    if is_taken:
        creating(cluster, THEIRS).finish()
    outcome = claiming(cluster, OURS, in_order(request_name, [fate])).finish()
    assert isinstance(outcome, Taken if is_taken else Claimed)
    while cluster.late:
        cluster.catch_up(cluster.random)
    while cluster.landings:
        cluster.land(cluster.landings[0])
    assert cluster.data(NAME) == (THEIRS if is_taken else OURS)
    Process(collect(cluster.open())).finish()
    assert cluster.temporary("wal/") == []


@pytest.mark.parametrize("fate", LOST)
def test_failures_after_the_copy_do_not_fail_a_create(fate: Fate) -> None:
    """A failure in a step after the copy does not fail the create. Without an answer to the first
    step there is no record, and a retry may succeed.
    """
    for request_name in ("commit", "delete"):
        cluster = Cluster()
        assert creating(cluster, OURS, in_order(request_name, [fate])).finish() == Created()
        assert Process(cluster.open().repair()).finish().unfinished == 0
        assert cluster.data(NAME) == OURS
    cluster = Cluster()
    cluster.table[Destination("memory://stepped", NAME)] = dead_record()
    reported = creating(cluster, OURS, in_order("take_over", [fate])).finish()
    assert isinstance(reported, Created if fate is Fate.REPLY_LOST else Unknown)
    cluster = Cluster()
    owner = creating(cluster, OURS, in_order("put", [fate]))
    with pytest.raises(StoreUnavailable):
        owner.finish()
    assert cluster.table == {}


def test_a_source_that_was_deleted_by_hand() -> None:
    """An open record without its source, whose object exists, is committed and not taken over."""
    cluster = Cluster()
    owner = creating(cluster, OURS)
    owner.until("commit")
    owner.crash()
    for name in cluster.temporary("wal/"):
        cluster.objects.remove(name)
    assert creating(cluster, THEIRS).finish() == Exists()
    assert cluster.data(NAME) == OURS
    found = cluster.record(NAME)
    assert found is not None
    assert found.is_committed


def test_a_dead_record_is_unfinished_until_it_is_wanted() -> None:
    """A repair leaves a dead record for a process that wants the name; the record of a collected
    name is deleted.
    """
    cluster = Cluster()
    cluster.table[Destination("memory://stepped", NAME)] = dead_record()
    assert Process(cluster.open().repair()).finish() == Repaired(unfinished=1)
    assert Process(cluster.open().repair(lambda _name: False)).finish() == Repaired(unfinished=1)
    assert creating(cluster, OURS).finish() == Created()
    assert Process(cluster.open().repair()).finish() == Repaired()
    cluster = Cluster()
    cluster.table[Destination("memory://stepped", NAME)] = dead_record()
    assert Process(cluster.open().repair(lambda _name: True)).finish() == Repaired(forgotten=1)
    assert cluster.table == {}


def test_records_go_after_their_objects() -> None:
    """A record stays while its object exists; a crash between the two deletions is repaired
    later.
    """
    cluster = Cluster()
    creating(cluster, OURS).finish()
    deleting = Process(cluster.open().delete([NAME]))
    deleting.until("delete_committed")
    assert cluster.data(NAME) is None
    assert cluster.record(NAME) is not None
    deleting.crash()
    assert Process(cluster.open().repair(lambda _name: False)).finish() == Repaired()
    assert cluster.record(NAME) is not None
    assert Process(cluster.open().repair(lambda name: name == NAME)).finish() == Repaired(
        forgotten=1
    )
    assert cluster.record(NAME) is None


def test_records_of_what_is_there_are_kept() -> None:
    """A record is not deleted while its object exists, even if it may be collected."""
    cluster = Cluster()
    names = [wal_name(number) for number in range(5)] + ["alone"]
    for name in names:
        Process(cluster.open().create(name, OURS)).finish()
    for name in (names[1], names[3]):
        cluster.objects.remove(name)
    assert Process(cluster.open().repair(lambda _name: True)).finish() == Repaired(forgotten=2)
    left = {destination.name for destination in cluster.table}
    assert left == {names[0], names[2], names[4], "alone"}


def test_an_open_record_is_not_deleted_with_its_object() -> None:
    """A collector that deletes an object too early does not free its name for a stalled owner."""
    cluster = Cluster()
    owner = creating(cluster, OURS)
    owner.until("commit")
    Process(cluster.open().delete([NAME])).finish()
    assert cluster.record(NAME) is not None
    assert owner.finish() == Created()


def test_names_of_temporary_objects_are_not_created() -> None:
    """The name of a temporary object is no valid destination."""
    with pytest.raises(InvalidRequest):
        Process(Cluster().open().create(temporary_name(NAME, bytes(16), 0), OURS))


def test_foreign_objects_are_deleted_as_they_are() -> None:
    """Foreign objects have no records, whatever their names are, and can be deleted."""
    cluster = Cluster()
    store = cluster.open()
    foreign = ["wal/é", f"wal/é.{'0' * 8}-{'0000-' * 3}{'0' * 12}.{'0' * 8}", "wal/notes.txt"]
    Process(store.delete(foreign)).finish()
    assert cluster.table == {}


def opened(objects: MemoryObjects, table: Table) -> CheckedTwoPhaseStore:
    plain = MemoryStore(lambda: 0, name="db", objects=objects)
    return CheckedTwoPhaseStore(plain, MemoryRecords(table=table), inline_runtime(len(table)))


async def test_its_own_records_are_recognised() -> None:
    """Without a manifest, any records are accepted. Another process with the same records creates
    and recovers. The manifest is searched only once.
    """
    objects, table = MemoryObjects(), Table()
    store = opened(objects, table)
    assert await store.create(manifest_name(0), b"0") == Created()
    before = store.sent.by_kind[RequestKind.LIST]
    assert await store.create(wal_name(1), b"0") == Created()
    assert store.sent.by_kind[RequestKind.LIST] == before
    assert await opened(objects, table).create(wal_name(0), b"wal") == Created()
    assert (await opened(objects, table).repair()).completed == 0


@pytest.mark.parametrize("name", [manifest_name(1), wal_name(0)])
async def test_other_records_are_refused(name: str) -> None:
    """With an empty table, or that of another database, nothing is written anywhere."""
    objects, table = MemoryObjects(), Table()
    await opened(objects, table).create(manifest_name(0), b"0")
    stranger = opened(objects, Table())
    with pytest.raises(StoreRefused, match="records_url"):
        await stranger.create(name, b"late")
    with pytest.raises(StoreRefused, match=r"0\.manifest"):
        await stranger.repair()
    assert stranger.sent.by_kind[RequestKind.WRITE] == 0
    assert stranger.sent.by_kind[RequestKind.RECORD_WRITE] == 0


async def test_a_manifest_that_goes_meanwhile_is_no_stranger() -> None:
    """If the newest manifest is superseded and collected between list and read of the record, the
    check is repeated.
    """
    objects, table = MemoryObjects(), Table()
    own = opened(objects, table)
    await own.create(manifest_name(0), b"0")

    class Late(MemoryRecords):
        async def find(self, destination: Destination) -> CreateRecord | None:
            if destination.name == manifest_name(0):
                await own.create(manifest_name(1), b"1")
                await own.delete([manifest_name(0)])
            return await super().find(destination)

    plain = MemoryStore(lambda: 0, name="db", objects=objects)
    late = CheckedTwoPhaseStore(plain, Late(table=table), inline_runtime(9))
    assert await late.create(manifest_name(2), b"2") == Created()
