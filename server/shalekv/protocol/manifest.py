"""The manifest as a value: the state of the database at a point in time.

Field names are those of the design document (seed 000, "Structure"); `protos/shalekv/v1/
manifest.proto` documents each of them. Edits are functions from manifest to manifest and live
beside the rules that they serve (`core.fencing`, later compaction and snapshots).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from shalekv.protocol.sst_table import SstTable

MANIFEST_FORMAT_VERSION = 1
NO_NONCE = bytes(16)


class CasMode(enum.Enum):
    """How an object is created only if it does not exist."""

    NATIVE = 1
    TWO_PHASE = 2


class WalMode(enum.Enum):
    """Where a write is made durable."""

    OBJECT_STORE = 1
    QUORUM = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The promise that the objects of one manifest stay readable."""

    id: bytes
    manifest_id: int
    snapshot_expire_time_s: int  # by the store's clock; 0: never
    name: str = ""
    manifest_checksum: int = 0
    created_ms: int = 0  # by the store's clock; 0: it is read as of its last commit
    ssts_only: bool = False  # it keeps no WAL object, and cannot be read


@dataclass(frozen=True, slots=True)
class Origin:
    """Another database, some of whose SSTs are read by this one: see `core.origins`."""

    database_id: bytes  # that wrote them, as they say themselves
    url: str  # where they are; empty: in the levels folder of this database
    snapshot_id: bytes  # in the manifest there, which keeps them; empty where the URL is
    sst_ids: bytes  # 16 bytes each; empty: none is read any more


@dataclass(frozen=True, slots=True)
class Lease:
    """Protects objects that a job writes before a manifest names them."""

    id: bytes
    expire_time_s: int
    holder: str
    wal_id_min: int | None = None
    reserved_seq: int | None = None  # SSTs with entries up to here are merged by its holder alone


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load whose files are pinned until a WAL record commits it."""

    load_id: str
    ssts: SstTable


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """A load that was committed."""

    load_id: str
    seq: int
    logical_time_ms: int = 0  # of the WAL object that commits it


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of the manifest. c of the protocol is `wal_id_last_compacted`."""

    database_id: bytes
    manifest_id: int
    write_id: bytes
    cas_mode: CasMode = CasMode.NATIVE
    wal_mode: WalMode = WalMode.OBJECT_STORE
    wal_generation: int = 0
    wal_members: tuple[str, ...] = ()  # safekeepers: see `core.quorum.membership`
    wal_members_next: tuple[str, ...] = ()  # while a change of members is under way
    wal_ids_left_out: tuple[range, ...] = ()  # by switches to safekeepers, the lowest first
    writer_epoch: int = 0
    writer_nonce: bytes = NO_NONCE
    writer_address: str = ""
    writer_first_seq: int = 0  # 0: no writer has served yet
    compactor_epoch: int = 0
    compactor_nonce: bytes = NO_NONCE
    wal_id_last_compacted: int | None = None
    wal_id_last_seen: int | None = None
    last_compacted_seq: int = 0
    max_parallel_writes: int = 1
    fence_width: int = 1
    gc_cutoff_ms: int = 0
    logical_time_ms: int = 0
    time_reset_wal_id: int | None = None  # WAL objects up to here prove no logical time
    leveled_ssts: SstTable = field(default_factory=SstTable)
    snapshots: tuple[Snapshot, ...] = ()
    leases: tuple[Lease, ...] = ()
    pending_loads: tuple[PendingLoad, ...] = ()
    recent_loads: tuple[RecentLoad, ...] = ()
    loads_forgotten_ms: int = 0  # logical time of the latest load that is not remembered
    origins: tuple[Origin, ...] = ()

    @property
    def first_uncompacted_wal_id(self) -> int:
        """Where replay begins: the slot after c, or 0."""
        return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1
