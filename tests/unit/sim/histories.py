"""Histories and logs written by hand, for the tests of what checks them."""

from __future__ import annotations

from shalekv.protocol.entry import Entry, Kind
from shalekv.v1 import kv_pb2
from tests.sim.history import (
    Attempt,
    Got,
    History,
    Operation,
    Outcome,
    ReadOp,
    Refusal,
    ScanOp,
    WriteRequest,
    WriteResult,
)
from tests.sim.invariants import answers
from tests.sim.serial import SerialOrder
from tests.sim.store import EPOCH_MS
from tests.sim.stored import Stored, WalObject

KEYS = (b"a", b"b", b"n")
DONE = WriteResult()


class Past:
    """A history: objects land, and clients get replies, in microseconds of virtual time.

    Slot and sequence number of the first commit are 1; all objects hold one commit.
    """

    def __init__(self) -> None:
        self.history = History()
        self.wal: list[WalObject] = []

    def asked(self, request: WriteRequest) -> Operation:
        operation = Operation(len(self.history.operations) + 1, request)
        self.history.operations.append(operation)
        return operation

    def put(self, key: bytes, **fields: object) -> Operation:
        value = b"v%d" % (len(self.history.operations) + 1)
        return self.asked(kv_pb2.PutRequest(key=key, value=value, **fields))  # type: ignore[arg-type]

    def add(self, delta: int) -> Operation:
        change = kv_pb2.Change(add=kv_pb2.AddChange(key=b"n", delta=delta))
        return self.asked(kv_pb2.WriteRequest(changes=[change]))

    def landed(
        self,
        at_us: int,
        *,
        epoch: int = 1,
        ranges: tuple[tuple[bytes, bytes], ...] = (),
        **points: str,
    ) -> int:
        """The next object lands; its sequence number. `points` are values by key, "": deleted.

        A value of digits is that of a counter; one with "@" expires at the time behind that.
        """
        seq = len(self.wal) + 1
        entries = []
        for key, text in points.items():
            value, _, expiry = text.partition("@")
            kind = Kind.PUT if text else Kind.TOMBSTONE
            data = int(value).to_bytes(8, "little") if value.isdigit() else value.encode()
            expire_at_ms = EPOCH_MS + int(expiry) if expiry else 0
            entries.append(Entry(key.encode(), seq, kind, data, expire_at_ms))
        tombstones = tuple(Entry(start, seq, Kind.RANGE_TOMBSTONE, end) for start, end in ranges)
        time_ms = EPOCH_MS + at_us // 1000
        self.wal.append(WalObject(seq, epoch, time_ms, at_us, tuple(entries), tombstones, ()))
        return seq

    def check(self) -> None:
        order = SerialOrder(self.history, Stored((), tuple(self.wal)), KEYS)
        answers.check_i1_acknowledged_writes_are_in_the_log(order)
        answers.check_i14_commits_are_in_the_order_of_time(order)
        answers.check_i14_answers(order)
        answers.check_i15_one_answer(order)
        answers.check_i14_reads(order)
        answers.check_i14_scans(order)

    def got(self, key: bytes, at_us: int, got: Got, *, epoch: int = 1, level: str = "") -> None:
        """A get that is answered at once, with a header that covers all that has landed."""
        read = ReadOp(key, level == "linearizable", epoch, at_us, at_us, got, len(self.wal))
        self.history.reads.append(read)

    def scanned(self, at_us: int, seq: int, **values: int) -> None:
        """A scan of the state `seq` that is answered at once: numbers of the versions by key."""
        entries = tuple(
            (entry.key, Got(entry.value, entry.seq, entry.expire_at_ms))
            for each in self.wal
            for entry in each.entries
            if values.get(entry.key.decode()) == entry.seq
        )
        self.history.scans.append(ScanOp(1, at_us, at_us, seq, entries))


def attempted(
    operation: Operation,
    began_us: int,
    ended_us: int | None = None,
    *,
    seq: int = 0,
    answer: WriteResult | Refusal | None = None,
    epoch: int = 1,
) -> None:
    """Return an attempt at an operation; without `ended_us` its outcome is unknown."""
    attempt = Attempt(epoch, began_us, replied_us=ended_us, seq=seq, answer=answer)
    match answer:
        case WriteResult():
            attempt.outcome, attempt.wal_id = Outcome.ACKNOWLEDGED, seq
        case Refusal():
            attempt.outcome = Outcome.REFUSED
        case None if ended_us is not None:
            attempt.outcome = Outcome.NOT_APPLIED
    operation.attempts.append(attempt)
