"""What a read, or a reader, can't answer as it was asked."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


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
