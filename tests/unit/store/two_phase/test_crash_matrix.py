"""Wherever a process crashes, a create in two phases has one winner, and leaves nothing behind
(I10).

The owner crashes or stalls before and after each of its five steps, and resumes or never does. A
rival creates the same name, or repairs, at that moment or interleaved with the owner. A later
deletion finds everything that a crashed one has left.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shalekv.format.names import manifest_name, wal_name
from shalekv.store.api import Created, Exists, Repaired
from shalekv.store.cas import Claimed, ClaimOutcome, Taken
from tests.kit.store import claim
from tests.unit.store.two_phase.cluster import Cluster, Process, collect, sweep

NAMES = (manifest_name(7), wal_name(7))
OURS = b"write id 1: ours"
THEIRS = b"write id 2: theirs"
REQUESTS_MAX = 12  # of a deletion

# Where the owner stalls: before each of its requests, and after the last one.
STEPS = ("put", "insert", "copy", "landing", "commit", "delete", "")
DECIDED = STEPS.index("copy")  # from here on it has won
names = pytest.mark.parametrize("name", NAMES)
stalls = pytest.mark.parametrize("stalled_at", range(len(STEPS)), ids=lambda i: STEPS[i] or "end")

Rival = Callable[[Cluster, str], Coroutine[Any, Any, Any]]


def folder_of(name: str) -> str:
    return name.partition("/")[0] + "/"


async def creates(cluster: Cluster, name: str) -> object:
    return await cluster.open().create(name, THEIRS)


async def claims(cluster: Cluster, name: str) -> ClaimOutcome:
    """A rival that also claims the name."""
    return await claim(cluster.open(), name, THEIRS, runtime=cluster.runtime)


async def repairs(cluster: Cluster, _name: str) -> Repaired:
    return await cluster.open().repair()


async def collects(cluster: Cluster, name: str) -> Repaired:
    """A collector to which every temporary object is old."""
    return await collect(cluster.open(), folder_of(name))


async def sweeps(cluster: Cluster, name: str) -> None:
    """A collector that deletes only the temporary objects."""
    await sweep(cluster.open(), folder_of(name))


rivals = pytest.mark.parametrize("rival", [creates, claims, repairs, collects])


def owner_stalled(cluster: Cluster, name: str, steps: int) -> Process:
    """An owner that has made so many requests, and stalls."""
    owner = Process(cluster.open().create(name, OURS, {"writer_epoch": "7"}))
    for expected in STEPS[:steps]:
        assert owner.next_request == expected
        owner.step()
    assert owner.next_request == STEPS[steps] or owner.is_done
    return owner


def check_nothing_is_left(cluster: Cluster, name: str) -> None:
    """After a collection there is a complete object with its record, or nothing at all."""
    Process(collects(cluster, name)).finish()
    data = cluster.data(name)
    assert data in (OURS, THEIRS, None)
    assert cluster.temporary(folder_of(name)) == []
    record = cluster.record(name)
    assert (record is not None and record.is_committed) == (data is not None)
    if data is None:
        assert record is None


def check_all_is_forgotten(cluster: Cluster, name: str) -> None:
    """Check that neither an object nor a record remains when the name is collected."""
    for _ in range(2):
        Process(collect(cluster.open(), folder_of(name), lambda _name: True)).finish()
    assert [info.name for info in cluster.objects.page(folder_of(name), "")] == []
    assert cluster.table == {}


@names
@stalls
@rivals
def test_the_owner_never_resumes(name: str, stalled_at: int, rival: Rival) -> None:
    """The create of an owner that crashed is completed once its record exists, and is nothing
    before.
    """
    cluster = Cluster()
    owner_stalled(cluster, name, stalled_at).crash()
    Process(rival(cluster, name)).finish()
    wins = rival in (creates, claims)
    expected = OURS if stalled_at >= DECIDED else THEIRS if wins else None
    assert cluster.data(name) == expected
    check_nothing_is_left(cluster, name)
    assert cluster.data(name) == expected


@names
@stalls
def test_a_crash_alone(name: str, stalled_at: int) -> None:
    """Without a rival, a collection completes decided creates and removes undecided ones. When the
    name is collected too, neither an object nor a record remains.
    """
    cluster = Cluster()
    owner_stalled(cluster, name, stalled_at).crash()
    check_nothing_is_left(cluster, name)
    assert cluster.data(name) == (OURS if stalled_at >= DECIDED else None)
    check_all_is_forgotten(cluster, name)
    cluster = Cluster()
    owner_stalled(cluster, name, stalled_at).crash()
    check_all_is_forgotten(cluster, name)


def crash_after(process: Process, requests: int) -> bool:
    """Run so many requests of a process, then crash it; return whether it had another one
    to make.
    """
    for _ in range(requests):
        if not process.is_done:
            process.step()
    could = not process.is_done
    process.crash()
    return could


@names
@stalls
@pytest.mark.parametrize("is_alive", [True, False], ids=["resumes", "crashed"])
def test_a_deletion_of_temporary_objects_crashes(
    name: str, stalled_at: int, *, is_alive: bool
) -> None:
    """After a crash behind each of its requests, the name has one winner, and nothing is left after
    the next sweep.
    """
    for requests in range(REQUESTS_MAX):
        cluster = Cluster()
        owner = owner_stalled(cluster, name, stalled_at)
        could_go_on = crash_after(Process(sweeps(cluster, name)), requests)
        if is_alive:
            owner.finish()
        else:
            owner.crash()
        reported = Process(claims(cluster, name)).finish()
        assert reported in (Claimed(), Taken(OURS))
        assert reported == Taken(OURS) or stalled_at < DECIDED
        check_nothing_is_left(cluster, name)
        if not could_go_on:
            return
    pytest.fail("the deletion never ended")


@names
def test_a_deletion_of_an_object_crashes(name: str) -> None:
    """After each of its requests, object and record both exist, or the next deletion removes what
    is left.
    """
    for requests in range(REQUESTS_MAX):
        cluster = Cluster()
        owner_stalled(cluster, name, len(STEPS) - 1)
        could_go_on = crash_after(Process(cluster.open().delete([name])), requests)
        assert (cluster.record(name) is not None) or cluster.data(name) is None
        check_all_is_forgotten(cluster, name)
        if not could_go_on:
            return
    pytest.fail("the deletion never ended")


def interleavings(name: str, begin: Callable[[], tuple[Cluster, list[Process]]]) -> int:
    """Run every order in which the processes can make their requests; return how many there were.

    Depth first: a run follows a given prefix of choices, then always the first possible one. The
    next run differs at the last position where another choice is left.
    """
    runs = 0
    choices: list[int] = []
    while True:
        cluster, processes = begin()
        seen: list[tuple[int, int]] = []
        first: bytes | None = None
        while going := [process for process in processes if not process.is_done]:
            at = choices[len(seen)] if len(seen) < len(choices) else 0
            seen.append((at, len(going)))
            going[at].step()
            data = cluster.data(name)
            assert first is None or data == first, "an object was changed or lost"
            first = data
        runs += 1
        check_all(cluster, name, processes)
        while seen and seen[-1][0] + 1 == seen[-1][1]:
            seen.pop()
        if not seen:
            return runs
        choices = [at for at, _ in seen[:-1]] + [seen[-1][0] + 1]


def check_all(cluster: Cluster, name: str, processes: list[Process]) -> None:
    """At most one process got `Created`, and the object has the bytes of that one."""
    reported = [process.result for process in processes]
    data = cluster.data(name)
    assert reported.count(Created()) + reported.count(Claimed()) <= 1, reported
    for outcome, written in zip(reported, (OURS, THEIRS), strict=False):
        if outcome in (Created(), Claimed()):
            assert data == written
        if outcome == Exists() or isinstance(outcome, Taken):
            assert data not in (None, written)
        if isinstance(outcome, Taken):
            assert outcome.data == data
    check_nothing_is_left(cluster, name)
    assert cluster.data(name) == data


@pytest.mark.parametrize(
    ("rival", "least"), [(creates, 1_500), (claims, 2_000), (repairs, 100), (sweeps, 800)]
)
def test_both_at_once(rival: Rival, least: int) -> None:
    """In every order of the requests of owner and rival there is one winner, and no orphan."""
    name = NAMES[1]

    def begin() -> tuple[Cluster, list[Process]]:
        cluster = Cluster()
        owner = Process(claim(cluster.open(), name, OURS, runtime=cluster.runtime))
        return cluster, [owner, Process(rival(cluster, name))]

    runs = interleavings(name, begin)
    assert runs >= least, "the processes hardly met"
