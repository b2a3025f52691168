"""Short notations for records and logs, for the tests of the quorum WAL."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.format.wal_record import make_record
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum.acceptor import AcceptorState
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogShape, Record

ME = b"a" * 16
NONCE = b"n" * 16
TWIN = b"t" * 16


def ballot(epoch: int, nonce: bytes = NONCE) -> Ballot:
    return Ballot(epoch, nonce)


def members(names: str) -> tuple[Member, ...]:
    """Return a member for each letter, at an address of its own."""
    return tuple(Member(name.encode() * 16, f"{name}:1") for name in names)


def ids(names: str) -> list[bytes]:
    return [member.id for member in members(names)]


def records(epochs: str, after: LogEnd | None = None) -> list[Record]:
    """Return a record of each epoch, as in `records("112")`. Each is an object of its own."""
    found: list[Record] = []
    last = LogEnd() if after is None else after
    for epoch in epochs:
        record = make_record(
            last,
            epoch=int(epoch),
            wal_id=last.next_wal_id,
            ends_object=True,
            payload=f"{epoch}.{last.lsn + 1}".encode(),
        )
        found.append(record)
        last = record.mark
    return found


def log(epochs: str, *, trimmed: int = 0) -> LogShape:
    """Return the shape of a log with these records, the first `trimmed` of which are trimmed."""
    made = records(epochs)
    shape = LogShape().appended(made)
    return shape.trimmed(made[trimmed - 1].mark) if trimmed else shape


def state(
    epochs: str = "", *, promise: Ballot | None = None, committed_lsn: int = 0
) -> AcceptorState:
    promised = ballot(int(max(epochs, default="1"))) if promise is None else promise
    return AcceptorState(ME, promised, log(epochs), committed_lsn)


def kinds(effects: Sequence[object]) -> list[str]:
    return [type(effect).__name__ for effect in effects]
