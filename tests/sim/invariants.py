"""The invariants of server/docs/protocol.md, each checked by the function with its number.

They look at what clients were told and at what stands in the store, decoded with the shipped
format code, and never at the memory of a writer.
"""

from __future__ import annotations

from itertools import pairwise

from shalekv.v1 import kv_pb2
from tests.sim.errors import Violation
from tests.sim.history import History, Outcome, Told
from tests.sim.model import keys_of
from tests.sim.reading import check_reads, check_scans
from tests.sim.requests import COUNTED, KEYS
from tests.sim.serial import SerialOrder, check_answers
from tests.sim.stored import Stored


def check_all(history: History, stored: Stored) -> None:
    """Check every invariant that can be seen from outside. Raises `Violation`."""
    check_i3_nothing_behind_a_fence_run(stored)
    check_i4_slots_without_gaps(stored)
    check_i4_slot_order_is_sequence_order(stored)
    check_i5_manifests(stored)
    order = SerialOrder(history, stored, KEYS)  # I1, I14 and I15 from here on
    check_i5_numbers_are_issued_once(order)
    check_answers(order)
    check_reads(order)
    check_scans(order)
    check_i15_counter(order)


def check_i3_nothing_behind_a_fence_run(stored: Stored) -> None:
    """Behind the first object with data of a writer no older writer has data.

    A writer writes data only after its run of fences is complete.
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


def check_i4_slots_without_gaps(stored: Stored) -> None:
    """The ids of WAL objects count up from 0."""
    ids = [each.wal_id for each in stored.wal]
    if ids != list(range(len(ids))):
        raise Violation(f"I4: the WAL has gaps: {ids}")


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


def check_i5_manifests(stored: Stored) -> None:
    """Manifest ids have no gaps, and nothing in the manifest that must rise goes down."""
    for before, after in pairwise(stored.manifests):
        if after.manifest_id != before.manifest_id + 1:
            raise Violation(f"I5: manifest {after.manifest_id} follows {before.manifest_id}")
        for name in ("writer_epoch", "compactor_epoch", "writer_first_seq", "logical_time_ms"):
            if getattr(after, name) < getattr(before, name):
                raise Violation(f"I5: {name} goes down in manifest {after.manifest_id}")


def check_i5_numbers_are_issued_once(order: SerialOrder) -> None:
    """No two changes were shown the same sequence number, those lost from memory included."""
    shown = {placed.commit.seq: number for number, placed in order.placed.items()}
    for operation, attempt in order.history.attempts(Outcome.IN_MEMORY):
        if not keys_of(operation.request, KEYS):  # it changes nothing, and was shown that of a view
            continue
        first = shown.setdefault(attempt.seq, operation.number)
        if first != operation.number:
            other = order.history.operations[first - 1]
            raise Violation(f"I5: number {attempt.seq} was shown to {operation} and to {other}")


def check_i15_counter(order: SerialOrder) -> None:
    """A counter that is only added to holds what all that was applied has added, once each."""
    added = 0
    for number, placed in order.placed.items():
        match order.history.operations[number - 1].request:
            case kv_pb2.WriteRequest() as request:
                changes = list(request.changes)
            case kv_pb2.TxnRequest() as request:
                answer = placed.effects[0].answer
                is_then = isinstance(answer, Told) and answer.succeeded
                operations = request.then if is_then else request.otherwise
                changes = [operation.change for operation in operations]
            case _:
                continue
        added += sum(change.add.delta for change in changes if change.add.key == COUNTED)
    value = [read.got.value for read in order.history.reads if read.key == COUNTED][-1]
    held = int.from_bytes(value or bytes(8), "little", signed=True)
    if held != added:
        raise Violation(f"I15: the counter holds {held}, and {added} was added to it")
