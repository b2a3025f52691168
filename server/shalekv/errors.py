"""All errors that ShaleKV raises: `ShaleError` and its subclasses.

`reason` is the stable name that clients see. `shalekv.rpc.status` maps each error to its gRPC
status.
"""

from __future__ import annotations

from typing import ClassVar


class ShaleError(Exception):
    """Base class. The message says what happened, to which object, and what the caller can do."""

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


class QuotaExceeded(Overloaded):
    """The caller has used what its quota allows; nothing was applied. Try again after the delay.

    `quota` is the name of the limit, such as `calls_per_s`.
    """

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, retry_after_ms: int, quota: str) -> None:
        """`retry_after_ms`: when the quota allows the operation again, if nothing else is sent."""
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.quota = quota


class Unauthenticated(ShaleError):
    """The server does not know who calls: there are no credentials, or they are not valid."""

    reason = "UNAUTHENTICATED"

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        """`message` shows nothing of the credentials.

        `retry_after_ms` is for a peer whose credentials are not looked at until then, because
        those that it has sent before were not valid; 0: it may try others at once.
        """
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class IssuerUnavailable(ShaleError):
    """The keys of the issuer of a token cannot be fetched. Nothing was applied; try again later."""

    reason = "ISSUER_UNAVAILABLE"


class PermissionDenied(ShaleError):
    """The roles of the caller do not allow the operation; nothing was applied.

    `verb` is what it would have needed.
    """

    reason = "PERMISSION_DENIED"

    def __init__(self, message: str, *, verb: str) -> None:
        """`message` names no key that the caller did not name."""
        super().__init__(message)
        self.verb = verb


class PolicyChanged(ShaleError):
    """Another access policy was stored since the one that a change is based on. Read it again."""

    reason = "POLICY_CHANGED"


class PolicyUnknown(ShaleError):
    """The access policy was not seen for too long: it may have changed. Nothing was applied."""

    reason = "POLICY_UNKNOWN"


class StreamTooSlow(ShaleError):
    """A stream was ended: its client did not take its results while others waited for memory.

    A scan can go on behind the last key that was received. The outcome of writes of a session that
    have no reply is unknown.
    """

    reason = "STREAM_TOO_SLOW"


class ReplyTooLarge(ShaleError):
    """The reply would exceed the message limit. Ask for less at once."""

    reason = "REPLY_TOO_LARGE"


class RangeTooCostly(ShaleError):
    """A condition on a range would read too many deleted or expired keys. Ask for less."""

    reason = "RANGE_TOO_COSTLY"


class ConditionFailed(ShaleError):
    """A precondition of a write does not hold. Nothing was applied: read, and decide anew."""

    reason = "CONDITION_FAILED"

    def __init__(self, message: str, *, condition: str, found_seq: int) -> None:
        """`condition` is its name in the request, `found_seq` that of the value, 0 if none."""
        super().__init__(message)
        self.condition = condition
        self.found_seq = found_seq


class NotACounter(ShaleError):
    """An add to a value that is not a counter. Nothing was applied."""

    reason = "NOT_A_COUNTER"


class CounterOverflow(ShaleError):
    """An add beyond what 64 bits hold. Nothing was applied."""

    reason = "COUNTER_OVERFLOW"


class KeyReused(ShaleError):
    """An idempotency key was used for another request. Nothing was applied: choose a new key."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class KeyExpired(ShaleError):
    """An idempotency key was used longer ago than is remembered.

    This request was not applied. Read to find out whether the first one was.
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
    """The state of the database does not allow the operation."""

    reason = "DATABASE"


class DatabaseNotFound(DatabaseError):
    """There is no database at this URL. Check it, or create one with `shalekv serve --create`."""

    reason = "DATABASE_NOT_FOUND"


class DatabaseExists(DatabaseError):
    """There is a database at this URL already."""

    reason = "DATABASE_EXISTS"


class DatabaseMismatch(DatabaseError):
    """The database was created with other properties than it is opened with."""

    reason = "DATABASE_MISMATCH"


class ImplausibleTime(DatabaseError):
    """No other clock or commit supports the time of the store's clock. Correct the clocks."""

    reason = "IMPLAUSIBLE_TIME"


class OriginLost(DatabaseError):
    """The database from which this one was cloned does not keep the shared SSTs any more.

    They may be deleted. Restore the clone from a copy, or create it again.
    """

    reason = "ORIGIN_LOST"


class ManifestVersionExists(DatabaseError):
    """Another process edited the manifest first, and the caller did not want a retry.

    With `--open-once`: another writer opened the database at the same time.
    """

    reason = "MANIFEST_VERSION_EXISTS"


class ManifestConflict(DatabaseError):
    """Other processes have edited the manifest, or the store was slow: the edit was given up."""

    reason = "MANIFEST_CONFLICT"


class IllegalState(DatabaseError):
    """The protocol rules this state out. The process stops and changes nothing."""

    reason = "ILLEGAL_STATE"


class InvalidUrl(ShaleError):
    """Not the URL of a database."""

    reason = "INVALID_URL"


class InvalidSetting(ShaleError):
    """A setting is out of its limits."""

    reason = "INVALID_SETTING"


class LeaseLost(ShaleError):
    """The lease of a job has expired: its objects may be deleted. Nothing was published."""

    reason = "LEASE_LOST"


class PartFailed(ShaleError):
    """A process that merges a part of a compaction has failed. Nothing was published."""

    reason = "PART_FAILED"


class LoadUnknown(ShaleError):
    """A load was registered too long ago, or never: it is unknown whether it was committed."""

    reason = "LOAD_UNKNOWN"


class BackupNotFound(ShaleError):
    """There is no such backup at this URL. List the existing ones."""

    reason = "BACKUP_NOT_FOUND"


class BackupBusy(ShaleError):
    """Backups are made and deleted at this URL at the same time. Try again when one has ended."""

    reason = "BACKUP_BUSY"


class ProfileRefused(ShaleError):
    """No profile can be taken: another one is, or the server lacks a package. See the message."""

    reason = "PROFILE_REFUSED"


class WrongRole(ShaleError):
    """This process has another role: it answers no such calls. See the message for who does."""

    reason = "WRONG_ROLE"


class Stopping(ShaleError):
    """This process no longer serves. Nothing was applied: try another address."""

    reason = "STOPPING"


class Fenced(Stopping):
    """Another writer has taken over. Nothing was applied by this one: find the new writer."""

    reason = "FENCED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the writer epoch that was found."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class Superseded(Stopping):
    """Another compactor has taken over. Nothing was published by this one."""

    reason = "SUPERSEDED"

    def __init__(self, message: str, *, own_epoch: int, newer_epoch: int) -> None:
        """`newer_epoch` is the compactor epoch that was found."""
        super().__init__(message)
        self.own_epoch = own_epoch
        self.newer_epoch = newer_epoch


class StandingBy(Stopping):
    """This process waits to become the writer. Nothing was applied: try another address."""

    reason = "STANDING_BY"

    def __init__(self, message: str, *, writer_address: str) -> None:
        """`writer_address` is that of the elected process; empty if it is not known."""
        super().__init__(message)
        self.writer_address = writer_address


class CorruptObject(ShaleError):
    """Stored bytes differ from those that were written."""

    reason = "CORRUPT_OBJECT"

    def __init__(self, name: str, offset: int, problem: str) -> None:
        """`name` is the object, `offset` the byte at which the problem was found."""
        super().__init__(f"{name} at byte {offset}: {problem}")
        self.name = name
        self.offset = offset
        self.problem = problem


class BadMagic(CorruptObject):
    """The object is not one of ShaleKV."""

    reason = "BAD_MAGIC"


class UnsupportedVersion(CorruptObject):
    """The object was written by a newer version of ShaleKV. Upgrade this one."""

    reason = "UNSUPPORTED_VERSION"


class Truncated(CorruptObject):
    """The object is shorter or longer than its own length fields say."""

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
    """A majority of the safekeepers has no space left. Nothing was applied; try again later."""

    reason = "LOG_FULL"


class LogBehindArchive(DatabaseError):
    """The safekeepers that answered know less than the archive: a majority has lost its records."""

    reason = "LOG_BEHIND_ARCHIVE"


class NotAMember(ShaleError):
    """A safekeeper does not have this database, or has it as another member."""

    reason = "NOT_A_MEMBER"


class LogDamaged(ShaleError):
    """A safekeeper has lost records that it had acknowledged, and waits to be refilled."""

    reason = "LOG_DAMAGED"


class RecordTrimmed(ShaleError):
    """A record is no longer in the log of a safekeeper: it is in the archive."""

    reason = "RECORD_TRIMMED"


class NotTheWriter(ShaleError):
    """A request needs the writer, and this process is a reader. Send it to the writer."""

    reason = "NOT_THE_WRITER"

    def __init__(self, what: str, *, writer_address: str) -> None:
        """`what` is the kind of request, `writer_address` HOST:PORT, or empty if not known."""
        where = f"at {writer_address}" if writer_address else "whose address is not known here"
        super().__init__(f"{what} is for the writer, {where}: this server is a reader")
        self.writer_address = writer_address


class TooStale(ShaleError):
    """This reader is further behind than the call allows. Ask the writer, or another reader."""

    reason = "TOO_STALE"

    def __init__(self, *, staleness_ms: int, max_staleness_ms: int) -> None:
        """`staleness_ms` is the greatest age of the state, `max_staleness_ms` the allowed one."""
        super().__init__(
            f"the state of this reader may be {staleness_ms} ms old, and max_staleness_ms is "
            f"{max_staleness_ms}: ask the writer or another reader, or allow more"
        )
        self.staleness_ms = staleness_ms


class SeqNotReached(ShaleError):
    """This server did not apply the commit that a read asked for before its deadline."""

    reason = "SEQ_NOT_REACHED"

    def __init__(self, *, min_seq: int, seq: int) -> None:
        """`min_seq` is the commit that was asked for, `seq` the last one applied here."""
        super().__init__(
            f"this server is at seq {seq}; you asked for {min_seq}, and it was not reached in "
            "time: try again with more time, or ask the writer"
        )
        self.seq = seq


class PageExpired(ShaleError):
    """The view of a scan, or of its page token, is gone. Begin the scan again."""

    reason = "PAGE_EXPIRED"


class SnapshotNotFound(ShaleError):
    """A snapshot is gone or has expired: its objects may be deleted. Begin again."""

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
    """The store did not answer, or refused for a reason that may be temporary. Try again."""

    reason = "STORE_UNAVAILABLE"


class StoreRefused(StoreError):
    """The store refused: permission, credentials, bucket or a wrong clock. Correct that first."""

    reason = "STORE_REFUSED"

    def __init__(
        self, store: str, operation: str, name: str, problem: str, *, may_pass: bool = False
    ) -> None:
        """`may_pass`: the store has accepted requests before, and may accept this one later."""
        super().__init__(store, operation, name, problem)
        self.may_pass = may_pass


class StoreUnfit(StoreError):
    """The store does not guarantee what the protocol requires. Use another, or two-phase CAS."""

    reason = "STORE_UNFIT"


class StoreBroken(StoreError):
    """A sync failed: the state of the disk is unknown and this process must not write to it."""

    reason = "STORE_BROKEN"


class WalCollected(ShaleError):
    """A watch begins before the oldest commit that is left of the WAL. Read the state again."""

    reason = "WAL_COLLECTED"

    def __init__(self, *, start_seq: int, oldest_seq: int) -> None:
        """`start_seq` is the requested first commit, `oldest_seq` the first possible one."""
        super().__init__(
            f"the commits from {start_seq} on are not all in the WAL any more: the oldest that a "
            f"watch can begin with is {oldest_seq}. Scan, and watch from behind that scan's seq"
        )
        self.oldest_seq = oldest_seq


class WalUnprotected(ShaleError):
    """A lease was requested on WAL objects that may be deleted at any time. Ask for later ones."""

    reason = "WAL_UNPROTECTED"

    def __init__(self, *, wal_id_min: int, first_wal_id: int) -> None:
        """`wal_id_min` is the requested first object, `first_wal_id` the first possible one."""
        super().__init__(
            f"WAL object {wal_id_min} may be deleted at any moment: nothing keeps what is before "
            f"{first_wal_id}. Begin there, or read the state anew"
        )
        self.wal_id_min = wal_id_min
        self.first_wal_id = first_wal_id


class WatchTooSlow(ShaleError):
    """A watch was closed: its events were not taken in time. Open it again at `next_seq`."""

    reason = "WATCH_TOO_SLOW"

    def __init__(self, message: str, *, next_seq: int) -> None:
        """`next_seq` is the first commit whose events were not delivered."""
        super().__init__(message)
        self.next_seq = next_seq


def raise_if(error: ShaleError | None) -> None:
    """Raise the error if there is one. Its earlier traceback is dropped, else it would grow."""
    try:
        if error is not None:
            raise error.with_traceback(None)
    finally:
        del error  # it refers to this frame
