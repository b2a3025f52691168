"""Contents of a database, computed without any code that compacts or reads levels.

Computed in two ways: from all changes ever made, and from the objects that a manifest names, by
walking the sources from the newest to the oldest. A compaction must change neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shalekv.format.names import level_name
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore

Answer = tuple[int, bytes] | None  # sequence number and value


def covers(tombstone: Entry, key: bytes) -> bool:
    return tombstone.key <= key and (not tombstone.value or key < tombstone.value)


class Versions:
    """Some entries, to be asked for the newest version of a key."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._newest: dict[bytes, Entry] = {}
        self._ranges: list[Entry] = []
        for entry in entries:
            if entry.kind is Kind.RANGE_TOMBSTONE:
                self._ranges.append(entry)
            elif entry.key not in self._newest or entry.seq >= self._newest[entry.key].seq:
                self._newest[entry.key] = entry

    def newest_of(self, key: bytes) -> Entry | None:
        """The newest version of `key`, a range tombstone over it as a tombstone."""
        best = self._newest.get(key)
        for entry in self._ranges:
            if covers(entry, key) and (best is None or entry.seq > best.seq):
                best = Entry(key, entry.seq, Kind.TOMBSTONE)
        return best


def answer(entry: Entry | None, now_ms: int) -> Answer:
    if entry is None or not entry.is_visible(now_ms):
        return None
    return entry.seq, entry.value


def answers(entries: Sequence[Entry], keys: Iterable[bytes], now_ms: int) -> dict[bytes, Answer]:
    versions = Versions(entries)
    return {key: answer(versions.newest_of(key), now_ms) for key in keys}


async def read_sst(store: ObjectStore | CasStore, info: SstInfo, database_id: bytes) -> Sst:
    """Read a whole SST, audited; it must match its entry in the manifest."""
    name = level_name(info.id)
    data = (await store.get(name)).data
    sst = open_sst(
        name, data, database_id=database_id, checksum=info.checksum, assigned_seq=info.max_seq
    )
    sst.audit()
    found = sst.footer.info(info.level)
    if not sst.footer.contents.lacks_seqs:
        expiring = [e.expire_at_ms for e in sst.entries() if e.kind is Kind.PUT and e.expire_at_ms]
        assert replace(found, first_expiry_ms=min(expiring, default=0)) == info
    return sst


class NaiveLevels:
    """All entries of all SSTs of one manifest, in memory."""

    def __init__(self, version: Version, entries: dict[bytes, list[Entry]]) -> None:
        self.version = version
        self._entries = entries
        self._versions = {sst_id: Versions(of_sst) for sst_id, of_sst in entries.items()}

    @classmethod
    async def read(cls, store: ObjectStore | CasStore, manifest: Manifest) -> NaiveLevels:
        entries = {}
        for info in manifest.leveled_ssts:
            sst = await read_sst(store, info, manifest.database_id)
            entries[info.id] = [*sst.entries(), *sst.range_tombstones(), *sst.system_entries()]
        return cls(Version.of(manifest), entries)

    def entries(self) -> list[Entry]:
        return [entry for of_sst in self._entries.values() for entry in of_sst]

    def answers(self, keys: Iterable[bytes], now_ms: int) -> dict[bytes, Answer]:
        """Walk the sources; the first that has a key decides its answer (I9)."""
        found = {}
        for key in keys:
            newest = None
            for info in self.version.sources_of(key):
                newest = self._versions[info.id].newest_of(key)
                if newest is not None:
                    break
            found[key] = answer(newest, now_ms)
        return found

    def record(self, key: bytes) -> Entry | None:
        for info in self.version.system:
            for entry in self._entries[info.id]:
                if entry.key == key:
                    return entry
        return None
