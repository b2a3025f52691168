"""The random test of tailing finds bugs that are planted into it.

Each replaces one function of the shipped code by a plausible wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shalekv.core.quorum.membership import Configuration
from shalekv.core.quorum.reading import Answer, News, Position
from shalekv.core.quorum.record import Mark, Record
from shalekv.engine import applying, tailing
from shalekv.engine.following import Follower
from shalekv.format.sst import Sst
from tests.sim.planting import Patch, first_failure
from tests.unit.engine.tailing.replication import replicate

SEEDS_MAX = 12


def newest_of_anybody(_: Configuration, answers: Mapping[bytes, Answer]) -> Mark | None:
    """Whoever answers is believed."""
    return max((each.log.last for each in answers.values()), key=lambda m: m.rank, default=None)


def held_at_once(_self: Position, _newest: Mark) -> bool:
    """A majority has answered: so the replica is new, whatever it has applied."""
    return True


def all_of_it(found: Sst, *, applied_seq: int, applied_count: int) -> Sst:
    """An object is applied whole, although a part of it was."""
    del applied_seq, applied_count
    return found


def next_after_gap(self: Position, record: Record) -> News:
    """What is missing is not missed."""
    return News.KNOWN if record.wal_id < self.next_wal_id else News.NEXT


async def fresh_at_the_end(self: Follower, asked_ms: float) -> None:
    """The end of the bucket is the end of the log."""
    self.is_fresh(asked_ms)


def whole_at_once(self: Position, record: Record) -> Position:
    """The first record of an object is all of it."""
    del self
    return Position(record.wal_id, record.mark)


BUGS: Mapping[str, Sequence[Patch]] = {
    "one member proves": [(tailing, "newest_of_majority", newest_of_anybody)],
    "nothing need be applied": [(Position, "holds", held_at_once)],
    "parts are applied again": [(applying, "rest_of_object", all_of_it)],
    "gaps are passed over": [(Position, "judge", next_after_gap)],
    "the bucket's end is fresh": [(Follower, "saw_end", fresh_at_the_end)],
    "open objects are whole": [(Position, "after", whole_at_once)],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_tailing_is_caught(bug: str) -> None:
    """Each planted bug breaks I6, or stops a replica, for some seed."""
    seed = first_failure(BUGS[bug], replicate, seeds=SEEDS_MAX)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
