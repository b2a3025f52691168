"""What the client raises, as one tree.

ShaleKVError
├── NotApplied            certain: the call changed nothing
│   ├── InvalidRequest    a field of the request is out of its limits; `field` names it
│   ├── ConditionFailed   what the write demands does not hold; `found_seq` says what is there
│   ├── NotACounter       the value to add to is not one of 8 bytes
│   ├── CounterOverflow   the sum would not fit into 64 bits
│   ├── RangeTooCostly    too much is deleted in a range that was to be compared
│   ├── KeyReused         the idempotency key belongs to a write with other content
│   ├── PageExpired       the view of a scan is gone: begin it again
│   ├── NotTheWriter      this server is a reader; `writer_address` says who is the writer
│   ├── NoWriter          none of the servers is the writer, or knows one that answers
│   ├── TooStale          this reader is further behind than the read allows
│   ├── SeqNotReached     this server has not got so far within the time given; `seq` says how far
│   ├── SnapshotNotFound  the snapshot has expired, was deleted, or never was
│   ├── SnapshotExists    another snapshot has this name
│   ├── WalCollected      a watch can't begin there any more; `oldest_seq` says where it can
│   ├── WatchTooSlow      a watch was not taken in time; go on at `next_seq`
│   ├── WrongDatabase     the server, or the token, is of another database
│   ├── Unimplemented     this server does not have the call or the option
│   ├── Overloaded        come back after `retry_after_ms`
│   ├── ReplyTooLarge     ask for less at once
│   ├── DeadlinePassed    the deadline came before there was an answer
│   ├── Stopping          this process no longer serves
│   │   └── Fenced        because another writer has taken over
│   └── NotSent           the operation has never left this client: its session was over
│       └── ClientClosed  because the client is closed
└── OutcomeUnknown        a mutation may have been applied, may be applied later, or never
    ├── Unreachable       no connection to the server
    ├── ConnectionLost    the connection broke while the call was under way
    ├── DeadlineExceeded  no answer within the time given
    ├── Cancelled         the server or something between gave the call up
    ├── Abandoned         this client, or its session, was closed while the call was under way
    ├── StreamTooSlow     results were not taken while others waited for the server's memory
    ├── KeyExpired        the idempotency key is too old to tell whether it was used
    └── ServerFailed      the server could not do it; `reason` says why

There is no third branch: an error that does not prove that nothing was applied counts as unknown.
A read that raises `OutcomeUnknown` can simply be repeated; of a mutation, read what became of it,
or repeat it where repeating does no harm. Which status becomes which error is decided in
`shalekv_client.error_table` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What is known about a failed call."""

    address: str  # HOST:PORT of the server
    code: str  # the name of the gRPC status code, such as "UNAVAILABLE"
    message: str
    reason: str = ""  # of the published table of errors; empty: gRPC itself failed
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the reason says more
    retry_after_ms: int | None = None  # advice of the server


class ShaleKVError(Exception):
    """A call failed. Whether it changed anything is told by the two branches below."""

    def __init__(self, details: ErrorDetails) -> None:
        """`details` is all there is, so that the error survives being pickled."""
        super().__init__(details)
        self.details = details

    def __str__(self) -> str:
        """The server's address, and what happened."""
        return f"{self.details.address}: {self.details.message}"

    def again(self) -> Self:
        """The same error as a new object, for one more caller who raises it."""
        return type(self)(self.details)

    @property
    def code(self) -> str:
        """The name of the gRPC status code, such as ``UNAVAILABLE``."""
        return self.details.code

    @property
    def reason(self) -> str:
        """The reason in the published table of errors; empty when gRPC itself failed."""
        return self.details.reason


class NotApplied(ShaleKVError):
    """Certain: the call changed nothing."""


class InvalidRequest(NotApplied):
    """A field of the request is out of its limits. Correct the request."""

    @property
    def field(self) -> str:
        """The path of the field, such as ``changes[3].put.key``; empty if the server named none."""
        return self.details.metadata.get("field", "")


class ConditionFailed(NotApplied):
    """What the write demands does not hold. Read the key, and decide anew."""

    @property
    def condition(self) -> str:
        """The condition: ``absent``, ``present`` or ``seq_equals``."""
        return self.details.metadata.get("condition", "")

    @property
    def found_seq(self) -> int:
        """The number of the commit that wrote the value that is there; 0: there is none."""
        return _number(self, "found_seq")


class NotACounter(NotApplied):
    """The value to add to is not one of 8 bytes. Delete it, or count in another key."""


class CounterOverflow(NotApplied):
    """The sum would not fit into 64 bits."""


class RangeTooCostly(NotApplied):
    """Too many deleted keys stand before the first of a range. Compare a smaller range."""


class KeyReused(NotApplied):
    """The idempotency key belongs to a write with other content. Choose a new one."""


class PageExpired(NotApplied):
    """The view of the scan, or of its page token, is gone. Begin the scan again."""


class NotTheWriter(NotApplied):
    """Only the writer can do this, and this server is a reader. Ask the writer."""

    @property
    def writer_address(self) -> str:
        """HOST:PORT of the writer; empty if this server does not know it."""
        return self.details.metadata.get("writer_address", "")


class NoWriter(NotApplied):
    """None of the servers is the writer, or knows one that answers. Try again, or start one."""


class TooStale(NotApplied):
    """This reader is further behind than the read allows. Ask the writer, or allow more."""

    @property
    def staleness_ms(self) -> int:
        """How old its state may be, in milliseconds."""
        return _number(self, "staleness_ms")


class SeqNotReached(NotApplied, TimeoutError):
    """This server has not applied, within the time given, the commit that a read asked for."""

    @property
    def seq(self) -> int:
        """How far it has got."""
        return _number(self, "seq")


class SnapshotNotFound(NotApplied):
    """The snapshot has expired, was deleted, or never was."""


class SnapshotExists(NotApplied):
    """Another snapshot has this name. Choose a new one, or delete the other."""


class LeaseLost(NotApplied):
    """What a job has written may be deleted by now, so nothing of it counts. Begin it again."""


class WalCollected(NotApplied):
    """What a watch asks for is no longer in the WAL. Read the state, and watch from there on."""

    @property
    def oldest_seq(self) -> int:
        """The oldest commit at which a watch can begin."""
        return _number(self, "oldest_seq")


class WatchTooSlow(NotApplied):
    """A watch was not taken in time, and is closed. Open it again at `next_seq`."""

    @property
    def next_seq(self) -> int:
        """The first commit that the watch has not told of."""
        return _number(self, "next_seq")


class WrongDatabase(NotApplied):
    """The server, or the session token, is of another database. Correct the one or the other."""


class Unimplemented(NotApplied):
    """This server does not have the call or the option."""


class Overloaded(NotApplied):
    """The server has too much to do. Try again after `retry_after_ms`."""

    @property
    def retry_after_ms(self) -> int:
        """The server's advice, in milliseconds; 0 when it gave none."""
        return self.details.retry_after_ms or 0


class ReplyTooLarge(NotApplied):
    """The reply would pass the limit of a message. Ask for less at once."""


class DeadlinePassed(NotApplied):
    """The deadline came before there was an answer. Give it more time."""


class Stopping(NotApplied):
    """This process no longer serves. Try again, here or at another address."""


class Fenced(Stopping):
    """Another writer has taken over, and this one stops for good. Find the new writer."""

    @property
    def newer_epoch(self) -> int | None:
        """The epoch of the writer that took over, where the server told it."""
        told = self.details.metadata.get("newer_epoch", "")
        return int(told) if told.isdecimal() else None


class NotSent(NotApplied):
    """The operation has never left this client: its session was over. Open another session."""


class ClientClosed(NotSent):
    """The client is closed. Open another one."""


class OutcomeUnknown(ShaleKVError):
    """A mutation may have been applied, may be applied later, or never. Read to find out."""


class Unreachable(OutcomeUnknown, ConnectionError):
    """There is no connection to the server. Check the address, and that the server runs.

    As a rule nothing was sent; but gRPC does not promise it, and so it counts as unknown.
    """


class ConnectionLost(OutcomeUnknown, ConnectionError):
    """The connection broke while the call was under way."""


class DeadlineExceeded(OutcomeUnknown, TimeoutError):
    """No answer within the time given. The server may still be at it."""


class Cancelled(OutcomeUnknown):
    """The server, or something between here and there, gave the call up."""


class Abandoned(OutcomeUnknown):
    """This client, or its session, was closed while the call was under way."""


class StreamTooSlow(OutcomeUnknown):
    """The server has ended a scan or a session: its results were not taken for too long.

    What had come is good. A scan that is resumable goes on by itself.
    """


class KeyExpired(OutcomeUnknown):
    """The idempotency key is too old to tell whether it was used. Read, and then decide."""


class LoadUnknown(OutcomeUnknown):
    """The load may have been committed, longer ago than is remembered. Read, and then decide."""


class ServerFailed(OutcomeUnknown):
    """The server could not do it. `reason` and message say why."""


def _number(error: ShaleKVError, name: str) -> int:
    """A number of the metadata; 0: the server told none."""
    told = error.details.metadata.get(name, "")
    return int(told) if told.isdecimal() else 0
