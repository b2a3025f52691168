"""The errors of the client, as one tree.

ShaleKVError
├── NotApplied            certain: the call changed nothing
│   ├── InvalidRequest    a field of the request is out of its limits; `field` names it
│   ├── ConditionFailed   the condition of a write does not hold; `found_seq` says what is there
│   ├── NotACounter       the value to add to is not one of 8 bytes
│   ├── CounterOverflow   the sum would not fit into 64 bits
│   ├── RangeTooCostly    the range of a comparison has too many deleted keys before the first
│   ├── KeyReused         the idempotency key belongs to a write with other content
│   ├── PolicyChanged     another access policy was stored first: read it again
│   ├── PageExpired       the view of a scan is gone: begin it again
│   ├── NotTheWriter      this server is a reader; `writer_address` is that of the writer
│   ├── NoWriter          none of the servers is the writer, or knows one that answers
│   ├── TooStale          this reader is further behind than the read allows
│   ├── SeqNotReached     this server has not reached the commit in time; `seq` is its state
│   ├── SnapshotNotFound  the snapshot has expired, was deleted, or never existed
│   ├── SnapshotExists    another snapshot has this name
│   ├── WalCollected      a watch can't begin there any more; `oldest_seq` says where it can
│   ├── WatchTooSlow      a watch was not read in time; continue at `next_seq`
│   ├── WrongDatabase     the server, or the token, is of another database
│   ├── Unauthenticated   the server does not know who calls
│   ├── PermissionDenied  the caller may not do this; `verb` is what it lacks
│   ├── AccessUnknown     the server cannot find out at present who calls, or what it may do
│   ├── Unimplemented     this server does not have the call or the option
│   ├── LeaseLost         files that a job has written may be deleted already
│   ├── Overloaded        try again after `retry_after_ms`
│   │   └── QuotaExceeded because the caller has used its quota; `quota` names the limit
│   ├── ReplyTooLarge     ask for less at once
│   ├── DeadlinePassed    the deadline passed before there was an answer
│   ├── Stopping          this process no longer serves
│   │   └── Fenced        because another writer has taken over
│   └── NotSent           the operation was not sent: its session was over
│       └── ClientClosed  because the client is closed
└── OutcomeUnknown        a mutation may have been applied, may be applied later, or never
    ├── Unreachable       no connection to the server
    ├── ConnectionLost    the connection broke while the call was under way
    ├── DeadlineExceeded  no answer within the time given
    ├── Cancelled         the server or a proxy has cancelled the call
    ├── Abandoned         this client, or its session, was closed while the call was under way
    ├── StreamTooSlow     results were not taken while others waited for the server's memory
    ├── KeyExpired        the idempotency key is too old to know whether it was used
    ├── LoadUnknown       the load is too old to know whether it was committed
    └── ServerFailed      the server has failed; `reason` says why

There is no third branch: an error that does not prove that nothing was applied counts as unknown.
A read that raises `OutcomeUnknown` can simply be repeated. After a mutation, read to find out
whether it was applied, or repeat it where a repeat is harmless. `shalekv_client.error_table` alone
decides which status becomes which error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The details of a failed call."""

    address: str  # HOST:PORT of the server
    code: str  # the name of the gRPC status code, such as "UNAVAILABLE"
    message: str
    reason: str = ""  # of the published table of errors; empty: gRPC itself failed
    metadata: Mapping[str, str] = field(default_factory=dict)  # the values that go with the reason
    retry_after_ms: int | None = None  # advice of the server
    # Names of the call, under which the server's log, audit log, slow calls and traces have it.
    request_id: str = ""  # empty: the call has none
    trace_id: str = ""  # 32 hexadecimal digits; empty: the call is part of no trace

    def named(self, request_id: str, trace_id: str) -> ErrorDetails:
        """Return them with these names of the call, as far as they have none."""
        if not request_id and not trace_id:
            return self
        return replace(
            self,
            request_id=self.request_id or request_id,
            trace_id=self.trace_id or trace_id,
        )


class ShaleKVError(Exception):
    """A call failed. The subclasses `NotApplied` and `OutcomeUnknown` say what that means."""

    def __init__(self, details: ErrorDetails) -> None:
        """Create an error. `details` is the only argument, so that errors can be pickled."""
        super().__init__(details)
        self.details = details

    def __str__(self) -> str:
        """Return the server's address, the message, and the names of the call, if it has any."""
        details = self.details
        named = (("request", details.request_id), ("trace", details.trace_id))
        names = ", ".join(f"{kind} {name}" for kind, name in named if name)
        return f"{details.address}: {details.message}" + (f" ({names})" if names else "")

    def again(self, request_id: str = "", trace_id: str = "") -> Self:
        """Return the same error as a new object, for one more caller that raises it.

        It gets these names of the caller's call, as far as it has none.
        """
        return type(self)(self.details.named(request_id, trace_id))

    def unnamed(self) -> Self:
        """Return the same error as a new object without names: it is that of several calls."""
        return type(self)(replace(self.details, request_id="", trace_id=""))

    @property
    def code(self) -> str:
        """The name of the gRPC status code, such as ``UNAVAILABLE``."""
        return self.details.code

    @property
    def reason(self) -> str:
        """The reason in the published table of errors; empty when gRPC itself failed."""
        return self.details.reason


class NotApplied(ShaleKVError):
    """The call certainly changed nothing."""


class InvalidRequest(NotApplied):
    """A field of the request is out of its limits. Correct the request."""

    @property
    def field(self) -> str:
        """The path of the field, such as ``changes[3].put.key``; empty if the server named none."""
        return self.details.metadata.get("field", "")


class ConditionFailed(NotApplied):
    """The condition of the write does not hold. Read the key, and decide anew."""

    @property
    def condition(self) -> str:
        """The condition as in the protocol: ``absent``, ``present`` or ``seq_equals``."""
        return self.details.metadata.get("condition", "")

    @property
    def found_seq(self) -> int:
        """The sequence number of the commit that wrote the present value; 0: there is none."""
        return _number(self, "found_seq")


class NotACounter(NotApplied):
    """The value to add to is not one of 8 bytes. Delete it, or count in another key."""


class CounterOverflow(NotApplied):
    """The sum would not fit into 64 bits."""


class RangeTooCostly(NotApplied):
    """Too many deleted keys precede the first key of a range. Compare a smaller range."""


class KeyReused(NotApplied):
    """The idempotency key belongs to a write with other content. Choose a new one."""


class PolicyChanged(NotApplied):
    """Another access policy was stored since. Read it again, and repeat the change."""


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
        """The possible age of the reader's state, in milliseconds."""
        return _number(self, "staleness_ms")


class SeqNotReached(NotApplied, TimeoutError):
    """This server has not applied, within the time given, the commit that a read asked for."""

    @property
    def seq(self) -> int:
        """The sequence number that the server has reached."""
        return _number(self, "seq")


class SnapshotNotFound(NotApplied):
    """The snapshot has expired, was deleted, or never existed."""


class SnapshotExists(NotApplied):
    """Another snapshot has this name. Choose a new one, or delete the other."""


class LeaseLost(NotApplied):
    """Files that a job has written may be deleted already, so none is used. Begin the job again."""


class WalCollected(NotApplied):
    """The commits that a watch needs are not in the WAL any more. Read the state, then watch."""

    @property
    def oldest_seq(self) -> int:
        """The oldest commit at which a watch can begin."""
        return _number(self, "oldest_seq")


class WatchTooSlow(NotApplied):
    """A watch was not read in time, and is closed. Open it again at `next_seq`."""

    @property
    def next_seq(self) -> int:
        """The first commit that the watch has not delivered."""
        return _number(self, "next_seq")


class WrongDatabase(NotApplied):
    """The server, or the session token, belongs to another database. Correct address or token."""


class Unauthenticated(NotApplied):
    """The server does not know who calls. Give the client an access token, or a certificate.

    It had none, or one that is not valid, or not any more.
    """


class PermissionDenied(NotApplied):
    """The access policy does not allow the caller to do this. Ask an administrator for a role."""

    @property
    def verb(self) -> str:
        """The verb that the caller lacks on a key of the call, such as ``write``."""
        return self.details.metadata.get("verb", "")


class AccessUnknown(NotApplied):
    """The server cannot find out at present who calls, or what the caller may do. Try again.

    The issuer of the access token does not answer the server, or the object store does not.
    """


class Unimplemented(NotApplied):
    """This server does not have the call or the option."""


class Overloaded(NotApplied):
    """The server is overloaded. Try again after `retry_after_ms`."""

    @property
    def retry_after_ms(self) -> int:
        """The server's advice, in milliseconds; 0 when it gave none."""
        return self.details.retry_after_ms or 0


class QuotaExceeded(Overloaded):
    """The caller has used what its quota allows. Try again after `retry_after_ms`."""

    @property
    def quota(self) -> str:
        """The name of the limit, such as ``calls_per_s``."""
        return self.details.metadata.get("quota", "")


class ReplyTooLarge(NotApplied):
    """The reply would exceed the limit of a message. Ask for less at once."""


class DeadlinePassed(NotApplied):
    """The deadline passed before there was an answer. Allow more time."""


class Stopping(NotApplied):
    """This process no longer serves. Try again, here or at another address."""


class Fenced(Stopping):
    """Another writer has taken over, and this one stops for good. Find the new writer."""

    @property
    def newer_epoch(self) -> int | None:
        """The epoch of the writer that took over; None: the server did not report it."""
        text = self.details.metadata.get("newer_epoch", "")
        return int(text) if text.isdecimal() else None


class NotSent(NotApplied):
    """The operation was not sent: its session was over. Open another session."""


class ClientClosed(NotSent):
    """The client is closed. Open another one."""


class OutcomeUnknown(ShaleKVError):
    """A mutation may have been applied, may be applied later, or never. Read to find out."""


class Unreachable(OutcomeUnknown, ConnectionError):
    """There is no connection to the server. Check the address, and that the server runs.

    As a rule nothing was sent, but gRPC does not guarantee that, so the outcome counts as unknown.
    """


class ConnectionLost(OutcomeUnknown, ConnectionError):
    """The connection broke while the call was under way."""


class DeadlineExceeded(OutcomeUnknown, TimeoutError):
    """No answer within the time given. The server may still execute the call."""


class Cancelled(OutcomeUnknown):
    """The server, or a proxy before it, has cancelled the call."""


class Abandoned(OutcomeUnknown):
    """This client, or its session, was closed while the call was under way."""


class StreamTooSlow(OutcomeUnknown):
    """The server has ended a scan or a session: its results were not taken for too long.

    The results before are valid. A scan that is resumable continues by itself.
    """


class KeyExpired(OutcomeUnknown):
    """The idempotency key is too old to know whether it was used. Read, and then decide."""


class LoadUnknown(OutcomeUnknown):
    """The load may have been committed before the time that is remembered. Read, then decide."""


class ServerFailed(OutcomeUnknown):
    """The server has failed to execute the call. `reason` and message say why."""


def _number(error: ShaleKVError, name: str) -> int:
    """Return a number of the metadata; 0: the server sent none."""
    text = error.details.metadata.get(name, "")
    return int(text) if text.isdecimal() else 0
