"""Scenarios of the seeds notice when the shipped code does something else.

Each bug replaces one function of it by a plausible wrong one, and the file that is about its place
has a scenario that does not come true any more.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shalekv.core import retention
from shalekv.core.compaction import publish
from shalekv.core.manifest import Manifest, Snapshot
from shalekv.core.retention import Cutoffs, Pins
from shalekv.core.two_phase import Destination
from shalekv.engine import snapshot_views
from shalekv.engine.collection import collecting
from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.collection.fences import Fences
from shalekv.engine.following import Follower
from shalekv.engine.snapshots import Snapshots
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.engine.wal import list_wal
from shalekv.store.api import Created, CreateOutcome, Exists
from shalekv.store.two_phase.completing import Completing, Completion
from shalekv.store.two_phase.creating import Creating
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.scenarios.playing import play
from tests.scenarios.reading import scenarios_in

# ruff: noqa: SLF001 - what a bug replaces is private, as a rule
_with_slots = publish._with_slots
_cutoffs_at = Cutoffs.at

SCENARIOS = scenarios_in(Path(__file__).parent)


async def last_of_all(self: Snapshots, current: Manifest, _gap_wait_ms: int) -> int | None:
    """What stands behind a gap counts as seen."""
    folder = await list_wal(self._store, current.first_uncompacted_wal_id)
    return max(folder.filled, default=None)


async def always_counts(_self: Follower, _first: int) -> bool:
    """A reader takes what was deleted for what is not there yet."""
    return True


def never_expired(_snapshot: Snapshot, _now_s: float) -> bool:
    """Who reads asks no clock."""
    return False


def behind_c(self: Pins) -> int:
    """`<=` for `<`."""
    return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


async def no_fences(_self: Fences, _listed: object) -> frozenset[str]:
    """F1 is forgotten."""
    return frozenset()


def only_current(manifest: Manifest, *, with_wal: bool = False) -> Iterable[tuple[int, str]]:
    """What snapshots name is forgotten."""
    del manifest, with_wal
    return ()


def foreign_is_garbage(now_ms: int, **ages: Any) -> Cutoffs:
    """What is not ours goes at the age of what is."""
    cutoffs = _cutoffs_at(now_ms, **ages)
    return replace(cutoffs, foreign_ms=cutoffs.cutoff_ms)


async def publish_nothing(_self: Collecting, stored: Any, look: collecting._Look) -> Manifest:
    """F3 is forgotten: the collector deletes by a manifest that nobody else sees."""
    return replace(look.plan.manifest, manifest_id=stored.current.manifest_id)


def no_lease(_lease_id: bytes, _sst_id: bytes) -> bool:
    """What is about to be published is not protected."""
    return False


def with_old_seen(manifest: Manifest, *args: Any) -> Manifest:
    """A compaction does not tell how far it has seen the log."""
    return replace(_with_slots(manifest, *args), wal_id_last_seen=manifest.wal_id_last_seen)


def any_compactor(_manifest: Manifest, _own: publish.CompactorId) -> bool:
    """An older compactor goes on."""
    return True


async def gives_way(_self: Creating, _record: object) -> CreateOutcome:
    """Whoever has lost does not help who has won."""
    return Exists()


async def told_early(self: Creating, own: Any) -> CreateOutcome:
    """Success is told after the record, and the copy made by nobody."""
    del self, own
    return Created()


async def completes_nothing(_self: Completing, _record: object) -> Completion:
    """A recovery takes all records for completed."""
    return Completion.DONE


async def keep_source(_self: Completing, _source: str) -> None:
    """Step 5 is left out."""


async def records_first(self: TwoPhaseStore, names: Iterable[str]) -> None:
    """The record goes before its object."""
    doomed = tuple(names)
    await self._records.delete_committed([Destination(self.url, name) for name in doomed])
    await self._plain.delete(doomed)


NEVER_DUE = property(lambda _self: False)

BUGS: dict[str, tuple[object, str, object]] = {
    "000_reader_gap: the gap is passed over": (Snapshots, "_last_wanted", last_of_all),
    "000_reader_protocol: what is gone is waited for": (Follower, "_counts", always_counts),
    "000_reader_snapshot: no renewal": (TreeKeeper, "is_renewal_due", NEVER_DUE),
    "000_snapshots: no expiry": (snapshot_views, "is_expired", never_expired),
    "000_snapshots: nothing is published": (Collecting, "_publish", publish_nothing),
    "000_collection_rule_1: snapshots": (retention, "_pinned", only_current),
    "000_collection_rule_2: age": (Cutoffs, "at", foreign_is_garbage),
    "000_collection_rule_3: the boundary": (Pins, "first_wal_id", property(behind_c)),
    "000_collection_rule_3: fences": (Fences, "among", no_fences),
    "000_collection_rule_4: age": (Cutoffs, "at", foreign_is_garbage),
    "000_collection_rule_5: snapshots": (retention, "_pinned", only_current),
    "000_collection_rule_5: leases": (retention, "protects", no_lease),
    "protocol_f1_collector: fences": (Fences, "among", no_fences),
    "protocol_f3: nothing is published": (Collecting, "_publish", publish_nothing),
    "000_compactor: step 3": (publish, "_with_slots", with_old_seen),
    "000_compactor: two compactors": (publish, "_is_compactor", any_compactor),
    "000_two_phase_writes: told early": (Creating, "_carry_out", told_early),
    "000_two_phase_step_2: no help": (Creating, "_give_way", gives_way),
    "000_two_phase_step_3: no recovery": (Completing, "complete", completes_nothing),
    "000_two_phase_step_5: left out": (Completing, "discard", keep_source),
    "000_two_phase_recovery: nothing is done": (Completing, "complete", completes_nothing),
    "000_two_phase_deletes: records first": (TwoPhaseStore, "delete", records_first),
    "000_transactional_deletion: records of fences": (Fences, "among", no_fences),
    "000_transactional_deletion: the boundary": (Pins, "first_wal_id", property(behind_c)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_scenario_notices_the_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bug planted, and nothing else, a scenario of that place does not come true."""
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    file = f"{bug.partition(':')[0]}.txt"
    with contextlib.redirect_stderr(io.StringIO()):
        assert any(fails(index) for index, each in enumerate(SCENARIOS) if each.file == file)


def fails(index: int) -> bool:
    """Whether the scenario does not come true."""
    try:
        play(SCENARIOS[index], 0)
    except Exception:  # noqa: BLE001 - a wrong expectation, or whatever the bug led to
        return True
    return False
