"""History of a run for the checkers: requests of clients and the replies they got."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shalekv.v1 import kv_pb2
from tests.sim.store import EPOCH_MS

UNKNOWN_EPOCH = -1  # of a writer that did not report it, or did not answer

WriteRequest: TypeAlias = (
    kv_pb2.PutRequest
    | kv_pb2.DeleteRequest
    | kv_pb2.DeleteRangeRequest
    | kv_pb2.WriteRequest
    | kv_pb2.TxnRequest
)


class Outcome(enum.Enum):
    """Outcome of an attempt as its client knows it in the end."""

    ACKNOWLEDGED = "acknowledged"
    IN_MEMORY = "acknowledged from memory"
    REFUSED = "refused because of what is in the database"
    NOT_APPLIED = "reported as not applied"
    UNKNOWN = "not reported"


class Got(NamedTuple):
    """Result of a get, alone or inside a transaction; `value` None: not found."""

    value: bytes | None = None
    seq: int = 0
    expire_at_ms: int = 0


# Of a get, of an add the counter's new value, of a touch whether there is a value, of others None.
OperationResult: TypeAlias = Got | int | bool | None


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A reply without its header: one result for each operation of the branch that was taken.

    The reply to a batch has only the counters, that to a delete how many it deleted.
    """

    succeeded: bool = True
    results: tuple[OperationResult, ...] = ()
    deleted: int | None = None  # None: not counted


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error by which nothing was applied; `found_seq` is that of a failed condition."""

    reason: str
    found_seq: int | None = None


@dataclass(slots=True)
class Attempt:
    """One request on its way to one writer, and what came back."""

    epoch: int  # of the writer that was called
    invoked_us: int
    outcome: Outcome = Outcome.UNKNOWN
    replied_us: int | None = None  # None: the client gave up
    seq: int = 0
    wal_id: int | None = None
    answer: WriteResult | Refusal | None = None
    reason: str = ""  # of the error in the reply


@dataclass(slots=True)
class Operation:
    """A change that a client wants made once, and all attempts at it, in order of invocation.

    The values that it puts or adds contain its number, and are unique.
    """

    number: int
    request: WriteRequest
    attempts: list[Attempt] = field(default_factory=list)

    def __str__(self) -> str:
        kind = type(self.request).__name__.removesuffix("Request")
        return f"{kind} {self.number} <{' '.join(str(self.request).split())}>"

    @property
    def key(self) -> bytes:
        return self.request.header.idempotency_key

    @property
    def ttls_ms(self) -> set[int]:
        match self.request:
            case kv_pb2.PutRequest():
                return {self.request.ttl_ms}
            case kv_pb2.WriteRequest():
                changes = list(self.request.changes)
            case kv_pb2.TxnRequest():
                operations = (*self.request.then, *self.request.otherwise)
                changes = [operation.change for operation in operations]
            case _:
                changes = []
        return {change.put.ttl_ms or change.touch.ttl_ms for change in changes}

    @property
    def seqs(self) -> set[int]:
        return {attempt.seq for attempt in self.attempts if attempt.seq}

    @property
    def is_acknowledged(self) -> bool:
        return any(each.outcome is Outcome.ACKNOWLEDGED for each in self.attempts)

    @property
    def may_be_applied(self) -> bool:
        harmless = (Outcome.NOT_APPLIED, Outcome.REFUSED)
        return any(attempt.outcome not in harmless for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One get that was answered."""

    key: bytes
    is_linearizable: bool
    epoch: int
    invoked_us: int
    replied_us: int
    got: Got
    header_seq: int


@dataclass(frozen=True, slots=True)
class ScanOp:
    """One scan of everything that was answered to its end."""

    epoch: int
    invoked_us: int
    replied_us: int
    header_seq: int
    entries: tuple[tuple[bytes, Got], ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """State of the requested keys as one reply of a replica showed it."""

    reader: str
    began_us: int
    replied_us: int
    seq: int
    staleness_ms: int
    min_seq: int
    keys: tuple[bytes, ...]
    found: dict[bytes, Got]


@dataclass(slots=True)
class History:
    """All that happened, in the order of invocation."""

    operations: list[Operation] = field(default_factory=list)
    reads: list[ReadOp] = field(default_factory=list)
    scans: list[ScanOp] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)  # why writers ended
    epoch_ms: int = EPOCH_MS  # time of the store's clock at the time 0 of all others

    def attempts(self, outcome: Outcome) -> list[tuple[Operation, Attempt]]:
        return [
            (operation, attempt)
            for operation in self.operations
            for attempt in operation.attempts
            if attempt.outcome is outcome
        ]
