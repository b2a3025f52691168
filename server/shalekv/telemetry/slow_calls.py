"""Slow calls: what each of them has waited for, in a line of the log, and in a list of the newest.

A call is slow that took longer than `--slow-ms`. The log has `LINES_MAX` lines of them within
`LINES_TIME_MS`; those that are left out are counted, and have one line together when the time is
over. So a store that is slow for all calls doesn't fill the disk.

    call begins                 its group is taken       its object is made        durable
        |                               |                        |                    |
        +-- admission, read set, turn --+- queued --- encoded ---+------ stored ------+- visible -+
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

import structlog

from shalekv.clock import Clock
from shalekv.telemetry.activity import (
    ADMISSION,
    READ_SET,
    STAGES,
    TURN,
    CallActivity,
    CommitActivity,
    StoreRequest,
)
from shalekv.v1 import admin_pb2

KEPT_MAX = 100
LINES_MAX, LINES_TIME_MS = 10, 60_000
REQUESTS_SHOWN_MAX = 8  # of each call
BLOCKERS_MAX = 8  # requests of other calls that are remembered
OTHER = "other"  # the time that no stage explains: of the event loop, and of this process
QUEUED = STAGES[0]
# Stages in which a call waits for calls before it.
_IN_LINE = (ADMISSION, TURN, QUEUED)
_NS_PER_MS = 1_000_000

_log = structlog.get_logger(__name__)


class NamedCall(Protocol):
    """Who has called, and how the call is named: `server.service.Call`."""

    @property
    def peer(self) -> str:
        """The address of the client."""
        ...

    @property
    def principal(self) -> str:
        """The name of who calls; empty: anonymous."""
        ...

    @property
    def request_id(self) -> str:
        """The name that the client gave the call; empty: none."""
        ...

    @property
    def trace_id(self) -> str:
        """The trace that the call is part of; empty: none."""
        ...


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call, or an operation of a session, that has ended."""

    method: str  # such as ``KV.Put`` or ``Session.put``
    code: str  # the name of its status
    caller: NamedCall
    key_hash: str  # empty: it has no key
    began_ns: int
    ended_ns: int
    activity: CallActivity | None  # None: it was answered without a task
    commit: CommitActivity | None  # None: it has waited for none
    # Requests of the log that its commit was queued behind at the end; None: it was in no queue.
    queued_behind: Sequence[StoreRequest] | None = None

    def stages(self) -> Iterator[tuple[str, int]]:
        """Yield where the time went, in nanoseconds, in the order of time."""
        explained_ns = 0
        for name, duration_ns in (*self._of_call(), *self._of_commit()):
            explained_ns += duration_ns
            if duration_ns > 0:
                yield name, duration_ns
        other_ns = self.ended_ns - self.began_ns - explained_ns
        if other_ns > 0:
            yield OTHER if self.queued_behind is None else QUEUED, other_ns

    def requests(self) -> list[StoreRequest]:
        """Return the requests to the store that it has waited for, the slowest first."""
        of_call = self.activity.requests if self.activity is not None else []
        of_commit = self.commit.requests if self.commit is not None else []
        found = [each for each in (*of_call, *of_commit) if each.began_ns < self.ended_ns]
        return sorted(found, key=self.time_of, reverse=True)

    def time_of(self, request: StoreRequest) -> int:
        """Return how long a request took until the call has ended, in nanoseconds."""
        ended_ns = min(request.ended_ns or self.ended_ns, self.ended_ns)
        return max(ended_ns - request.began_ns, 0)

    def _of_call(self) -> Iterator[tuple[str, int]]:
        if self.activity is None:
            return
        yield from self.activity.waited_ns.items()
        store_ns, reached_ns = 0, 0  # requests may run side by side
        for request in self.activity.requests:
            ended_ns = min(request.ended_ns or self.ended_ns, self.ended_ns)
            store_ns += max(ended_ns - max(request.began_ns, reached_ns), 0)
            reached_ns = max(reached_ns, ended_ns)
        if READ_SET not in self.activity.waited_ns:  # which is read from the store
            yield "store", store_ns

    def _of_commit(self) -> Iterator[tuple[str, int]]:
        commit = self.commit
        if commit is None:
            return
        reached_ns = max(commit.queued_ns, self.began_ns)  # copies of a request may come later
        ends = (commit.began_ns, commit.encoded_ns, commit.stored_ns, commit.visible_ns)
        for stage, stage_ended_ns in zip(STAGES, ends, strict=True):
            is_last = stage == STAGES[-1]  # for which calls do not wait
            if is_last and not 0 < stage_ended_ns <= self.ended_ns:
                return
            ended_ns = min(stage_ended_ns or self.ended_ns, self.ended_ns)
            yield stage, max(ended_ns - reached_ns, 0)
            reached_ns = max(reached_ns, ended_ns)
            if not stage_ended_ns:
                return


class SlowCalls:
    """The slow calls of a process."""

    def __init__(self, slow_ms: int, clock: Clock, process: int = 0) -> None:
        """Note calls that take longer than `slow_ms`. 0: none.

        `process` is the number of this one, of several that share a port.
        """
        self._process = process
        self.slow_ms = slow_ms
        self.slow_ns = slow_ms * _NS_PER_MS or sys.maxsize
        self.counts: Counter[str] = Counter()  # by method
        self._clock = clock
        self._kept: deque[admin_pb2.SlowCall] = deque(maxlen=KEPT_MAX)
        # The slowest requests of the last calls: others may have waited for their turn behind them.
        self._blockers: deque[StoreRequest] = deque(maxlen=BLOCKERS_MAX)
        self._until_ms = 0.0  # when the time of the lines ends
        self._lines = 0
        self._left_out: Counter[str] = Counter()  # by method

    def newest(self) -> list[admin_pb2.SlowCall]:
        """Return the calls that are kept, the newest first."""
        return list(reversed(self._kept))

    def note(self, ended: EndedCall) -> None:
        """Keep a call that was slow, and log it."""
        self.counts[ended.method] += 1
        call = self._described(ended)
        self._kept.append(call)
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._until_ms:
            self._sum_up()
            self._until_ms = now_ms + LINES_TIME_MS
        if self._lines >= LINES_MAX:
            if not self._left_out:
                left_s = (self._until_ms - now_ms) / 1_000
                loop = asyncio.get_running_loop()
                loop.call_later(left_s, self._sum_up, context=Context())  # it is of no call
            self._left_out[ended.method] += 1
            return
        self._lines += 1
        _log.warning("slow call", **_line(call))

    def _sum_up(self) -> None:
        """Begin again with the lines, after one that says how many were left out."""
        if self._left_out:
            count = self._left_out.total()
            _log.warning("slow calls left out", count=count, methods=dict(self._left_out))
            self._left_out.clear()
        self._lines = 0

    def _described(self, ended: EndedCall) -> admin_pb2.SlowCall:
        caller, commit = ended.caller, ended.commit
        stages, requests = list(ended.stages()), ended.requests()
        call = admin_pb2.SlowCall(
            ended_at_ms=self._clock.wall_ms() or 0,
            method=ended.method,
            code=ended.code,
            duration_ms=_ms(ended.ended_ns - ended.began_ns),
            stages=[admin_pb2.SlowStage(name=name, duration_ms=_ms(ns)) for name, ns in stages],
            waited_for=self._waited_for(ended, stages, requests),
            key_hash=ended.key_hash,
            principal=caller.principal,
            request_id=caller.request_id,
            trace_id=caller.trace_id,
            peer=caller.peer,
            process=self._process,
        )
        for request in requests[:REQUESTS_SHOWN_MAX]:
            call.requests.add(
                operation=request.operation,
                name=request.name,
                duration_ms=_ms(ended.time_of(request)),
                attempts=request.attempts,
                problem=request.problem,
            )
        if commit is not None:
            call.wal_id, call.group_commits = commit.wal_id, commit.commit_count
        return call

    def _waited_for(
        self,
        ended: EndedCall,
        stages: Sequence[tuple[str, int]],
        requests: Sequence[StoreRequest],
    ) -> str:
        """Say what took most of the time: a request to the store, or a stage."""
        name, stage_ns = max(stages, key=lambda stage: stage[1], default=(OTHER, 0))
        if requests and 2 * ended.time_of(requests[0]) >= stage_ns:
            if requests[0] not in self._blockers:
                self._blockers.append(requests[0])
            return _in_words(requests[0], ended)
        waited = f"{name}, {_ms(stage_ns):g} ms"
        if name not in _IN_LINE:
            return waited
        behind = [
            each
            for each in (*self._blockers, *(ended.queued_behind or ()))
            if each.began_ns < ended.ended_ns and (each.ended_ns or ended.ended_ns) > ended.began_ns
        ]
        if not behind:
            return waited
        return f"{waited}, behind {_in_words(max(behind, key=ended.time_of), ended)}"


def _ms(duration_ns: int) -> float:
    return round(duration_ns / _NS_PER_MS, 1)


def _in_words(request: StoreRequest, ended: EndedCall) -> str:
    """Name a request to the store, and what is known of it at the end of the call."""
    told = f"{request.operation} of {request.name}, {_ms(ended.time_of(request)):g} ms"
    if not request.ended_ns or request.ended_ns > ended.ended_ns:
        told += " so far"
    told += f", {request.attempts} attempt{'s' if request.attempts > 1 else ''}"
    return f"{told}: {request.problem}" if request.problem else told


def _line(call: admin_pb2.SlowCall) -> dict[str, object]:
    """Return the members of a line of the log; what is empty is left out."""
    line: dict[str, object] = {
        "method": call.method,
        "code": call.code,
        "duration_ms": call.duration_ms,
        "waited_for": call.waited_for,
        "stages_ms": {stage.name: stage.duration_ms for stage in call.stages},
    }
    if call.HasField("wal_id"):
        line["wal_id"] = call.wal_id
        line["group_commits"] = call.group_commits
        line["others_waiting"] = max(call.group_commits - 1, 0)
    named = ("key_hash", "principal", "peer", "request_id", "trace_id")
    return line | {name: value for name in named if (value := getattr(call, name))}
