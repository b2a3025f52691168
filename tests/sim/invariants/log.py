"""I3 and I4: what stands in the slots of the log, whoever was told what of it."""

from __future__ import annotations

from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.stored import Stored


@checks(3, "writers", "database")
def check_i3_nothing_behind_a_fence_run(stored: Stored) -> None:
    """Behind the first object with data of a writer no older writer has data.

    A writer writes data only after its run of fences is complete. Who was told that a write is in
    a slot is held against the object there by I1.
    """
    newest_with_data = 0
    for each in stored.wal:
        if not each.all_entries:
            continue
        if each.epoch < newest_with_data:
            raise Violation(
                f"I3: slot {each.wal_id} has data of epoch {each.epoch} behind data of epoch "
                f"{newest_with_data}"
            )
        newest_with_data = each.epoch


@checks(4, "writers", "database")
def check_i4_slots_without_gaps(stored: Stored) -> None:
    """The ids of all WAL objects that were ever there count up from 0."""
    ids = [each.wal_id for each in stored.wal]
    if ids != list(range(len(ids))):
        raise Violation(f"I4: the WAL has gaps: {ids}")


@checks(4, "writers", "database")
def check_i4_slot_order_is_sequence_order(stored: Stored) -> None:
    """Every sequence number is above all in the slots before it, and has a key only once."""
    last_seq = 0
    for each in stored.wal:
        if not each.all_entries:
            continue
        seqs = [entry.seq for entry in each.all_entries]
        if min(seqs) <= last_seq:
            raise Violation(f"I4: slot {each.wal_id} begins at {min(seqs)} after {last_seq}")
        last_seq = max(seqs)
        if len({(entry.key, entry.seq) for entry in each.entries}) < len(each.entries):
            raise Violation(f"I4: a commit of slot {each.wal_id} has a key twice: {each.entries}")
