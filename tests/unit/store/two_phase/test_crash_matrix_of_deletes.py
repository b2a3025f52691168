"""Whatever crashes where, a deletion leaves nothing that a later one does not find (I10).

Before and after each request of a collector, whatever the create has left that it meets; then the
name is claimed, or collected.
"""

from __future__ import annotations

import pytest

from shalekv.store.claim import Claimed, Taken
from tests.unit.store.two_phase.collection import collect
from tests.unit.store.two_phase.test_crash_matrix import (
    DECIDED,
    NAMES,
    OURS,
    STEPS,
    check_nothing_is_left,
    claims,
    owner_stalled,
    sweeps,
)
from tests.unit.store.two_phase.world import Process, World

REQUESTS_MAX = 12  # of a deletion
names = pytest.mark.parametrize("name", NAMES)
stalls = pytest.mark.parametrize("stalled_at", range(len(STEPS)), ids=lambda i: STEPS[i] or "end")


def crash_after(process: Process, requests: int) -> bool:
    """Have it make so many requests, and no more; whether it could have made another one."""
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
    """After each of its requests, the name has one winner, and nothing is left when it is swept."""
    for requests in range(REQUESTS_MAX):
        world = World()
        owner = owner_stalled(world, name, stalled_at)
        could_go_on = crash_after(Process(sweeps(world, name)), requests)
        if is_alive:
            owner.finish()
        else:
            owner.crash()
        told = Process(claims(world, name)).finish()
        assert told in (Claimed(), Taken(OURS))
        assert told == Taken(OURS) or stalled_at < DECIDED
        check_nothing_is_left(world, name)
        if not could_go_on:
            return
    pytest.fail("the deletion never ended")


@names
def test_a_deletion_of_an_object_crashes(name: str) -> None:
    """After each of its requests, object and record are both there, or go with the next one."""
    for requests in range(REQUESTS_MAX):
        world = World()
        owner_stalled(world, name, len(STEPS) - 1)
        could_go_on = crash_after(Process(world.open().delete([name])), requests)
        assert (world.record(name) is not None) or world.data(name) is None
        folder = name.partition("/")[0] + "/"
        for _ in range(2):
            Process(collect(world.open(), folder, lambda _name: True)).finish()
        assert world.data(name) is None
        assert world.table == {}
        if not could_go_on:
            return
    pytest.fail("the deletion never ended")
