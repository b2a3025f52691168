"""Telemetry of calls and of operations of sessions: counts, traces, and slow calls.

A call that is answered at once, or waits for its commit alone, has no activity. One that needs a
task has one, which is `CURRENT` in the context of that task. A call that is traced has one from its
beginning, which is `CURRENT` also while the call is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from structlog.contextvars import bind_contextvars

from shalekv.rpc.call_counts import CallCounts, NowNs
from shalekv.rpc.calls import ServerCall, named
from shalekv.server.access.audit import first_key, hash_of_key
from shalekv.server.service import Call
from shalekv.server.whole_status import add_slow_calls
from shalekv.telemetry.activity import CURRENT, CallActivity, CommitActivity, StoreRequest
from shalekv.telemetry.contained import contained
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.slow_calls import EndedCall, SlowCalls
from shalekv.telemetry.tracing import Tracer
from shalekv.v1.admin_pb2 import ListSlowCallsReply
from shalekv.write.pending_replies import PendingReply
from shalekv_wire.status import StatusCode
from shalekv_wire.trace_context import SpanContext

PROFILE = "Admin.Profile"  # it takes as long as its caller says, so it is never slow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recorders:
    """Recorders of the calls of a process, beside their counts."""

    slow_calls: SlowCalls
    tracer: Tracer | None = None  # None: no call is traced
    costs: Costs | None = None  # None: nobody is charged


@dataclass(slots=True)
class NotedCall:
    """A call, or an operation, as it is told at its end."""

    method: str
    began_ns: int
    call: Call
    request: Message | None = None  # for its key; None: that of its commit tells it
    activity: CallActivity | None = None  # None: it was answered without a task
    commit_key: bytes = b""

    @property
    def key(self) -> bytes:
        """The first key that it names; empty: none."""
        return self.commit_key if self.request is None else first_key(self.request)

    @classmethod
    def of(
        cls, method: str, began_ns: int, call: ServerCall, context: Call | Awaitable[Call]
    ) -> NotedCall:
        """Return a call of a transport; who has called may not be known before `identified`."""
        if not isinstance(context, Call):
            context = Call(call.peer, names=call.names)
        return cls(method, began_ns, context)

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` does, with the activity of this call as `CURRENT`."""
        before = CURRENT.set(self.activity)
        try:
            return work()
        finally:
            CURRENT.reset(before)

    async def identified(self, context: Awaitable[Call]) -> Call:
        """Return the call with its caller, whose it is from then on. Raises as `context`."""
        found, traced = await context, self.call.activity
        self.call = found if traced is None else found.recorded_in(traced)
        return self.call

    def begin_here(self) -> None:
        """Let the activity be `CURRENT` in this context; makes one if there is none."""
        if self.activity is None:
            self.activity = CallActivity(self.began_ns, self.call.names.parent)
        CURRENT.set(self.activity)
        names = named(self.call.request_id, self.activity.trace_id)
        if names:
            bind_contextvars(**names)

    def enter(self) -> Context:
        """Return a context of this call."""
        context = copy_context()
        context.run(self.begin_here)
        return context

    def start(self, answer: Awaitable[T]) -> asyncio.Task[T]:
        """Return a task of this call that awaits the answer."""
        work = answer if isinstance(answer, Coroutine) else _awaited(answer)
        return asyncio.get_running_loop().create_task(work, context=self.enter())


class NotedStream:
    """A stream of replies. Its time is that of this process, without that of its client.

    It is slow if one of its messages was.
    """

    __slots__ = ("_now_ns", "_since_ns", "noted", "slowest_ns", "spent_ns")

    def __init__(self, noted: NotedCall, now_ns: NowNs) -> None:
        """Begin with the first message."""
        self.noted = noted
        self.spent_ns = 0
        self.slowest_ns = 0  # of the messages
        self._now_ns = now_ns
        self._since_ns: int | None = now_ns()  # None: it is up to the client

    def pause(self) -> None:
        """Note that there is a message, or the end; nothing happens the second time."""
        if self._since_ns is not None:
            waited_ns = self._now_ns() - self._since_ns
            self.spent_ns += waited_ns
            self.slowest_ns = max(self.slowest_ns, waited_ns)
            self._since_ns = None

    def go_on(self) -> None:
        """Note that the client has taken the message."""
        self._since_ns = self._now_ns()


class CallTelemetry:
    """Telemetry of the calls of one adapter; traces and slow calls are of the process.

    No call fails because of it.
    """

    def __init__(self, recorders: Recorders) -> None:
        """Begin without counts."""
        self.counts = CallCounts()
        self.tracer = recorders.tracer
        self.by_chance = None if self.tracer is None else self.tracer.by_chance
        self.slow_calls = recorders.slow_calls
        self.slow_ns = recorders.slow_calls.slow_ns
        self.costs = recorders.costs
        self.now_ns = self.counts.now_ns

    def samples(self, parent: SpanContext | None) -> bool:
        """Return whether to trace a call: as its caller does, or by chance."""
        if self.by_chance is None:
            return False
        return self.by_chance() if parent is None else parent.is_sampled

    def fill_slow_calls(self, reply: ListSlowCallsReply) -> None:
        """Add the slow calls of the process to a list."""
        reply.slow_ms = self.slow_calls.slow_ms
        add_slow_calls(reply, self.slow_calls.newest())

    @contained
    def begin_traced(self, noted: NotedCall, request: Message, call: ServerCall | None) -> None:
        """Begin the span of a call, which is sampled. An operation has no `call` of its own."""
        assert self.tracer is not None
        activity = CallActivity(noted.began_ns, noted.call.names.parent)
        self.tracer.begin_call(noted.method, activity)
        noted.activity, noted.request = activity, request
        noted.call = noted.call.recorded_in(activity)
        if call is not None and activity.parent is None:
            call.name_trace(activity.trace_id)

    @contained
    def end(
        self,
        noted: NotedCall,
        ended_ns: int,
        code: StatusCode,
        reply: object = None,
    ) -> None:
        """Charge a call, record its span, if it has one, and note the call if it was slow.

        `reply` is what it has waited for: for its commit alone, if that is a `PendingReply`.
        """
        commit = behind = None
        if isinstance(reply, PendingReply):
            commit, behind = reply.activity, reply.queued_behind()
            noted.commit_key = reply.first_key
        elif noted.activity is not None:
            commit, behind = noted.activity.commit, noted.activity.queued_behind
        self._end_span(noted, ended_ns, code, commit)
        self._charge(noted)
        if ended_ns - noted.began_ns > self.slow_ns and noted.method != PROFILE:
            self._note(noted, ended_ns, code, commit, behind)

    @contained
    def end_stream(self, stream: NotedStream, code: StatusCode) -> None:
        """Do the same for a stream of replies."""
        stream.pause()
        noted, ended_ns = stream.noted, self.now_ns()
        self._end_span(noted, ended_ns, code, None)
        self._charge(noted)
        if stream.slowest_ns > self.slow_ns:
            noted.began_ns = ended_ns - stream.spent_ns
            self._note(noted, ended_ns, code)

    def _end_span(
        self, noted: NotedCall, ended_ns: int, code: StatusCode, commit: CommitActivity | None
    ) -> None:
        activity = noted.activity
        if activity is not None and activity.span is not None:
            assert self.tracer is not None
            activity.commit = commit
            self.tracer.end_call(activity, code.name, ended_ns)

    def _charge(self, noted: NotedCall) -> None:
        """Charge a call with the requests of its own."""
        activity = noted.activity
        if self.costs is not None and activity is not None and activity.sent:
            self.costs.charge(noted.method, noted.call.principal, noted.key, activity.sent)

    def _note(
        self,
        noted: NotedCall,
        ended_ns: int,
        code: StatusCode,
        commit: CommitActivity | None = None,
        queued_behind: Sequence[StoreRequest] | None = None,
    ) -> None:
        call, key_hash = noted.call, ""
        if key := noted.key:
            key_hash = hash_of_key(call.secret, key)
        self.slow_calls.note(
            EndedCall(
                noted.method,
                code.name,
                call,
                key_hash,
                noted.began_ns,
                ended_ns,
                noted.activity,
                commit,
                queued_behind,
            )
        )


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
