"""I8 and F1: looks at every delete just before it takes effect at the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from shalekv.core.expiry import is_lease_expired
from shalekv.core.lease import protects
from shalekv.core.manifest import Manifest
from shalekv.core.snapshot import active_manifest_ids
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import open_sst
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.nodes import Node
from tests.sim.store import SimStore
from tests.sim.stored import current_manifest

_FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


class DeleteGuard:
    """Holds what the collector deletes against what is reachable at that moment.

    What a process has open is protected by a snapshot of its own, as long as it renews that.
    """

    def __init__(self, store: SimStore) -> None:
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self._store = store
        self._decoded: dict[bytes, Manifest] = {}
        store.watch_deletes(self._look)

    @checks(8, "database")
    def check_i8_nothing_needed_is_deleted(self) -> None:
        """At the moment of each delete, nothing needed what it took, and no fence was among it.

        Needed is what the current manifest, that of an unexpired snapshot, a lease or a pending
        load names, and the log behind what is compacted. Of these objects, too, what is as young as
        the cutoff in the current manifest stays (F3).
        """
        if self.problems:
            raise Violation(self.problems[0])

    def _look(self, sender: Node, doomed: tuple[str, ...]) -> None:
        # What the store is tried with before there is a database lies in a folder of its own.
        ours = [name for name in doomed if name.startswith(_FOLDERS)]
        there = [name for name in ours if self._store.data(name) is not None]
        if not there:
            return
        manifests = self._store.names(names.MANIFEST_FOLDER)
        current = self._manifest(manifests[-1])
        now_s = self._store.clock_ms() / 1_000
        active = [
            self._manifest(names.manifest_name(each))
            for each in sorted(active_manifest_ids(current, now_s))
        ]
        for name in there:
            self.seen[name.partition("/")[0]] += 1
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
        sections = (sst.entries(), sst.range_tombstones(), sst.system_entries())
        return not any(True for section in sections for _ in section)


@checks(8, "database")
def check_i8_levels_are_what_is_named(store: SimStore) -> None:
    """What is in levels/ is exactly what the current manifest names: all of it, and no orphan.

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
