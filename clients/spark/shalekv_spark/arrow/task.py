"""What one task of a scan reads: a value that the driver makes, and that travels to the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from shalekv.format.columns import NO_ROWS, Columns
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import Origin
from shalekv.protocol.range_tombstones import Fragment
from shalekv.protocol.sst_table import SstInfo
from shalekv_spark.place import Place

# What a task can deliver. The last three are for statistics.
TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "seq": pa.int64(),
    "expire_at": pa.timestamp("us", tz="UTC"),  # null: never
    "kind": pa.uint8(),  # `shalekv.protocol.entry.Kind`: 1 put, 2 tombstone
    "value_bytes": pa.int32(),  # the length of the value
    "is_live": pa.bool_(),  # whether this version is what a read at `now_ms` sees
}
MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WalSlot:
    """A WAL object that a task reads for itself."""

    wal_id: int
    size_bytes: int  # as the list of the store tells it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTask:
    """One range of keys of one state of a database.

    Which of two versions of a key is newer is told by their sequence numbers alone, so the order of
    `sources` does not matter, nor whether a load is older than some of the tail and newer than the
    rest.
    """

    place: Place
    database_id: bytes
    keys: KeyRange
    # Each a run of SSTs by key; those that have no key in `keys` are left alone. Loads that stand
    # in the WAL only are among these, see `shalekv.protocol.loads.load_tree`.
    sources: Sequence[Sequence[SstInfo]]
    seq: int  # what is newer is not part of the state
    now_ms: int  # logical time: what expires then or before has expired
    wal: Sequence[WalSlot] = ()  # objects that `tail` does not tell of
    tail: Columns = NO_ROWS  # rows of the WAL by key, and versions of one key newest first
    tail_ranges: Sequence[Fragment] = ()  # range tombstones of the WAL, in any order
    origins: Sequence[Origin] = ()  # of the manifest, if the database is a clone
    columns: tuple[str, ...] = ("key", "value")  # names in `TYPES`, in the order of the batches
    # Tombstones, and versions that are older, hidden or expired too: each version that is stored,
    # by key, and those of one key newest first.
    all_versions: bool = False
    memory_bytes: int = MEMORY_BYTES  # about what a task holds; never less than a block per source
    # The snapshot that keeps what is read. Its task renews it, if a time to live is given.
    snapshot_id: bytes = b""
    snapshot_ttl_s: int = 0

    @property
    def schema(self) -> pa.Schema:
        """That of the batches."""
        return schema_of(self.columns)


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The schema of batches with these columns."""
    nullable = {"expire_at"}
    return pa.schema([pa.field(name, TYPES[name], name in nullable) for name in columns])
