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

from typing import ClassVar


class ShaleError(Exception):
    """Says what happened, to which object, and what the caller can do."""

    reason: ClassVar[str] = "INTERNAL"


class InvalidRequest(ShaleError):
    """A field of a request is out of its limits. Correct the request."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        """`field` is the path of the field in the request, such as ``changes[3].put.key``."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Overloaded(ShaleError):
    """Nothing was applied; try again after `retry_after_ms`."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        """`retry_after_ms` is advice for the caller."""
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QueueFull(Overloaded):
    """More bytes wait for their upload than the settings allow."""

    reason = "QUEUE_FULL"


class MemtableFull(Overloaded):
    """More bytes are not compacted yet than the settings allow."""

    reason = "MEMTABLE_FULL"


class StreamTooSlow(ShaleError):
    """A stream was ended: its client did not take its results while others waited for memory.

    A scan goes on behind the last key that came. What became of the writes of a session that are
    not answered is unknown.
    """

    reason = "STREAM_TOO_SLOW"


class ReplyTooLarge(ShaleError):
    """The reply would pass the message limit. Ask for less at once."""

    reason = "REPLY_TOO_LARGE"


class RangeTooCostly(ShaleError):
    """A condition on a range would look at too many deleted or expired keys. Ask for less."""

    reason = "RANGE_TOO_COSTLY"


class ConditionFailed(ShaleError):
    """What a write demanded of its key does not hold. Nothing was applied: read, decide anew."""

    reason = "CONDITION_FAILED"

    def __init__(self, message: str, *, condition: str, found_seq: int) -> None:
        """`condition` is its name in the request, `found_seq` that of the value; 0: none."""
        super().__init__(message)
        self.condition = condition
        self.found_seq = found_seq


class NotACounter(ShaleError):
    """An add to a value that is no counter. Nothing was applied."""

    reason = "NOT_A_COUNTER"


class CounterOverflow(ShaleError):
    """An add beyond what 64 bits hold. Nothing was applied."""

    reason = "COUNTER_OVERFLOW"


class KeyReused(ShaleError):
    """An idempotency key was used for another request. Nothing was applied: choose a new key."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class KeyExpired(ShaleError):
    """An idempotency key was used longer ago than is remembered.

    This request was not applied; whether the first one was, read to find out.
    """

    reason = "IDEMPOTENCY_KEY_EXPIRED"


class DeadlinePassed(ShaleError):
    """The deadline came before there was an answer. Nothing was applied: give it more time."""

    reason = "DEADLINE_PASSED"


class OutcomeUnknown(ShaleError):
    """The write may be applied now, later, or never. Read to find out, or repeat it."""

    reason = "OUTCOME_UNKNOWN"


class WriteTimedOut(OutcomeUnknown):
    """The write was not durable by the deadline of its call. It may be applied now or later."""

    reason = "WRITE_TIMED_OUT"


class DatabaseError(ShaleError):
    """The database as a whole is not as it must be."""

    reason = "DATABASE"


class DatabaseNotFound(DatabaseError):
    """There is no database at this URL. Check it, or create one with `shalekv serve --create`."""

    reason = "DATABASE_NOT_FOUND"


class DatabaseExists(DatabaseError):
    """There is a database at this URL already."""

    reason = "DATABASE_EXISTS"


class DatabaseMismatch(DatabaseError):
    """The database was created in another way than it is opened in."""

    reason = "DATABASE_MISMATCH"


class ImplausibleTime(DatabaseError):
    """The store's clock is far from all that it can be compared with. Set the clocks right."""

    reason = "IMPLAUSIBLE_TIME"


class OriginLost(DatabaseError):
    """The database that this one was cloned from does not keep the SSTs any more that both share.

    They may be deleted. Restore the clone from a copy, or make it anew.
    """

    reason = "ORIGIN_LOST"


class ManifestVersionExists(DatabaseError):
    """Another process edited the manifest first, and the caller asked not to try again.

    With `--open-once`: another writer opened the database at the same time.
    """

    reason = "MANIFEST_VERSION_EXISTS"


class ManifestConflict(DatabaseError):
    """Other processes edited the manifest first, again and again, until the deadline."""

    reason = "MANIFEST_CONFLICT"


class IllegalState(DatabaseError):
    """The protocol rules this out. The process stops and touches nothing."""

    reason = "ILLEGAL_STATE"


class InvalidUrl(ShaleError):
    """Not the URL of a database."""

    reason = "INVALID_URL"


class InvalidSetting(ShaleError):
    """A setting is out of its limits."""

    reason = "INVALID_SETTING"


class LeaseLost(ShaleError):
    """The lease of a job has expired, and what it wrote may be deleted. Nothing was published."""

    reason = "LEASE_LOST"


class PartFailed(ShaleError):
    """A process that merged a part of a compaction has failed. Nothing was published."""

    reason = "PART_FAILED"


class LoadUnknown(ShaleError):
    """A load was registered too long ago, or never: whether it was committed is not known here."""

    reason = "LOAD_UNKNOWN"


class BackupNotFound(ShaleError):
    """There is no such backup at this URL. List those that there are."""

    reason = "BACKUP_NOT_FOUND"


class BackupBusy(ShaleError):
    """Backups are made and deleted at this URL at the same time. Try again when one has ended."""

    reason = "BACKUP_BUSY"


class Stopping(ShaleError):
    """This process no longer serves. Nothing was applied: try another address."""

    reason = "STOPPING"


class Fenced(Stopping):
    """Another writer has taken over. Nothing was applied by this one: find the new writer."""

    reason = "FENCED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the epoch that was met."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class Superseded(Stopping):
    """Another compactor has taken over. Nothing was published by this one."""

    reason = "SUPERSEDED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the compactor epoch that was met."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class StandingBy(Stopping):
    """This process waits to be elected as the writer. Nothing was applied: try another address."""

    reason = "STANDING_BY"

    def __init__(self, message: str, *, writer_address: str) -> None:
        """`writer_address` is that of whoever is elected; empty if nobody is known to be."""
        super().__init__(message)
        self.writer_address = writer_address


class CorruptObject(ShaleError):
    """Stored bytes are not what was written."""

    reason = "CORRUPT_OBJECT"

    def __init__(self, name: str, offset: int, problem: str) -> None:
        """`name` is the object, `offset` the byte at which the problem was seen."""
        super().__init__(f"{name} at byte {offset}: {problem}")
        self.name = name
        self.offset = offset
        self.problem = problem


class BadMagic(CorruptObject):
    """Not an object of ours."""

    reason = "BAD_MAGIC"


class UnsupportedVersion(CorruptObject):
    """Written by a newer version of ShaleKV. Upgrade this one."""

    reason = "UNSUPPORTED_VERSION"


class Truncated(CorruptObject):
    """The object is shorter, or longer, than it says."""

    reason = "TRUNCATED"


class BadChecksum(CorruptObject):
    """A checksum does not match."""

    reason = "BAD_CHECKSUM"


class WrongObject(CorruptObject):
    """The bytes are intact, but belong to another name or to another database."""

    reason = "WRONG_OBJECT"


class BadStructure(CorruptObject):
    """The checksums match, but the contents contradict each other or the format."""

    reason = "BAD_STRUCTURE"


class QuorumUnavailable(ShaleError):
    """No majority of the safekeepers answers. Nothing was applied; try again later."""

    reason = "QUORUM_UNAVAILABLE"


class LogFull(Overloaded):
    """A majority of the safekeepers has no room for more. Nothing was applied; try again later."""

    reason = "LOG_FULL"


class LogBehindArchive(DatabaseError):
    """The safekeepers that answered know less than the archive: a majority has lost its records."""

    reason = "LOG_BEHIND_ARCHIVE"


class NotAMember(ShaleError):
    """A safekeeper does not have this database, or as another member than it was asked for."""

    reason = "NOT_A_MEMBER"


class LogDamaged(ShaleError):
    """A safekeeper has lost records that it had acknowledged, and waits to be filled again."""

    reason = "LOG_DAMAGED"


class RecordTrimmed(ShaleError):
    """A record is not in the log of a safekeeper any more: it is in the archive."""

    reason = "RECORD_TRIMMED"


class NotTheWriter(ShaleError):
    """Only the writer can do this, and this process is a reader. Ask the writer."""

    reason = "NOT_THE_WRITER"

    def __init__(self, what: str, *, writer_address: str) -> None:
        """`what` needs the writer, whose HOST:PORT may be unknown, and empty then."""
        where = f"at {writer_address}" if writer_address else "whose address is not known here"
        super().__init__(f"{what} is for the writer, {where}: this server is a reader")
        self.writer_address = writer_address


class TooStale(ShaleError):
    """This reader is further behind than the call allows. Ask the writer, or another reader."""

    reason = "TOO_STALE"

    def __init__(self, *, staleness_ms: int, max_staleness_ms: int) -> None:
        """How old the state is, and how old it might have been."""
        super().__init__(
            f"the state of this reader may be {staleness_ms} ms old, and max_staleness_ms is "
            f"{max_staleness_ms}: ask the writer or another reader, or allow more"
        )
        self.staleness_ms = staleness_ms


class SeqNotReached(ShaleError):
    """This server has not applied, within the deadline, the commit that a read asked for."""

    reason = "SEQ_NOT_REACHED"

    def __init__(self, *, min_seq: int, seq: int) -> None:
        """What was asked for, and how far this server has come."""
        super().__init__(
            f"this server has applied commits up to {seq}, and not up to min_seq {min_seq} before "
            "the deadline: try again, or ask the writer"
        )
        self.seq = seq


class PageExpired(ShaleError):
    """The view of a scan, or of its page token, is gone. Begin the scan again."""

    reason = "PAGE_EXPIRED"


class SnapshotNotFound(ShaleError):
    """A snapshot is gone, or has expired: what it protected may be deleted. Begin again."""

    reason = "SNAPSHOT_NOT_FOUND"


class SnapshotExists(ShaleError):
    """Another snapshot has the name. Choose another one."""

    reason = "SNAPSHOT_EXISTS"


class StoreError(ShaleError):
    """The object store failed."""

    reason = "STORE"

    def __init__(self, store: str, operation: str, name: str, problem: str) -> None:
        """`store` is its URL without credentials, `operation` such as ``create``."""
        super().__init__(f"{store}: {operation} {name}: {problem}")
        self.store = store
        self.operation = operation
        self.name = name
        self.problem = problem


class ObjectNotFound(StoreError):
    """No object has this name."""

    reason = "OBJECT_NOT_FOUND"


class StoreUnavailable(StoreError):
    """No answer, or a refusal that may pass. Try again."""

    reason = "STORE_UNAVAILABLE"


class StoreRefused(StoreError):
    """No permission, wrong credentials, no such bucket, a clock that is wrong: mend that first."""

    reason = "STORE_REFUSED"

    def __init__(
        self, store: str, operation: str, name: str, problem: str, *, may_pass: bool = False
    ) -> None:
        """`may_pass`: a store that has accepted requests before may accept this one later."""
        super().__init__(store, operation, name, problem)
        self.may_pass = may_pass


class StoreUnfit(StoreError):
    """The store does not keep what the protocol rests on. Use another one, or two-phase CAS."""

    reason = "STORE_UNFIT"


class StoreBroken(StoreError):
    """A sync failed: the state of the disk is unknown and this process must not write to it."""

    reason = "STORE_BROKEN"


class WalCollected(ShaleError):
    """A watch begins before the oldest commit that is left of the WAL. Read the state anew."""

    reason = "WAL_COLLECTED"

    def __init__(self, *, start_seq: int, oldest_seq: int) -> None:
        """Where the watch was to begin, and the first commit with which it can."""
        super().__init__(
            f"the commits from {start_seq} on are not all in the WAL any more: the oldest that a "
            f"watch can begin with is {oldest_seq}. Scan, and watch from behind that scan's seq"
        )
        self.oldest_seq = oldest_seq


class WalUnprotected(ShaleError):
    """A lease was asked for WAL objects that may be deleted at any moment. Ask for later ones."""

    reason = "WAL_UNPROTECTED"

    def __init__(self, *, wal_id_min: int, first_wal_id: int) -> None:
        """The first object that was to be kept, and the first that can be."""
        super().__init__(
            f"WAL object {wal_id_min} may be deleted at any moment: nothing keeps what is before "
            f"{first_wal_id}. Begin there, or read the state anew"
        )
        self.wal_id_min = wal_id_min
        self.first_wal_id = first_wal_id


class WatchTooSlow(ShaleError):
    """A watch was closed: it was not taken in time. Open it again where it was closed."""

    reason = "WATCH_TOO_SLOW"

    def __init__(self, message: str, *, next_seq: int) -> None:
        """All before commit `next_seq` was told."""
        super().__init__(message)
        self.next_seq = next_seq


# --- errors
