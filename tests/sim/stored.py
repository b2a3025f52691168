"""All objects that were written to the store in a run, decoded with the shipped format code.

Objects that a collector has deleted are included: they were kept. Of a name that was created again,
the first object counts: creating a collected slot or manifest again must have no effect (F1, F2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.records import client_key
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest
from shalekv.read.replay import loads_of
from shalekv.store.api import ObjectStore
from tests.sim.errors import SimulationError, Violation
from tests.sim.store import Applied, SimStore

FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


async def gather(*stores: ObjectStore) -> Stored:
    """Return the objects of all these stores, without the times at which they landed.

    Of two objects of one name, that of the first store counts. REQUIRES: no writes or deletes
    meanwhile.
    """
    objects: dict[str, bytes] = {}
    for store in stores:
        for folder in FOLDERS:
            async for info in store.list(folder):
                if info.name not in objects:
                    objects[info.name] = (await store.get(info.name)).data
    return Stored.decode(objects)


NEVER_SEEN: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class WalObject:
    """One slot of the log, decoded."""

    wal_id: int
    epoch: int
    logical_time_ms: int
    landed_us: int | None  # when the store had it; None: unknown
    entries: tuple[Entry, ...]  # puts and tombstones, those in the files of loads included
    range_tombstones: tuple[Entry, ...]
    records: tuple[Entry, ...]  # of idempotency keys

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        return (*self.entries, *self.range_tombstones, *self.records)


@dataclass(frozen=True, slots=True)
class StoredCommit:
    """Contents of the log under one sequence number."""

    seq: int
    wal: WalObject
    points: Mapping[bytes, Entry]
    ranges: tuple[tuple[bytes, bytes], ...]  # first deleted key, first not deleted (empty: no end)
    idempotency_key: bytes  # empty: it has no record

    def __str__(self) -> str:
        points = [f"{key.decode()}={_shown(entry)}" for key, entry in self.points.items()]
        ranges = [f"-[{start.decode()}, {end.decode()})" for start, end in self.ranges]
        place = f"{self.seq} in slot {self.wal.wal_id} of epoch {self.wal.epoch}"
        return f"commit {place}: {' '.join(ranges + points)}"

    @property
    def is_sweep(self) -> bool:
        """Return whether a writer made it by itself, since values of keys have expired."""
        is_expiry = all(e.kind is Kind.TOMBSTONE and e.expire_at_ms for e in self.points.values())
        return is_expiry and not self.ranges and not self.idempotency_key

    def after(self, keys: tuple[bytes, ...]) -> dict[bytes, tuple[bytes | None, int]]:
        """Value and expiry that it leaves, for each of `keys` that it touches; None: deleted."""
        left: dict[bytes, tuple[bytes | None, int]] = {}
        for start, end in self.ranges:
            left |= {key: (None, 0) for key in keys if start <= key and (not end or key < end)}
        for key, entry in self.points.items():
            is_put = entry.kind is Kind.PUT
            left[key] = (entry.value, entry.expire_at_ms) if is_put else (None, 0)
        return left


@dataclass(frozen=True, slots=True)
class Stored:
    """All manifests and WAL objects, decoded, and the SSTs of the levels as they are."""

    manifests: tuple[Manifest, ...]
    wal: tuple[WalObject, ...]  # in slot order
    levels: Mapping[str, bytes] = field(default_factory=dict)  # by name
    # Parts that became durable at once, in order, where those are less than an object of the log.
    pieces: tuple[WalObject, ...] = ()

    @property
    def durable(self) -> tuple[WalObject, ...]:
        """The log, in the pieces in which it became durable."""
        return self.pieces or self.wal

    @property
    def left_out(self) -> set[range]:
        """Ids that switches to safekeepers have left out of the log: late fences may be there."""
        return {ids for each in self.manifests for ids in each.wal_ids_left_out}

    @classmethod
    def read(cls, store: SimStore) -> Stored:
        first: dict[str, Applied] = {}
        for each in store.log:
            if each.operation == "create":
                first.setdefault(each.name, each)
        objects = {each.name: each.data for each in first.values()}
        return cls.decode(objects, {each.name: each.at_us for each in first.values()})

    @classmethod
    def decode(
        cls,
        objects: Mapping[str, bytes],
        landed_us: Mapping[str, int] = NEVER_SEEN,
    ) -> Stored:
        """Decode these objects, with the times at which the store had them, as far as known."""
        ordered = sorted(objects.items())
        manifests = [
            decode_manifest(name, data)
            for name, data in ordered
            if names.parse_manifest_name(name) is not None
        ]
        if not manifests:
            raise SimulationError("there is no manifest among the objects")
        database_id = manifests[0].database_id
        levels = {name: data for name, data in ordered if names.parse_level_name(name) is not None}
        wal = [
            wal_object(wal_id, name, data, database_id, levels, landed_us.get(name))
            for name, data in ordered
            if (wal_id := names.parse_wal_name(name)) is not None
        ]
        return cls(tuple(manifests), tuple(wal), levels)

    def commits(self) -> list[StoredCommit]:
        """All commits, in slot order and then by their numbers."""
        return list(chain.from_iterable(map(_commits, self.durable)))


def current_manifest(store: SimStore) -> Manifest:
    name = store.names(names.MANIFEST_FOLDER)[-1]
    return decode_manifest(name, store.data(name) or b"")


def _commits(wal: WalObject) -> list[StoredCommit]:
    by_seq = attrgetter("seq")
    commits = []
    keys = {record.seq: client_key(record.key) for record in wal.records}
    entries = sorted((*wal.entries, *wal.range_tombstones), key=by_seq)
    for seq, group in groupby(entries, key=by_seq):
        found = list(group)
        ranges = [(e.key, e.value) for e in found if e.kind is Kind.RANGE_TOMBSTONE]
        points = {e.key: e for e in found if e.kind is not Kind.RANGE_TOMBSTONE}
        commits.append(StoredCommit(seq, wal, points, tuple(ranges), keys.get(seq, b"")))
    return commits


def wal_object(
    wal_id: int,
    name: str,
    data: bytes,
    database_id: bytes,
    levels: Mapping[str, bytes],
    landed_us: int | None,
) -> WalObject:
    """The object with these bytes; `levels` are all SSTs that there ever were."""
    sst = open_sst(name, data, database_id=database_id)
    entries = [*sst.entries()]
    for load in loads_of(sst):
        for file in (names.level_name(info.id) for info in load.ssts):
            if file not in levels:
                raise Violation(f"I1: {name} commits {file}, which was never written")
            opened = open_sst(file, levels[file], database_id=database_id, assigned_seq=load.seq)
            entries += opened.entries()
    return WalObject(
        wal_id,
        sst.properties.writer_epoch,
        sst.properties.logical_time_ms,
        landed_us,
        tuple(entries),
        tuple(sst.range_tombstones()),
        tuple(sst.system_entries()),
    )


def _shown(entry: Entry) -> str:
    if entry.kind is not Kind.PUT:
        return "deleted"
    return repr(entry.value) + (f" until {entry.expire_at_ms}" if entry.expire_at_ms else "")
