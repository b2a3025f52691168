"""I9 and I2: the levels of every manifest, read without the product's readers.

The levels are exactly the effect of the slots up to c: however they were compacted, and by
whichever process, each manifest's levels give the state of the log at `last_compacted_seq`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.lease import protects
from shalekv.protocol.manifest import SYSTEM_LEVEL, Manifest, Version
from shalekv.protocol.retention import is_lease_expired
from shalekv.protocol.snapshot import is_expired
from shalekv.protocol.sst_table import SstInfo
from tests.kit.model import KeyVersion
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.nodes import Node
from tests.sim.serial import SerialOrder
from tests.sim.store import SimStore
from tests.sim.stored import Stored, current_manifest

_FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


class DeleteGuard:
    """Holds what the collector deletes against what is reachable at that moment.

    What a process has open is protected by a snapshot of its own, as long as it renews that.
    """

    def __init__(self, store: SimStore) -> None:
        self.problems: list[str] = []
        self._store = store
        self._decoded: dict[bytes, Manifest] = {}
        store.watch_deletes(self._inspect)

    @checks(8, "database")
    def check_i8_nothing_needed_is_deleted(self) -> None:
        """At the moment of each delete, nothing needed what it took, and no fence was among it.

        Needed is what the current manifest, that of an unexpired snapshot, a lease or a pending
        load names, and the log behind what is compacted. Of these objects, too, what is as young as
        the cutoff in the current manifest stays (F3).
        """
        if self.problems:
            raise Violation(self.problems[0])

    def _inspect(self, sender: Node, doomed: tuple[str, ...]) -> None:
        # The check of the store before there is a database uses a folder of its own.
        ours = [name for name in doomed if name.startswith(_FOLDERS)]
        there = [name for name in ours if self._store.data(name) is not None]
        if not there:
            return
        manifests = self._store.names(names.MANIFEST_FOLDER)
        current = self._manifest(manifests[-1])
        now_s = self._store.clock_ms() / 1_000
        ids = {each.manifest_id for each in current.snapshots if not is_expired(each, now_s)}
        active = [
            self._manifest(names.manifest_name(each))
            for each in sorted(ids | {current.manifest_id})
        ]
        for name in there:
            needed_by = next(self._reasons(name, current, active, now_s), None)
            if needed_by is not None:
                self.problems.append(f"I8: {sender.label} deletes {name}, needed by {needed_by}")
            made_ms, cutoff_ms = self._store.first_made_ms(name), current.gc_cutoff_ms
            if not name.startswith(names.MANIFEST_FOLDER) and made_ms >= cutoff_ms:
                why = f"it is of {made_ms}, and the cutoff is {cutoff_ms}"
                self.problems.append(f"I8, F3: {sender.label} deletes {name}, and {why}")
            if name.startswith(names.WAL_FOLDER) and self._is_fence(name, current.database_id):
                self.problems.append(f"I3, F1: {sender.label} deletes the fence {name}")

    def _reasons(
        self, name: str, current: Manifest, active: list[Manifest], now_s: float
    ) -> Iterator[str]:
        leases = [each for each in current.leases if not is_lease_expired(each, now_s)]
        wal_id, sst_id = names.parse_wal_name(name), names.parse_level_name(name)
        for each in active:
            why = f"manifest {each.manifest_id}; {current.manifest_id} is current"
            if name == names.manifest_name(each.manifest_id):
                yield why
            if wal_id is not None and wal_id >= (each.wal_id_last_compacted or 0):
                yield why
            tables = chain([each.leveled_ssts], (load.ssts for load in each.pending_loads))
            if sst_id is not None and any(sst_id == i.id for table in tables for i in table):
                yield why
        for lease in leases:
            why = f"the lease {lease.id.hex()} of {lease.holder}"
            if sst_id is not None and protects(lease.id, sst_id):
                yield why
            if None not in (wal_id, lease.wal_id_min) and (wal_id or 0) >= (lease.wal_id_min or 0):
                yield why

    def _manifest(self, name: str) -> Manifest:
        data = self._store.data(name)
        if data is None:
            raise Violation(f"I8: {name} is active, and is not there")
        if data not in self._decoded:
            self._decoded[data] = decode_manifest(name, data)
        return self._decoded[data]

    def _is_fence(self, name: str, database_id: bytes) -> bool:
        sst = open_sst(name, self._store.data(name) or b"", database_id=database_id)
        return sst.footer.contents.entry_count == 0


@checks(8, "database")
def check_i8_levels_are_what_is_named(store: SimStore) -> None:
    """Check that levels/ holds exactly what the current manifest names: all of it, and no orphan.

    REQUIRES: all snapshots and leases of others have expired, and all is collected.
    """
    current = current_manifest(store)
    ids = current.leveled_ssts.ids
    needed = {names.level_name(ids[at : at + 16]) for at in range(0, len(ids), 16)}
    missing = sorted(name for name in needed if store.data(name) is None)
    if missing:
        raise Violation(f"I8: manifest {current.manifest_id} names {missing}, which are not there")
    orphans = [name for name in store.names(names.LEVELS_FOLDER) if name not in needed]
    if orphans:
        raise Violation(f"I8: nothing needs {orphans}, and they are not collected")


class _Read(NamedTuple):
    points: dict[bytes, Entry]
    range_tombstones: Sequence[Entry]


class LevelStates:
    """All SSTs of the levels that were ever written, decoded when they are asked for."""

    def __init__(self, stored: Stored) -> None:
        self._database_id = stored.manifests[0].database_id
        self._data = stored.levels
        self._read: dict[bytes, _Read] = {}

    def missing(self, manifest: Manifest) -> list[str]:
        ids = manifest.leveled_ssts.ids
        called = (names.level_name(ids[at : at + 16]) for at in range(0, len(ids), 16))
        return [name for name in called if name not in self._data]

    def answer(self, version: Version, key: bytes) -> Entry | None:
        """The newest version of `key`; None: there is none, or a range tombstone hides it."""
        lowest = 1 << 64  # of the versions of this key in newer sources
        found: Entry | None = None
        hidden_below = 0
        for info in version.sources_of(key):
            read = self._sst(info)
            point = read.points.get(key)
            over = [t.seq for t in read.range_tombstones if _covers(t, key)]
            seqs = [*over, *([point.seq] if point else [])]
            if seqs and max(seqs) >= lowest:
                raise Violation(
                    f"I9: {key!r} has {max(seqs)} in {info.id.hex()} of level {info.level}, below "
                    f"a source with {lowest}"
                )
            lowest = min([lowest, *seqs])
            hidden_below = max([hidden_below, *over])
            if found is None and point is not None and point.seq >= hidden_below:
                found = point
        return found

    def _sst(self, info: SstInfo) -> _Read:
        if info.id not in self._read:
            name = names.level_name(info.id)
            data, seq = self._data[name], info.max_seq
            sst = open_sst(name, data, database_id=self._database_id, assigned_seq=seq)
            entries = list(sst.entries())
            points = {entry.key: entry for entry in entries}
            if len(points) < len(entries):
                raise Violation(f"I9: {name} has two versions of one key: {entries}")
            self._read[info.id] = _Read(points, list(sst.range_tombstones()))
        return self._read[info.id]


@checks(9, "database")
def check_i9_levels_are_the_log(order: SerialOrder, stored: Stored) -> int:
    """The levels of every manifest are the effect of its slots up to c; how many were checked."""
    states = LevelStates(stored)
    checked = 0
    for before, after in pairwise(stored.manifests):
        if _is_same(before, after):
            continue
        missing = states.missing(after)
        if missing:
            raise Violation(f"I8: manifest {after.manifest_id} names {missing}, never written")
        checked += 1
        _check_c(stored, after)
        levels = Version.of(after)
        for key in order.timeline.keys:
            version = order.timeline.at(key, after.last_compacted_seq)
            found = states.answer(levels, key)
            if not _agrees(found, version, after.logical_time_ms):
                raise Violation(
                    f"I2, I9: the levels of manifest {after.manifest_id} say {found} of {key!r}, "
                    f"and the log up to slot {after.wal_id_last_compacted} says {version} "
                    f"at {after.logical_time_ms}"
                )
    return checked


@checks(9, "database")
def check_i9_published_once(stored: Stored) -> None:
    """No slot is compacted twice, and no SST comes back that was replaced."""
    gone: set[bytes] = set()
    for before, after in pairwise(stored.manifests):
        if after.first_uncompacted_wal_id < before.first_uncompacted_wal_id:
            raise Violation(f"I9: c goes down in manifest {after.manifest_id}")
        ids_before = {info.id for info in before.leveled_ssts}
        ids_after = {info.id for info in after.leveled_ssts}
        if gone & ids_after:
            again = ", ".join(each.hex() for each in gone & ids_after)
            raise Violation(f"I9: {again} comes back in manifest {after.manifest_id}")
        gone |= ids_before - ids_after
        is_wal_job = after.wal_id_last_compacted != before.wal_id_last_compacted
        if ids_after > ids_before and not is_wal_job:
            raise Violation(f"I9: manifest {after.manifest_id} adds SSTs, and c stays")


def _is_same(before: Manifest, after: Manifest) -> bool:
    fields = ("leveled_ssts", "wal_id_last_compacted", "last_compacted_seq")
    return all(getattr(before, name) == getattr(after, name) for name in fields)


def _check_c(stored: Stored, manifest: Manifest) -> None:
    """`last_compacted_seq` is that of slot c, and no SST holds more."""
    c = manifest.wal_id_last_compacted
    slots = [each for each in stored.wal if c is not None and each.wal_id <= c]
    last_seq = max((e.seq for each in slots for e in each.all_entries), default=0)
    held = max((i.max_seq for i in manifest.leveled_ssts if i.level != SYSTEM_LEVEL), default=0)
    if manifest.last_compacted_seq != last_seq or held > last_seq:
        raise Violation(
            f"I9: manifest {manifest.manifest_id} has compacted up to {manifest.last_compacted_seq}"
            f", its levels hold {held}, and slot {c} ends with {last_seq}"
        )


def _agrees(found: Entry | None, version: KeyVersion, now_ms: int) -> bool:
    """Return whether all reads from `now_ms` on are answered alike.

    REQUIRES: no read is older.
    """
    is_there = version.value is not None and not 0 < version.expire_at_ms <= now_ms
    if not is_there:
        return found is None or not found.is_visible(now_ms)
    return found is not None and (
        (found.kind, found.value, found.seq, found.expire_at_ms)
        == (Kind.PUT, version.value, version.seq, version.expire_at_ms)
    )


def _covers(tombstone: Entry, key: bytes) -> bool:
    return tombstone.key <= key and (not tombstone.value or key < tombstone.value)
