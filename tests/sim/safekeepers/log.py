"""I11: the log as a majority has it, record by record, and the archive held against it."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from shalekv.core.entry import Entry
from shalekv.core.quorum.record import Record
from shalekv.format.names import wal_name
from tests.sim.errors import Violation
from tests.sim.history import Outcome
from tests.sim.invariants.catalogue import checks
from tests.sim.safekeepers.witness import Witness, named
from tests.sim.serial import SerialOrder
from tests.sim.stored import Stored, WalObject, wal_object

LATE_US = 60_000_000  # in peace the archive is not further behind


def committed_log(witness: Witness) -> list[Record]:
    """All records that are committed, and before them what is committed by them.

    Of all records that a majority has held, the last one of the newest writer is the end.
    """
    majority = [(witness.records[each].mark.rank, each) for each in witness.majority_us]
    if not majority:
        return []
    return witness.chain_to(max(majority)[1])


def committed_pieces(witness: Witness, archived: Stored) -> Stored:
    """The archive, with its log in the pieces in which that became durable.

    Objects that are in no log were put there by a writer without safekeepers.
    """
    database_id = archived.manifests[0].database_id
    pieces: list[WalObject] = []
    for record in committed_log(witness):
        if record.payload:
            durable_us = witness.majority_us.get(named(record))
            if durable_us is None:
                raise Violation(f"I11: no majority has ever had record {record.mark}")
            name = wal_name(record.wal_id)
            piece = wal_object(record.wal_id, name, record.payload, database_id, durable_us)
            pieces.append(piece)
    in_log = {each.wal_id for each in pieces}
    alone = [each for each in archived.wal if each.wal_id not in in_log]
    ordered = sorted([*alone, *pieces], key=attrgetter("wal_id"))  # stable
    return replace(archived, pieces=tuple(ordered))


@checks(11, "quorum")
def check_i11_archived_is_committed(stored: Stored, now_us: int) -> None:
    """What is in the archive is the log as it was committed, and was so before it was archived."""
    archived = {each.wal_id: each for each in stored.wal}
    last_wal_id = max(archived)
    for wal_id, group in groupby(stored.pieces, key=attrgetter("wal_id")):
        pieces = list(group)
        found = archived.get(wal_id)
        if found is None:
            age_us = now_us - max(each.landed_us or 0 for each in pieces)
            if age_us > LATE_US or wal_id < last_wal_id:
                raise Violation(f"I11: {wal_name(wal_id)} is committed, and not archived")
            continue
        if _entries(*pieces) != _entries(found):
            raise Violation(f"I11: {found} is in the archive, and the log has {pieces}")
        last = pieces[-1]
        if (found.epoch, found.logical_time_ms) != (last.epoch, last.logical_time_ms):
            raise Violation(f"I11: {found} is in the archive, and the log ends it with {last}")
        committed_us = max(each.landed_us or 0 for each in pieces)
        if (found.landed_us or 0) < committed_us:
            raise Violation(
                f"I11: {wal_name(wal_id)} was archived at {found.landed_us} us, and no majority "
                f"had all of it before {committed_us} us"
            )


@checks(11, "quorum")
def check_i11_acknowledged_was_on_a_majority(order: SerialOrder) -> None:
    """When a client was told of a write, the disks of a majority had it, and so has the log."""
    for operation, attempt in order.history.attempts(Outcome.ACKNOWLEDGED):
        placed = order.placed.get(operation.number)
        if placed is None or placed.commit.seq != attempt.seq:
            continue  # it was told of another attempt, or has changed nothing
        durable_us = order.landed_us(placed.commit.wal)
        if attempt.replied_us is not None and durable_us > attempt.replied_us:
            raise Violation(f"I11: {operation} was told {attempt}, durable at {durable_us} us")


def _entries(*objects: WalObject) -> list[Entry]:
    """All that is in them, in one order."""
    return sorted(entry for each in objects for entry in each.all_entries)
