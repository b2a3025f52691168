"""The invariants of server/docs/protocol.md, each checked by the function with its number.

They look at what clients were told and at what stands in the store, decoded with the shipped
format code, and never at the memory of a writer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from shalekv.core.entry import Entry, Kind
from shalekv.core.manifest import Manifest
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import Sst, open_sst
from tests.sim.history import History, Outcome, WriteOp
from tests.sim.store import SimStore


class Violation(AssertionError):
    """An invariant does not hold; the message begins with its number."""


@dataclass(frozen=True, slots=True)
class WalObject:
    """One slot of the log, decoded."""

    wal_id: int
    epoch: int
    logical_time_ms: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Everything in the store, decoded."""

    manifests: tuple[Manifest, ...]
    wal: tuple[WalObject, ...]

    @classmethod
    def read(cls, store: SimStore) -> Stored:
        """What is there now."""
        manifests = [
            decode_manifest(name, store.data(name) or b"")
            for name in store.names(names.MANIFEST_FOLDER)
        ]
        database_id = manifests[0].database_id
        wal = []
        for name in store.names(names.WAL_FOLDER):
            sst = open_sst(name, store.data(name) or b"", database_id=database_id)
            wal.append(_wal_object(sst))
        return cls(tuple(manifests), tuple(wal))

    def versions(self) -> list[tuple[WalObject, Entry]]:
        """All versions in the log, in slot order."""
        return [(each, entry) for each in self.wal for entry in each.entries]


def check_all(history: History, stored: Stored) -> None:
    """Check every invariant that can be seen from outside. Raises `Violation`."""
    check_i1_acknowledged_is_in_the_log(history, stored)
    check_i1_all_or_nothing(history, stored)
    check_i1_refused_is_not_applied(history, stored)
    check_i3_nothing_behind_a_fence_run(stored)
    check_i4_slots_without_gaps(stored)
    check_i4_slot_order_is_sequence_order(stored)
    check_i5_manifests(stored)
    check_i5_numbers_are_issued_once(history)
    check_i14_writes_in_real_time_order(history)
    check_i14_reads(history, stored)
    check_i14_scans(history, stored)


def check_i1_acknowledged_is_in_the_log(history: History, stored: Stored) -> None:
    """An acknowledged write stands in the slot and under the number that its reply named."""
    found = {(each.wal_id, entry.seq, entry.key): entry for each, entry in stored.versions()}
    for op in history.acknowledged():
        for key in op.keys:
            entry = found.get((op.wal_id if op.wal_id is not None else -1, op.seq, key))
            if entry is None or entry.value != op.value:
                raise Violation(f"I1: {op} was acknowledged, and the log has {entry}")


def check_i1_all_or_nothing(history: History, stored: Stored) -> None:
    """Of every write all keys are in the log, in one object under one number, or none is."""
    places = _places(stored)
    for op in history.writes:
        if op.is_delete:
            continue
        where = {key: places.get((key, op.value), []) for key in op.keys}
        if len({tuple(found) for found in where.values()}) != 1:
            raise Violation(f"I1: {op} is torn: {where}")
        if any(len(found) > 1 for found in where.values()):
            raise Violation(f"I1: {op} was applied more than once: {where}")


def check_i1_refused_is_not_applied(history: History, stored: Stored) -> None:
    """Nothing of a write whose client was told "not applied" is in the log."""
    places = _places(stored)
    for op in history.writes:
        if op.outcome is Outcome.NOT_APPLIED and not op.is_delete:
            found = [places[key, op.value] for key in op.keys if (key, op.value) in places]
            if found:
                raise Violation(f"I1: {op} was told not to be applied, and stands at {found}")


def check_i3_nothing_behind_a_fence_run(stored: Stored) -> None:
    """Behind the first object with data of a writer no older writer has data.

    A writer writes data only after its run of fences is complete.
    """
    newest_with_data = 0
    for each in stored.wal:
        if not each.entries:
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
    """Every sequence number is above all in the slots before it."""
    last_seq = 0
    for each in stored.wal:
        if not each.entries:
            continue
        seqs = [entry.seq for entry in each.entries]
        if min(seqs) <= last_seq:
            raise Violation(f"I4: slot {each.wal_id} begins at {min(seqs)} after {last_seq}")
        last_seq = max(seqs)


def check_i5_manifests(stored: Stored) -> None:
    """Manifest ids have no gaps, and nothing in the manifest that must rise goes down."""
    for before, after in pairwise(stored.manifests):
        if after.manifest_id != before.manifest_id + 1:
            raise Violation(f"I5: manifest {after.manifest_id} follows {before.manifest_id}")
        for name in ("writer_epoch", "compactor_epoch", "writer_first_seq", "logical_time_ms"):
            if getattr(after, name) < getattr(before, name):
                raise Violation(f"I5: {name} goes down in manifest {after.manifest_id}")


def check_i5_numbers_are_issued_once(history: History) -> None:
    """No two writes were shown the same sequence number, those lost from memory included."""
    shown: dict[int, WriteOp] = {}
    for op in history.writes:
        if op.outcome in (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY):
            if op.seq in shown:
                raise Violation(f"I5: number {op.seq} was shown to {op} and to {shown[op.seq]}")
            shown[op.seq] = op


def check_i14_writes_in_real_time_order(history: History) -> None:
    """A write that began after another was acknowledged has a greater number."""
    events: list[tuple[int, int, WriteOp]] = []
    for op in history.acknowledged():
        events.append((op.replied_us or 0, 0, op))
        events.append((op.invoked_us, 1, op))
    newest: WriteOp | None = None
    floor_at: dict[int, WriteOp | None] = {}
    for _, is_invocation, op in sorted(events, key=lambda event: event[:2]):
        if is_invocation:
            floor_at[op.number] = newest
        elif newest is None or op.seq > newest.seq:
            newest = op
    for op in history.acknowledged():
        floor = floor_at[op.number]
        if floor is not None and floor.replied_us != op.invoked_us and op.seq <= floor.seq:
            raise Violation(f"I14: {op} began after {floor} was acknowledged")


def check_i14_reads(history: History, stored: Stored) -> None:
    """Committed reads show durable values; linearizable ones miss nothing acknowledged before."""
    versions = {(entry.key, entry.seq): entry for _, entry in stored.versions()}
    for read in history.reads:
        if read.found:
            entry = versions.get((read.key, read.seq))
            if entry is None or entry.kind is not Kind.PUT or entry.value != read.value:
                raise Violation(f"I14: {read} shows what the log does not have: {entry}")
        if read.seq > read.header_seq:
            raise Violation(f"I14: {read} shows more than its header says")
        if not read.is_linearizable:
            continue
        newest = _newest_acknowledged(history, read.key, read.invoked_us)
        if newest is not None and read.found and read.seq < newest.seq:
            raise Violation(f"I14: {read} misses {newest}")
        if newest is not None and not read.found and not _deleted_since(stored, newest, read.key):
            raise Violation(f"I14: {read} misses {newest}")


def check_i14_scans(history: History, stored: Stored) -> None:
    """A scan shows exactly the state of the log at the number in its header."""
    versions = [entry for _, entry in stored.versions()]
    for scan in history.scans:
        newest: dict[bytes, Entry] = {}
        for entry in versions:
            found = newest.get(entry.key)
            if entry.seq <= scan.header_seq and (found is None or found.seq < entry.seq):
                newest[entry.key] = entry
        visible = {(key, e.seq) for key, e in newest.items() if e.kind is Kind.PUT}
        if set(scan.entries) != visible:
            raise Violation(f"I14: {scan} differs from the log: {sorted(visible)}")


def _newest_acknowledged(history: History, key: bytes, before_us: int) -> WriteOp | None:
    earlier = (
        op
        for op in history.acknowledged()
        if key in op.keys and op.replied_us is not None and op.replied_us < before_us
    )
    return max(earlier, key=lambda op: op.seq, default=None)


def _deleted_since(stored: Stored, op: WriteOp, key: bytes) -> bool:
    """Whether the log has a tombstone of the key that is at least as new as `op`."""
    return any(
        entry.kind is Kind.TOMBSTONE and entry.key == key and entry.seq >= op.seq
        for _, entry in stored.versions()
    )


def _places(stored: Stored) -> dict[tuple[bytes, bytes], list[tuple[int, int]]]:
    """Where each put stands: slot and number by key and value."""
    places: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}
    for each, entry in stored.versions():
        if entry.kind is Kind.PUT:
            places.setdefault((entry.key, entry.value), []).append((each.wal_id, entry.seq))
    return places


def _wal_object(sst: Sst) -> WalObject:
    wal_id = names.parse_wal_name(sst.properties.name)
    if wal_id is None:
        raise Violation(f"I4: {sst.properties.name} is no WAL object")
    properties = sst.properties
    entries: Iterable[Entry] = sst.entries()
    return WalObject(wal_id, properties.writer_epoch, properties.logical_time_ms, tuple(entries))
