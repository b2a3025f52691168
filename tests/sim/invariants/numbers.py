"""I5: numbers that rise and never come twice: manifest ids, epochs, sequence numbers, time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tests.kit.model import keys_of
from tests.sim.errors import Violation
from tests.sim.history import Outcome
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import SerialOrder
from tests.sim.stored import Stored

RISING = (
    "writer_epoch",
    "compactor_epoch",
    "writer_first_seq",
    "last_compacted_seq",
    "logical_time_ms",
    "gc_cutoff_ms",
)


@checks(5, "writers", "database")
def check_i5_manifests(stored: Stored) -> None:
    """Manifest ids have no gaps, and nothing in the manifest that must rise goes down."""
    for before, after in pairwise(stored.manifests):
        if after.manifest_id != before.manifest_id + 1:
            raise Violation(f"I5: manifest {after.manifest_id} follows {before.manifest_id}")
        for name in RISING:
            if getattr(after, name) < getattr(before, name):
                raise Violation(f"I5: {name} goes down in manifest {after.manifest_id}")


@checks(5, "writers", "database")
def check_i5_manifest_ids_in_time(created: Iterable[int]) -> None:
    """`created`, in the order of time: each id is the next one, or was there before.

    One that is created again after it was collected has no effect (F2): all that looks at manifests
    takes the first one.
    """
    highest = -1
    for each in created:
        if each > highest + 1:
            raise Violation(f"I5: manifest {each} is created when {highest} is the highest")
        highest = max(highest, each)


@checks(5, "writers", "database")
def check_i5_logical_time_in_the_log(stored: Stored) -> None:
    """Logical time rises with the slots that have data, and a manifest that has them is not behind.

    A fence has the time of a writer that may have come late, and nothing in it expires.
    """
    last_ms, times_ms = 0, []
    for each in stored.wal:
        if each.all_entries and each.logical_time_ms < last_ms:
            raise Violation(f"I5: slot {each.wal_id} is of {each.logical_time_ms} after {last_ms}")
        last_ms = max(last_ms, each.logical_time_ms) if each.all_entries else last_ms
        times_ms.append(last_ms)
    for manifest in stored.manifests:
        c = manifest.wal_id_last_compacted
        if c is not None and manifest.logical_time_ms < times_ms[c]:
            raise Violation(
                f"I5: manifest {manifest.manifest_id} is of {manifest.logical_time_ms}, and slot "
                f"{c} of {times_ms[c]}"
            )


@checks(5, "writers", "database")
def check_i5_numbers_are_issued_once(order: SerialOrder) -> None:
    """No two changes were shown the same sequence number, those lost from memory included."""
    keys = order.timeline.keys
    shown = {placed.commit.seq: number for number, placed in order.placed.items()}
    for operation, attempt in order.history.attempts(Outcome.IN_MEMORY):
        if not keys_of(operation.request, keys):  # it changes nothing, and was shown that of a view
            continue
        first = shown.setdefault(attempt.seq, operation.number)
        if first != operation.number:
            other = order.history.operations[first - 1]
            problem = f"I5: number {attempt.seq} was shown to {operation} and to {other}"
            raise Violation(problem, at_us=attempt.replied_us)


@checks(5, "writers", "database")
def check_i5_a_writer_issues_numbers_of_its_own(stored: Stored) -> None:
    """What is in the log of a writer is above all that its predecessors could have shown.

    A manifest says from which number on the writer of its epoch issues them.
    """
    first_seqs: dict[int, int] = {}
    for before, after in pairwise(stored.manifests):
        if after.writer_first_seq > before.writer_first_seq:
            first_seqs[after.writer_epoch] = after.writer_first_seq
    for each in stored.wal:
        seqs = [entry.seq for entry in each.all_entries]
        first_seq = first_seqs.get(each.epoch, 0)
        later = [seq for epoch, seq in first_seqs.items() if epoch > each.epoch]
        if seqs and not (first_seq <= min(seqs) and max(seqs) < min(later, default=1 << 64)):
            raise Violation(
                f"I5: slot {each.wal_id} of epoch {each.epoch} has {seqs}, and first numbers of "
                f"writers are {first_seqs}"
            )
