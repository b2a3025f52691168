"""Runs that have failed once: what was wrong then, and is not any more.

A change of the workload draws other runs from a seed, so what is found also gets a test of its own
where there is a place for one; RELIABILITY.md names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.sim.options import Options, Trouble
from tests.sim.outcomes import Task, run_task


@dataclass(frozen=True, slots=True)
class Found:
    """A run, and what it has shown."""

    what: str
    task: Task


FOUND = (
    Found(
        "a sender to a safekeeper waits in circles for the rest of a microsecond",
        Task(
            "quorum",
            26,
            Options(
                25,
                1,
                frozenset({Trouble.STORE, Trouble.CRASHES, Trouble.PAUSES, Trouble.TAKEOVERS}),
            ),
        ),
    ),
    Found("an opener is never done, as its fences are merged at once", Task("two_phase", 4)),
    Found("an opener is never done, as its fences are merged at once", Task("two_phase", 25)),
    Found("a refused transaction keeps the levels that it was decided by", Task("database", 13)),
    Found("a full log is trimmed only when it is time for a look", Task("quorum", 101_508)),
    Found("an archiver waits in circles for the rest of a microsecond", Task("quorum", 110_405)),
    Found("a safekeeper that was asked to stop stays down in peace", Task("quorum", 106_039)),
    Found("a delete of no keys is asked for a durable state", Task("writers", 106_200)),
    Found("safekeepers are woken in the order of addresses in memory", Task("quorum", 1)),
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("found", FOUND, ids=lambda found: str(found.task))
def test_what_was_found_once_is_mended(found: Found) -> None:
    """The run passes."""
    outcome = run_task(found.task)
    assert not outcome.has_failed, f"{found.what}: {outcome.problem}"
