"""I9 and I2: the levels of every manifest, read by other code than the product's readers.

The levels are exactly the effect of the slots up to c. So whatever is compacted, and whoever does
it, each manifest's levels answer what the log says at `last_compacted_seq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shalekv.core.entry import Entry, Kind
from shalekv.core.manifest import Manifest
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import SYSTEM_LEVEL, Tree
from shalekv.format import names
from shalekv.format.sst import open_sst
from tests.kit.model import Version
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.serial import SerialOrder
from tests.sim.stored import Stored


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

    def answer(self, tree: Tree, key: bytes) -> Entry | None:
        """The newest version of `key`; None: there is none, or a range tombstone hides it."""
        lowest = 1 << 64  # of what stands in newer sources for this key
        found: Entry | None = None
        hidden_below = 0
        for info in tree.sources_of(key):
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
            sst = open_sst(name, self._data[name], database_id=self._database_id)
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
        tree = Tree.of(after)
        for key in order.timeline.keys:
            version = order.timeline.at(key, after.last_compacted_seq)
            found = states.answer(tree, key)
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
    slots = stored.wal[: 0 if c is None else c + 1]
    last_seq = max((e.seq for each in slots for e in each.all_entries), default=0)
    held = max((i.max_seq for i in manifest.leveled_ssts if i.level != SYSTEM_LEVEL), default=0)
    if manifest.last_compacted_seq != last_seq or held > last_seq:
        raise Violation(
            f"I9: manifest {manifest.manifest_id} has compacted up to {manifest.last_compacted_seq}"
            f", its levels hold {held}, and slot {c} ends with {last_seq}"
        )


def _agrees(found: Entry | None, version: Version, now_ms: int) -> bool:
    """Whether all reads from `now_ms` on, when nothing is older than that, are answered alike."""
    is_there = version.value is not None and not 0 < version.expire_at_ms <= now_ms
    if not is_there:
        return found is None or not found.is_visible(now_ms)
    return found is not None and (
        (found.kind, found.value, found.seq, found.expire_at_ms)
        == (Kind.PUT, version.value, version.seq, version.expire_at_ms)
    )


def _covers(tombstone: Entry, key: bytes) -> bool:
    return tombstone.key <= key and (not tombstone.value or key < tombstone.value)
