"""Everything that ShaleKV raises, as one tree.

ShaleError
├── InvalidRequest             a field of a request is out of its limits
├── NotImplementedYet          a documented call or option that this version does not have
├── Overloaded                 come back later; nothing was applied
│   ├── QueueFull              too many bytes wait for their upload
│   └── MemtableFull           too many bytes are not compacted yet
├── ReplyTooLarge              the reply would pass the message limit
├── RangeTooCostly             a condition on a range would look at too many deleted keys
├── ConditionFailed            what a write demanded of its key does not hold
├── NotACounter                an add to a value that is no counter
├── CounterOverflow            an add beyond 64 bits
├── KeyReused                  an idempotency key was used for another request
├── KeyExpired                 an idempotency key was used longer ago than is remembered
├── PageExpired                the view of a scan or of its page token is gone
├── SnapshotNotFound           a snapshot is gone, or has expired
├── SnapshotExists             another snapshot has the name
├── LeaseLost                  what a job has written may be deleted: nothing was published
├── PartFailed                 a process that merged a part of a compaction has failed
├── LoadUnknown                a load was registered too long ago, or never
├── DeadlinePassed             the deadline of a call had passed before any work was done
├── Stopping                   this process no longer serves; nothing was applied
│   ├── Fenced                 because another writer has taken over
│   └── Superseded             because another compactor has taken over
├── OutcomeUnknown             a write was sent to the store and nobody can tell what became of it
├── DatabaseError              the database as a whole is not as it must be
│   ├── DatabaseNotFound       there is none at this URL
│   ├── DatabaseExists         there is one already
│   ├── DatabaseMismatch       it was created in another way than it is opened in
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


class NotImplementedYet(ShaleError):
    """A documented call or option that this version does not have."""

    reason = "NOT_IMPLEMENTED"

    def __init__(self, feature: str) -> None:
        """`feature` names the call or option."""
        super().__init__(f"{feature} is not implemented by this version of the server")
        self.feature = feature


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


class PageExpired(ShaleError):
    """The view of a scan, or of its page token, is gone. Begin the scan again."""

    reason = "PAGE_EXPIRED"


class SnapshotNotFound(ShaleError):
    """A snapshot is gone, or has expired: what it protected may be deleted. Begin again."""

    reason = "SNAPSHOT_NOT_FOUND"


class SnapshotExists(ShaleError):
    """Another snapshot has the name. Choose another one."""

    reason = "SNAPSHOT_EXISTS"


class LeaseLost(ShaleError):
    """The lease of a job has expired, and what it wrote may be deleted. Nothing was published."""

    reason = "LEASE_LOST"


class PartFailed(ShaleError):
    """A process that merged a part of a compaction has failed. Nothing was published."""

    reason = "PART_FAILED"


class LoadUnknown(ShaleError):
    """A load was registered too long ago, or never: whether it was committed is not known here."""

    reason = "LOAD_UNKNOWN"


class DeadlinePassed(ShaleError):
    """The deadline had passed before any work was done: nothing was applied."""

    reason = "DEADLINE_PASSED"


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


class OutcomeUnknown(ShaleError):
    """The write may be applied now, later, or never. Read to find out, or repeat it."""

    reason = "OUTCOME_UNKNOWN"


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


class ManifestVersionExists(DatabaseError):
    """Another process edited the manifest first, and the caller asked not to retry."""

    reason = "MANIFEST_VERSION_EXISTS"


class ManifestConflict(DatabaseError):
    """Other processes edited the manifest first, again and again, until the deadline."""

    reason = "MANIFEST_CONFLICT"


class IllegalState(DatabaseError):
    """The protocol rules this out. The process stops and touches nothing."""

    reason = "ILLEGAL_STATE"


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


class StoreUnfit(StoreError):
    """The store does not keep what the protocol rests on. Use another one, or two-phase CAS."""

    reason = "STORE_UNFIT"


class StoreBroken(StoreError):
    """A sync failed: the state of the disk is unknown and this process must not write to it."""

    reason = "STORE_BROKEN"


class InvalidUrl(ShaleError):
    """Not the URL of a database."""

    reason = "INVALID_URL"


class InvalidSetting(ShaleError):
    """A setting is out of its limits."""

    reason = "INVALID_SETTING"
