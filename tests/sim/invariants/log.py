"""I3 to I5: contents of the slots of the log, independent of any reply."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shalekv.protocol.manifest import Manifest, WalMode
from tests.kit.model import keys_of
from tests.sim.errors import Violation
from tests.sim.history import Outcome
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import AHEAD_MS, SerialOrder
from tests.sim.stored import Stored, WalObject

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
    """Check that each of `created`, in the order of time, is the next id or was there before.

    One that is created again after it was collected has no effect (F2): checks of manifests take
    the first one.
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
    last_ms, times_ms = 0, dict[int, int]()
    for each in stored.wal:
        if each.all_entries and each.logical_time_ms < last_ms:
            raise Violation(f"I5: slot {each.wal_id} is of {each.logical_time_ms} after {last_ms}")
        last_ms = max(last_ms, each.logical_time_ms) if each.all_entries else last_ms
        times_ms[each.wal_id] = last_ms
    for manifest in stored.manifests:
        c = manifest.wal_id_last_compacted
        if c is not None and manifest.logical_time_ms < times_ms.get(c, 0):
            raise Violation(
                f"I5: manifest {manifest.manifest_id} is of {manifest.logical_time_ms}, and slot "
                f"{c} of {times_ms[c]}"
            )


@checks(5, "writers", "database")
def check_i5_logical_time_is_that_of_the_store(stored: Stored, epoch_ms: int) -> None:
    """No commit is ahead of the store's clock when it landed, which showed `epoch_ms` at first.

    It never goes back, so what is ahead once is ahead for ever: a wrong clock must not get there.
    """
    for each in stored.durable:
        if each.landed_us is None or not each.all_entries:
            continue
        ahead_ms = each.logical_time_ms - (epoch_ms + each.landed_us // 1_000)
        if ahead_ms > AHEAD_MS:
            raise Violation(
                f"I5: slot {each.wal_id} is {ahead_ms} ms ahead of the store's clock",
                at_us=each.landed_us,
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
    """Check that the numbers of a writer are above all that its predecessors could have shown.

    A manifest states from which number on the writer of its epoch issues them.
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


@checks(3, "writers", "database")
def check_i3_nothing_behind_a_fence_run(stored: Stored) -> None:
    """Check that no older writer has data behind the complete fence run of a writer, or its data.

    Nor has a writer data before its own run is complete, since older ones could pass it then. I1
    compares replies that name a slot with the object there.
    """
    fences = _Fences(stored)
    newest_with_data = 0
    for slot in stored.wal:
        if not slot.all_entries:
            fences.add(slot)
            continue
        for what, epoch in (("data", newest_with_data), ("all fences", fences.newest_complete)):
            if slot.epoch < epoch:
                raise Violation(
                    f"I3: slot {slot.wal_id} has data of epoch {slot.epoch} behind {what} of epoch "
                    f"{epoch}"
                )
        if fences.are_missing(slot.epoch):
            raise Violation(
                f"I3: slot {slot.wal_id} has data of epoch {slot.epoch} before all its fences"
            )
        newest_with_data = slot.epoch


class _Fences:
    """The fence runs up to some slot.

    All of them count. Those that do not are in slots that were created again after they had been
    collected, and of such a slot only the first object is looked at.
    """

    def __init__(self, stored: Stored) -> None:
        self._widths: dict[int, int] = {}  # by epoch: how long its run is
        self._unelected: set[int] = set()  # epochs that no safekeepers have elected
        before: Manifest | None = None
        for each in stored.manifests:
            if each.writer_epoch not in self._widths:
                self._claim(each, before or each)
            before = each
        self._complete: set[int] = set()  # epochs
        self._last: WalObject | None = None
        self._length = 0  # of the run that the last one ends

    def _claim(self, claim: Manifest, before: Manifest) -> None:
        """An epoch is won. Who won it may not fence less than the manifest before it demands."""
        width = max(before.fence_width, claim.fence_width, claim.max_parallel_writes)
        self._widths[claim.writer_epoch] = width
        if claim.wal_mode is WalMode.OBJECT_STORE:
            self._unelected.add(claim.writer_epoch)

    @property
    def newest_complete(self) -> int:
        """The highest epoch with a complete run, or 0."""
        return max(self._complete, default=0)

    def add(self, fence: WalObject) -> None:
        last, self._last = self._last, fence
        is_next = last and (last.epoch, last.wal_id + 1) == (fence.epoch, fence.wal_id)
        self._length = self._length + 1 if is_next else 1
        if self._length == self._widths.get(fence.epoch):
            self._complete.add(fence.epoch)

    def are_missing(self, epoch: int) -> bool:
        """Return whether a writer lacks a complete run.

        A writer that safekeepers have elected needs none.
        """
        return epoch in self._unelected and epoch not in self._complete


@checks(4, "writers", "database")
def check_i4_slots_without_gaps(stored: Stored) -> None:
    """The ids of all WAL objects that were ever there count up from 0, but for those left out.

    Of these, only fences of stalled openers may have one.
    """
    left_out = stored.left_out
    behind = {ids.start: ids.stop for ids in left_out}
    expected = 0
    for each in stored.wal:
        if any(each.wal_id in ids for ids in left_out):
            if each.all_entries:
                raise Violation(f"I4: slot {each.wal_id} was left out, and has data")
            continue
        expected = behind.get(expected, expected)
        if each.wal_id != expected:
            raise Violation(f"I4: slot {each.wal_id} comes where {expected} should")
        expected += 1


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
