"""The simulation finds bugs planted into compaction, collection, snapshots, memory, replicas.

As in `test_planted_bugs`, each replaces one function of the shipped code by a plausible wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.manifest import Manifest
from shalekv.core.retention import Pins
from shalekv.engine.collection.fences import Fences
from shalekv.engine.reader_engine import ReaderEngine
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.format.sst import Sst
from tests.sim.levels import whole_database
from tests.sim.planting import Patch, first_failure

SEEDS_MAX = 50

_keep = TreeKeeper.keep
_edit = TreeKeeper._edit  # noqa: SLF001
_apply = ReaderEngine._apply  # noqa: SLF001


async def no_fences(_self: Fences, _listed: object) -> frozenset[str]:
    """F1 is forgotten: fences are collected as other objects are."""
    return frozenset()


def behind_c(self: Pins) -> int:
    """Slot c itself is collected."""
    return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


def nothing_below(_self: OlderKeys, _key: bytes) -> bool:
    """A tombstone is dropped although a level below holds the key."""
    return False


async def drop_at_once(self: TreeKeeper) -> None:
    """Memory lets go of what a manifest says is compacted before the new levels are read."""
    await self._on_compacted(self._manifest.current.last_compacted_seq)
    await _keep(self)


async def edit_without_snapshot(self: TreeKeeper, dead: set[bytes], _created: object) -> Manifest:
    """A new tree is read although no snapshot protects it."""
    return await _edit(self, dead, None)


def apply_as_news(self: ReaderEngine, found: Sst) -> None:
    """What a replica has applied just now is taken for all that there is."""
    _apply(self, found)
    self.follower.is_fresh(self._clock.monotonic_ms())


BUGS: Mapping[str, Sequence[Patch]] = {
    "F1: fences are collected": [(Fences, "among", no_fences)],
    "slot c is collected": [(Pins, "first_wal_id", property(behind_c))],
    "a tombstone goes early": [(OlderKeys, "may_hold", nothing_below)],
    "snapshots are not renewed": [(TreeKeeper, "is_renewal_due", property(lambda _self: False))],
    "memory lets go early": [(TreeKeeper, "keep", drop_at_once)],
    "a tree without a snapshot": [(TreeKeeper, "_edit", edit_without_snapshot)],
    "what a replica applies is fresh": [(ReaderEngine, "_apply", apply_as_news)],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_levels_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug breaks an invariant, or stops a process, for some seed."""
    main: Any = whole_database
    seed = first_failure(BUGS[bug], monkeypatch, main, seeds=SEEDS_MAX)
    assert seed is not None, f"{SEEDS_MAX} seeds did not notice that {bug}"
