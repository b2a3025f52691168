"""The random test of replicas finds bugs that are planted into them.

Each replaces one function of the shipped code by a plausible wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shalekv.core.tree import Tree
from shalekv.engine.following import Follower
from shalekv.engine.memtable import Memtable
from shalekv.engine.progress import Progress
from shalekv.engine.reader_engine import ReaderEngine
from shalekv.engine.replay import apply_object
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.format.names import parse_wal_name
from shalekv.format.sst import Sst
from tests.sim.planting import Patch, first_failure
from tests.unit.engine.replication import replicate

SEEDS_MAX = 25

_apply = ReaderEngine._apply  # noqa: SLF001


async def always(_self: Follower, _first: int) -> bool:
    """Every answer counts, also one from before a long stop."""
    return True


async def no_gap(_self: Follower) -> bool:
    """What is not there is the end of the log, whatever stands behind it."""
    return False


def keep_all(_self: Memtable) -> None:
    """Memory keeps what is older than the levels that are read from now on."""


def apply_anything(self: ReaderEngine, found: Sst) -> None:
    """What the levels hold already is applied again."""
    apply_object(found, self._replayed)
    self._replayed.loads.clear()
    wal_id = parse_wal_name(found.properties.name)
    assert wal_id is not None
    self.prefix.advance(self._replayed.last_seq, wal_id)


def apply_as_news(self: ReaderEngine, found: Sst) -> None:
    """What was applied just now is taken for all that there is."""
    _apply(self, found)
    self.follower.is_fresh(self._clock.monotonic_ms())


async def wait_for_nothing(_self: Progress, _seq: int) -> None:
    """`min_seq` is not waited for."""


def stay(_self: ReaderEngine, _tree: Tree) -> None:
    """New levels are read, and the log goes on where it was."""


def move_slot(self: ReaderEngine, tree: Tree) -> None:
    """The log goes on behind the levels, and replies still have the old number."""
    assert tree.wal_id is not None
    self.prefix.advance(self.prefix.seq, tree.wal_id)


BUGS: Mapping[str, Sequence[Patch]] = {
    "every answer counts": [(Follower, "_counts", always)],
    "a gap is the end": [(Follower, "_is_gap", no_gap)],
    "a lost snapshot is not noticed": [(TreeKeeper, "is_lost", property(lambda _self: False))],
    "memory hides newer levels": [(Memtable, "drop_all", keep_all)],
    "slots are applied again": [(ReaderEngine, "_apply", apply_anything)],
    "what is applied is fresh": [(ReaderEngine, "_apply", apply_as_news)],
    "min_seq is ignored": [(Progress, "cover", wait_for_nothing)],
    "the log stays behind": [(ReaderEngine, "_jump", stay)],
    "only the slot moves": [(ReaderEngine, "_jump", move_slot)],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_replicas_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug breaks I6, or stops a replica, for some seed."""
    main: Any = replicate
    seed = first_failure(BUGS[bug], monkeypatch, main, seeds=SEEDS_MAX)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
