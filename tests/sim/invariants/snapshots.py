"""I7: named snapshots: what was read of one is one state, and after its end nobody is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shalekv.core.entry import Entry
from shalekv.core.manifest import Snapshot
from shalekv.errors import SnapshotNotFound
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.errors import Violation
from tests.sim.history import Got
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import SerialOrder
from tests.sim.snapshot_reads import new_views, read_snapshot
from tests.sim.stored import Stored
from tests.sim.world import World

LATE_READS = 3  # of snapshots that are over


@dataclass(slots=True)
class Snapped:
    """A snapshot and what was read of it."""

    snapshot: Snapshot
    ends_ms: int  # by the store's clock: until then it is promised
    reads: list[tuple[int, int, tuple[Entry, ...]]] = field(default_factory=list)  # seq, time, all
    ending: str = ""


@checks(7, "database")
def check_i7_snapshots_are_one_state(order: SerialOrder, snapped: Sequence[Snapped]) -> None:
    """All reads of one snapshot are equal to the byte, and what the log says.

    Nobody compacts, collects or takes over so that they differ. Who reads too early or too late is
    judged as it happens (`tests.sim.snapshot_readers`).
    """
    for each in snapped:
        if len(set(each.reads)) > 1:
            raise Violation(f"I7: {each.snapshot} reads {set(each.reads)}")
        for seq, now_ms, entries in each.reads[:1]:
            shown = {e.key: Got(e.value, e.seq, e.expire_at_ms) for e in entries}
            state = {
                key: Got(version.value, version.seq, version.expire_at_ms)
                for key in order.timeline.keys
                if (version := order.timeline.at(key, seq)).value is not None
                and not 0 < version.expire_at_ms <= now_ms
            }
            if shown != state:
                raise Violation(f"I7: {each.snapshot} shows {shown}, the log {state} at {seq}")


@checks(7, "database")
def check_i7_what_was_promised_is_in_a_manifest(stored: Stored, snapped: Sequence[Snapped]) -> None:
    """A snapshot that somebody was given is in a manifest that counts, of the state that it names.

    One that is only in a manifest which was created again under an old id protects nothing (F2).
    """
    there = {each.id: each for manifest in stored.manifests for each in manifest.snapshots}
    for each in snapped:
        found = there.get(each.snapshot.id)
        if found is None or found.manifest_id != each.snapshot.manifest_id:
            raise Violation(f"I7: {each.snapshot} was promised, and manifests have {found}")


@checks(7, "database")
async def check_i7_over_is_over(world: World, stored: Stored, snapped: Sequence[Snapped]) -> None:
    """Snapshots that the current manifest no longer has are refused with a typed error.

    REQUIRES: nobody edits the manifest any more.
    """
    node = world.node("late reader")
    store = CasStore(world.store_for(node), world.runtime_for(node), StoreSettings())
    living = {each.id for each in stored.manifests[-1].snapshots}
    over = [each for each in snapped if each.snapshot.id not in living]
    for each in over[-LATE_READS:]:
        try:
            views = await node.run(new_views(store))
            answer = await node.run(read_snapshot(views, each.snapshot))
        except SnapshotNotFound:
            continue
        raise Violation(f"I7: {each.snapshot} is over, and answers {answer}")
