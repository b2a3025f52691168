"""The random test of replicas finds bugs that are planted into them.

Each replaces one function of the shipped code by a plausible wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shalekv.core.quorum.reading import Position
from shalekv.core.tree import Tree
from shalekv.engine.applying import Applying
from shalekv.engine.following import Follower
from shalekv.engine.memtable import Memtable
from shalekv.engine.progress import Progress
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.format.names import parse_wal_name
from shalekv.format.sst import Sst
from tests.kit.engine.replication import replicate
from tests.sim.planting import Patch, first_failure

SEEDS_MAX = 25

_apply_all = Follower._apply_all  # noqa: SLF001


async def always(_self: Follower, _first: int) -> bool:
    """Every answer counts, also one from before a long stop."""
    return True


async def no_gap(_self: Follower) -> bool:
    """What is not there is the end of the log, whatever stands behind it."""
    return False


def keep_all(_self: Memtable) -> None:
    """Memory keeps what is older than the levels that are read from now on."""


def apply_anything(self: Applying, found: Sst) -> None:
    """What the levels hold already is applied again."""
    wal_id = parse_wal_name(found.properties.name)
    assert wal_id is not None
    self._apply(found, wal_id, Position(wal_id))


async def apply_as_news(self: Follower) -> None:
    """What was applied just now is taken for all that there is, at the end of a look."""
    await _apply_all(self)
    self.is_fresh(self._clock.monotonic_ms())


async def wait_for_nothing(_self: Progress, _seq: int) -> None:
    """`min_seq` is not waited for."""


def stay(_self: Applying, _tree: Tree, **_state: int) -> None:
    """New levels are read, and the log goes on where it was."""


def move_slot(self: Applying, tree: Tree, **_state: int) -> None:
    """The log goes on behind the levels, and replies still have the old number."""
    assert tree.wal_id is not None
    self.position = Position(tree.wal_id)
    self._prefix.advance(self.seq, tree.wal_id)


BUGS: Mapping[str, Sequence[Patch]] = {
    "every answer counts": [(Follower, "_counts", always)],
    "a gap is the end": [(Follower, "_is_gap", no_gap)],
    "a lost snapshot is not noticed": [(TreeKeeper, "is_lost", property(lambda _self: False))],
    "memory hides newer levels": [(Memtable, "drop_all", keep_all)],
    "slots are applied again": [(Applying, "apply_object", apply_anything)],
    "what is applied is fresh": [(Follower, "_apply_all", apply_as_news)],
    "min_seq is ignored": [(Progress, "cover", wait_for_nothing)],
    "the log stays behind": [(Applying, "jump", stay)],
    "only the slot moves": [(Applying, "jump", move_slot)],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_replicas_is_caught(bug: str) -> None:
    """Each planted bug breaks I6, or stops a replica, for some seed."""
    seed = first_failure(BUGS[bug], replicate, seeds=SEEDS_MAX)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
