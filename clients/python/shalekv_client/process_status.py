"""What a status tells of how a process follows, is watched, and is called."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.v1 import admin_pb2
from shalekv_client.results import known


class ReaderState(enum.Enum):
    """What a reader does. The numbers are the wire's."""

    LOADING = 1  # it reads what was there when it began
    FOLLOWING = 2
    GAP = 3  # it waits for a WAL object although later ones are there
    CUT_OFF = 4  # the store does not answer: it answers from what it has
    FULL = 5  # its memory is: it waits for the compactor


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """How a reader follows the writer."""

    state: ReaderState | None  # None: one unknown to this client
    next_wal_id: int
    snapshot_id: bytes  # that protects what it reads; empty: none
    snapshot_expire_time_s: int
    snapshots_lost: int
    wal_objects_applied: int  # since it began to serve
    empty_polls: int
    poll_interval_ms: int  # as it is paced now
    gaps: int
    gap_ms: int  # in all
    writer_address: str  # HOST:PORT; empty: the writer did not say
    open_ms: int
    # Of the safekeeper from which it hears what is not archived yet; empty: it reads the archive.
    tail_address: str = ""
    tails: int = 0  # that were begun


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of calls of one kind, reads or writes, at a server."""

    is_ready: bool
    cause: str = ""  # in two words, such as "store unreachable"
    problem: str = ""  # the last error
    unready_ms: int = 0  # since the last success


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """The watches of a process."""

    watches: int
    streams: int
    buffered_bytes: int
    buffered_bytes_max: int  # of each stream
    commits_told: int  # one for each watch that was told of it
    catching_up: int  # watches that read the WAL from the store
    cut: int  # watches that were too slow


@dataclass(frozen=True, slots=True)
class CallStatus:
    """The calls of one method, since the process began to serve."""

    method: str  # such as "KV.Get"; an operation of a session is "Session.get"
    calls: int
    failures: int
    total_us: int
    histogram_us: tuple[int, ...]  # [i]: how many took from 2^i to 2^(i+1); [0]: or less

    def since(self, before: CallStatus | None) -> CallStatus:
        """The calls after `before`; all, if the process was started again since then."""
        if before is None or before.calls > self.calls:
            return self
        earlier = [*before.histogram_us, *[0] * len(self.histogram_us)]
        return CallStatus(
            self.method,
            self.calls - before.calls,
            self.failures - before.failures,
            self.total_us - before.total_us,
            tuple(map(int.__sub__, self.histogram_us, earlier)),
        )

    def percentile_us(self, part: float) -> float | None:
        """How long this part of the calls took at most, about; None: there was no call."""
        return percentile(self.histogram_us, part)


def percentile(histogram: Sequence[int], part: float) -> float | None:
    """What `part` of the counted is at most, between the ends of its bucket; None: of nothing."""
    wanted = sum(histogram) * part
    if not any(histogram):
        return None
    passed = 0
    for number, count in enumerate(histogram):
        if count and passed + count >= wanted:
            least = float(1 << number) if number else 0.0
            return least + (float(2 << number) - least) * max(0.0, wanted - passed) / count
        passed += count
    return float(1 << len(histogram))


def reader_of(status: admin_pb2.ReaderStatus) -> ReaderStatus:
    """How it follows."""
    return ReaderStatus(
        state=known(ReaderState, status.state),
        next_wal_id=status.next_wal_id,
        snapshot_id=status.snapshot_id,
        snapshot_expire_time_s=status.snapshot_expire_time_s,
        snapshots_lost=status.snapshots_lost,
        wal_objects_applied=status.wal_objects_applied,
        empty_polls=status.empty_polls,
        poll_interval_ms=status.poll_interval_ms,
        gaps=status.gaps,
        gap_ms=status.gap_ms,
        writer_address=status.writer_address,
        open_ms=status.open_ms,
        tail_address=status.tail_address,
        tails=status.tails,
    )


def watches_of(status: admin_pb2.WatchStatus) -> WatchStatus:
    """Its watches."""
    return WatchStatus(
        watches=status.watches,
        streams=status.streams,
        buffered_bytes=status.buffered_bytes,
        buffered_bytes_max=status.buffered_bytes_max,
        commits_told=status.commits_told,
        catching_up=status.catching_up,
        cut=status.cut,
    )


def call_of(status: admin_pb2.CallStatus) -> CallStatus:
    """One method."""
    return CallStatus(
        method=status.method,
        calls=status.calls,
        failures=status.failures,
        total_us=status.total_us,
        histogram_us=tuple(status.histogram_us),
    )


def readiness_of(status: admin_pb2.Readiness) -> Readiness:
    """The readiness that a message tells."""
    return Readiness(status.is_ready, status.cause, status.problem, status.unready_ms)
