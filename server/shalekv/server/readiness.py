"""Readiness of a role for reads and for writes, for health checks and statuses."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.v1 import admin_pb2
from shalekv.wording import Trouble


@dataclass(frozen=True, slots=True)
class Readiness:
    """Trouble with reads and with writes, as of now. A reader takes no writes."""

    reads: Trouble | None = None  # None: reads are answered
    writes: Trouble | None = None  # None: writes become durable, where this role takes any
    takes_writes: bool = True  # False: a reader

    @property
    def is_ready(self) -> bool:
        """True if neither reads nor writes are in trouble."""
        return self.reads is None and self.writes is None

    @property
    def is_ready_for_writes(self) -> bool:
        """True if writes may be sent to this process."""
        return self.takes_writes and self.writes is None

    def fill(self, reply: admin_pb2.StatusReply, now_ms: float) -> None:
        """Add both to a status; `now_ms` is the monotonic clock of this process."""
        reply.read_readiness.CopyFrom(_message(self.reads, now_ms))
        if self.takes_writes:
            reply.write_readiness.CopyFrom(_message(self.writes, now_ms))


def _message(trouble: Trouble | None, now_ms: float) -> admin_pb2.Readiness:
    if trouble is None:
        return admin_pb2.Readiness(is_ready=True)
    return admin_pb2.Readiness(
        cause=trouble.cause,
        problem=trouble.problem,
        unready_ms=int(max(0.0, now_ms - trouble.since_ms)),
    )
