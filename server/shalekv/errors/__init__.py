"""Everything that ShaleKV raises, as one tree.

ShaleError
├── InvalidRequest             a field of a request is out of its limits
├── Overloaded                 come back later; nothing was applied
│   ├── QueueFull              too many bytes wait for their upload
│   ├── LogFull                a majority of the safekeepers has no room
│   └── MemtableFull           too many bytes are not compacted yet
├── StreamTooSlow              results were not taken while others waited for memory
├── ReplyTooLarge              the reply would pass the message limit
├── RangeTooCostly             a condition on a range would look at too many deleted keys
├── ConditionFailed            what a write demanded of its key does not hold
├── NotACounter                an add to a value that is no counter
├── CounterOverflow            an add beyond 64 bits
├── KeyReused                  an idempotency key was used for another request
├── KeyExpired                 an idempotency key was used longer ago than is remembered
├── NotTheWriter               a reader was asked for what only the writer can do
├── TooStale                   this reader is further behind than the call allows
├── PageExpired                the view of a scan or of its page token is gone
├── SnapshotNotFound           a snapshot is gone, or has expired
├── SnapshotExists             another snapshot has the name
├── LeaseLost                  what a job has written may be deleted: nothing was published
├── BackupNotFound             there is no such backup at this URL
├── BackupBusy                 backups are made and deleted there at the same time
├── WalCollected               a watch begins before what is left of the WAL
├── WalUnprotected             a lease on WAL objects that may be deleted at any moment
├── WatchTooSlow               a watch was closed: it was not taken in time
├── PartFailed                 a process that merged a part of a compaction has failed
├── LoadUnknown                a load was registered too long ago, or never
├── DeadlinePassed             the deadline of a call came before there was an answer
├── SeqNotReached              ... before this server had applied the commit that it asked for
├── Stopping                   this process no longer serves; nothing was applied
│   ├── Fenced                 because another writer has taken over
│   ├── Superseded             because another compactor has taken over
│   └── StandingBy             because another process is elected as the writer
├── OutcomeUnknown             a write was sent to the store and nobody can tell what became of it
│   └── WriteTimedOut          it was not durable by the deadline of its call
├── QuorumUnavailable          no majority of the safekeepers answers; nothing was applied
├── NotAMember                 a safekeeper does not have this database, or as another member
├── LogDamaged                 a safekeeper has lost records, and waits to be filled again
├── RecordTrimmed              a record is only in the archive any more
├── DatabaseError              the database as a whole is not as it must be
│   ├── DatabaseNotFound       there is none at this URL
│   ├── DatabaseExists         there is one already
│   ├── DatabaseMismatch       it was created in another way than it is opened in
│   ├── ImplausibleTime        the store's clock is far from all that it can be compared with
│   ├── LogBehindArchive       the safekeepers know less than the archive
│   ├── OriginLost             what it was cloned from does not keep its SSTs any more
│   ├── ManifestVersionExists  another process edited the manifest first
│   ├── ManifestConflict       ... again and again, until the deadline
│   └── IllegalState           the protocol rules this out: stop, touch nothing, tell a human
├── CorruptObject              stored bytes are not what was written
│   ├── BadMagic               not an object of ours
│   ├── UnsupportedVersion     written by a newer version
│   ├── Truncated              shorter than it says, or longer
│   ├── BadChecksum            a checksum does not match
│   ├── WrongObject            intact, but belongs to another name or database
│   └── BadStructure           checksums match, contents contradict each other
├── StoreError                 the object store failed
│   ├── ObjectNotFound         no object has this name
│   ├── StoreUnavailable       no answer, or a refusal that may pass
│   ├── StoreRefused           a refusal that stays until somebody mends its cause
│   ├── StoreUnfit             it does not keep what the protocol rests on
│   └── StoreBroken            a sync failed: nothing more may be written by this process
├── InvalidUrl                 not the URL of a database
└── InvalidSetting             a setting is out of its limits

`reason` is the stable name that clients see; which gRPC status each becomes is decided in
`shalekv.rpc.status` alone.
"""

from __future__ import annotations

from shalekv.errors.database import (
    DatabaseError,
    DatabaseExists,
    DatabaseMismatch,
    DatabaseNotFound,
    IllegalState,
    ImplausibleTime,
    InvalidSetting,
    InvalidUrl,
    ManifestConflict,
    ManifestVersionExists,
    OriginLost,
)
from shalekv.errors.jobs import (
    BackupBusy,
    BackupNotFound,
    LeaseLost,
    LoadUnknown,
    PartFailed,
)
from shalekv.errors.lifecycle import (
    Fenced,
    StandingBy,
    Stopping,
    Superseded,
)
from shalekv.errors.objects import (
    BadChecksum,
    BadMagic,
    BadStructure,
    CorruptObject,
    Truncated,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.errors.quorum import (
    LogBehindArchive,
    LogDamaged,
    LogFull,
    NotAMember,
    QuorumUnavailable,
    RecordTrimmed,
)
from shalekv.errors.reads import (
    NotTheWriter,
    PageExpired,
    SeqNotReached,
    SnapshotExists,
    SnapshotNotFound,
    TooStale,
)
from shalekv.errors.requests import (
    ConditionFailed,
    CounterOverflow,
    DeadlinePassed,
    InvalidRequest,
    KeyExpired,
    KeyReused,
    MemtableFull,
    NotACounter,
    OutcomeUnknown,
    Overloaded,
    QueueFull,
    RangeTooCostly,
    ReplyTooLarge,
    StreamTooSlow,
    WriteTimedOut,
)
from shalekv.errors.root import (
    ShaleError,
)
from shalekv.errors.store import (
    ObjectNotFound,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnfit,
)
from shalekv.errors.watches import (
    WalCollected,
    WalUnprotected,
    WatchTooSlow,
)

__all__ = [
    "BackupBusy",
    "BackupNotFound",
    "BadChecksum",
    "BadMagic",
    "BadStructure",
    "ConditionFailed",
    "CorruptObject",
    "CounterOverflow",
    "DatabaseError",
    "DatabaseExists",
    "DatabaseMismatch",
    "DatabaseNotFound",
    "DeadlinePassed",
    "Fenced",
    "IllegalState",
    "ImplausibleTime",
    "InvalidRequest",
    "InvalidSetting",
    "InvalidUrl",
    "KeyExpired",
    "KeyReused",
    "LeaseLost",
    "LoadUnknown",
    "LogBehindArchive",
    "LogDamaged",
    "LogFull",
    "ManifestConflict",
    "ManifestVersionExists",
    "MemtableFull",
    "NotACounter",
    "NotAMember",
    "NotTheWriter",
    "ObjectNotFound",
    "OriginLost",
    "OutcomeUnknown",
    "Overloaded",
    "PageExpired",
    "PartFailed",
    "QueueFull",
    "QuorumUnavailable",
    "RangeTooCostly",
    "RecordTrimmed",
    "ReplyTooLarge",
    "SeqNotReached",
    "ShaleError",
    "SnapshotExists",
    "SnapshotNotFound",
    "StandingBy",
    "Stopping",
    "StoreBroken",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUnfit",
    "StreamTooSlow",
    "Superseded",
    "TooStale",
    "Truncated",
    "UnsupportedVersion",
    "WalCollected",
    "WalUnprotected",
    "WatchTooSlow",
    "WriteTimedOut",
    "WrongObject",
]
