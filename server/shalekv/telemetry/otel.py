"""Spans of calls, commits and jobs, as OpenTelemetry describes them; needs the extra `otel`.

Activities have all times and requests, so spans are made of them afterwards, by the thread that
sends them (`telemetry.otlp`). The loop only names what begins, since others link to it, and queues
what has ended. `server/docs/traces.md` describes spans and attributes.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, repeat
from math import log1p
from random import Random
from typing import Any, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource

from shalekv.telemetry.activity import Activity, CallActivity, CommitActivity, StoreRequest
from shalekv.telemetry.otlp import Spans, SpanSender, TraceCollector
from shalekv.version import VERSION

LINKS_MAX = 32  # from a commit to calls that have waited for it

# Codes for which the server is to blame, by the semantic conventions of gRPC.
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_SERVER, _CLIENT, _INTERNAL = (
    Span.SpanKind.SPAN_KIND_SERVER,
    Span.SpanKind.SPAN_KIND_CLIENT,
    Span.SpanKind.SPAN_KIND_INTERNAL,
)
_LEFT_OUT, _RECORDED = False, (True,)
_SAMPLED = 0x01
_OF_HERE = _SAMPLED | SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_OF_ELSEWHERE = _OF_HERE | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
SESSION = "Session"

Attributes: TypeAlias = Mapping[str, str | int]
# Name, kind, times of beginning and end on the clock of activities, and attributes.
_Child: TypeAlias = tuple[str, "Span.SpanKind.ValueType", int, int, Sequence[KeyValue]]


class _Recorded:
    """Something with a span: its name for others, and at its end all that is known of it."""

    __slots__ = ("activity", "ended_ns", "links", "name", "request_count", "span_id", "trace_id")

    def __init__(self, name: str, activity: Any, trace_id: str, span_id: int) -> None:
        self.name = name
        self.activity = activity
        self.trace_id = trace_id  # 32 hexadecimal digits
        self.span_id = span_id
        self.links: list[_Recorded] = []
        self.ended_ns = 0  # 0: it has not ended
        self.request_count = 0  # of the activity at the end; loads that others wait for go on

    def add_to(self, spans: Spans, offset_ns: int, *, new_id: Callable[[], int]) -> None:
        """Add its span, and those of what belongs to it alone.

        `offset_ns` converts the times of activities to those of the machine.
        """
        trace_id, span_id = bytes.fromhex(self.trace_id), _id_bytes(self.span_id)
        span = spans.add(
            trace_id=trace_id,
            span_id=span_id,
            start_time_unix_nano=self.began_ns + offset_ns,
            end_time_unix_nano=self.ended_ns + offset_ns,
        )
        for other in self.links:
            span.links.add(
                trace_id=bytes.fromhex(other.trace_id),
                span_id=_id_bytes(other.span_id),
                flags=_OF_HERE,
            )
        self.describe(span)
        for event in span.events:
            event.time_unix_nano += offset_ns
        for name, kind, began_ns, ended_ns, attributes in self.children():
            spans.add(
                trace_id=trace_id,
                span_id=_id_bytes(new_id()),
                parent_span_id=span_id,
                name=name,
                kind=kind,
                start_time_unix_nano=began_ns + offset_ns,
                end_time_unix_nano=ended_ns + offset_ns,
                attributes=attributes,
                flags=_OF_HERE,
            )
        self.forget()

    def forget(self) -> None:
        """Keep the name alone, for those that link to it: all else refers to this."""
        self.activity, self.links = None, []

    @property
    def began_ns(self) -> int:
        """When it began, on the clock of activities."""
        began_ns: int = self.activity.began_ns
        return began_ns

    def describe(self, span: Span) -> None:
        """Add to a span what is known of this kind; times are those of activities."""
        span.name, span.kind, span.flags = self.name, _INTERNAL, _OF_HERE

    def children(self) -> Iterator[_Child]:
        """Yield the spans of its store requests."""
        for request in self.activity.requests[: self.request_count]:
            ended_ns = request.ended_ns  # read once: the loop may try the request again
            has_ended = 0 < ended_ns <= self.ended_ns
            if not has_ended:
                ended_ns = max(self.ended_ns, request.began_ns)
            attributes = _attributes_of_request(request, has_ended=has_ended)
            yield _name_of(request), _CLIENT, request.began_ns, ended_ns, attributes


class _RecordedCall(_Recorded):
    """A call, or an operation of a session."""

    __slots__ = ("code",)

    activity: CallActivity
    code: str

    def describe(self, span: Span) -> None:
        """Add the status, what a read has searched, and the place of a write in the log."""
        activity = self.activity
        span.MergeFromString(_call_span(self.name, self.code))
        if activity.ssts_searched or activity.blocks_cached or activity.blocks_fetched:
            for key in ("ssts_searched", "blocks_cached", "blocks_fetched"):
                span.attributes.append(_pair(f"shalekv.read.{key}", getattr(activity, key)))
        if activity.commit is not None:
            span.attributes.append(_pair("shalekv.commit.wal_id", activity.commit.wal_id))
        if activity.parent is not None:
            span.parent_span_id = bytes.fromhex(activity.parent.span_id)
            span.flags = _OF_ELSEWHERE

    def children(self) -> Iterator[_Child]:
        """Yield the waits of the call, then its store requests."""
        began_ns = self.activity.began_ns
        for wait, waited_ns in self.activity.waited_ns.items():
            # When it began is not recorded; that is exact for what calls wait for first.
            yield wait, _INTERNAL, began_ns, began_ns + waited_ns, ()
            began_ns += waited_ns
        yield from super().children()


class _RecordedCommit(_Recorded):
    """A group of commits, with one call at least that is recorded."""

    __slots__ = ("problem",)

    activity: CommitActivity
    problem: str

    @property
    def began_ns(self) -> int:
        """When the first of its commits was queued."""
        return self.activity.queued_ns

    def describe(self, span: Span) -> None:
        """Add the size of the group, and its stages as events."""
        super().describe(span)
        commit = self.activity
        attempts = sum(each.attempts for each in commit.requests)
        span.attributes.extend(
            (
                _pair("shalekv.commit.wal_id", commit.wal_id),
                _pair("shalekv.commit.commits", commit.commit_count),
                _pair("shalekv.commit.bytes", commit.size_bytes),
                _pair("shalekv.commit.attempts", attempts),
            )
        )
        stages = (
            ("taken", commit.began_ns),
            ("encoded", commit.encoded_ns),
            ("stored", commit.stored_ns),
            ("visible", commit.visible_ns),
        )
        # Events cost less than child spans, and most groups are recorded: each has many calls.
        for stage, at_ns in stages:
            if at_ns:
                span.events.add(name=stage, time_unix_nano=at_ns)
        _fail(span, self.problem)


class _RecordedJob(_Recorded):
    """A job, such as a merge."""

    __slots__ = ("attributes", "problem")

    activity: Activity
    attributes: Attributes
    problem: str

    def describe(self, span: Span) -> None:
        """Add what the job has told, and how many requests it has sent."""
        super().describe(span)
        span.attributes.extend(_pair(*each) for each in self.attributes.items())
        _fail(span, self.problem)


class OtelTracer:
    """Implements `telemetry.tracing.Tracer`. Its methods are for one thread, that of the loop."""

    def __init__(
        self,
        collector: TraceCollector,
        *,
        ratio: float,
        role: str,
        database_url: str,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Send spans to `collector`.

        `ratio` of the calls whose caller does not decide it are recorded. `database_url` has no
        credentials. `now_ns` is the clock of activities.
        """
        self._now_ns = now_ns
        random = Random()  # noqa: S311 (nothing is kept secret)
        self._random = random.random
        self._new_id = partial(random.getrandbits, 64)
        self._new_trace_id = partial(random.getrandbits, 128)
        self.by_chance = chain.from_iterable(self._chances(ratio)).__next__
        resource = Resource.create(
            {
                "service.name": "shalekv",
                "service.version": VERSION,
                "service.instance.id": str(uuid.uuid4()),
                "shalekv.role": role,
                "shalekv.database.url": database_url,
            }
        )
        attributes = [_pair(key, _plain(value)) for key, value in resource.attributes.items()]
        self._sender = SpanSender(collector, attributes, now_ns)

    @property
    def dropped(self) -> int:
        """The number of spans that could not be sent."""
        return self._sender.dropped

    def close(self) -> None:
        """Send what is left, for at most `otlp.CLOSE_TIMEOUT_S`. Blocks: call it in a thread."""
        self._sender.close()

    def begin_call(self, method: str, activity: CallActivity) -> None:
        """Name the span of a call."""
        if activity.parent is None:
            activity.trace_id = f"{self._new_trace_id():032x}"
        activity.span = _RecordedCall(method, activity, activity.trace_id, self._new_id())

    def end_call(self, activity: CallActivity, code: str, ended_ns: int) -> None:
        """Record a call, what it has waited for, and its store requests."""
        call: _RecordedCall = activity.span
        call.code, call.ended_ns = code, ended_ns
        if activity.commit is not None:
            call.links.append(self._joined(activity.commit, call))
        self._record(call, 1 + len(activity.waited_ns))

    def end_commit(self, activity: CommitActivity, problem: str = "") -> None:
        """Record a group, if one of its calls is recorded."""
        commit: _RecordedCommit | None = activity.span
        if commit is None:
            activity.span = _NOBODY
        elif not commit.ended_ns:
            self._end_commit(commit, problem)

    def begin_job(self, name: str) -> Activity:
        """Begin a job."""
        activity = Activity(self._now_ns())
        trace_id = f"{self._new_trace_id():032x}"
        activity.span = _RecordedJob(name, activity, trace_id, self._new_id())
        return activity

    def end_job(self, activity: Activity, attributes: Attributes, problem: str = "") -> None:
        """Record a job, and its first store requests."""
        job: _RecordedJob = activity.span
        # Now, since loads that others wait for go on.
        sent = {f"shalekv.store.sent.{kind}": count for kind, count in activity.sent.items()}
        job.attributes, job.problem, job.ended_ns = {**attributes, **sent}, problem, self._now_ns()
        self._record(job, 1)

    def _joined(self, activity: CommitActivity, call: _RecordedCall) -> _RecordedCommit:
        """Return the group that a recorded call belongs to, with a link to the call."""
        commit: _RecordedCommit | None = activity.span
        if commit is None or commit is _NOBODY:
            has_ended = commit is _NOBODY  # the call was answered in a later turn of the loop
            trace_id = f"{self._new_trace_id():032x}"
            commit = _RecordedCommit("commit", activity, trace_id, self._new_id())
            activity.span = commit
            commit.links.append(call)
            if has_ended:
                self._end_commit(commit, "")
        elif not commit.ended_ns and len(commit.links) < LINKS_MAX:
            commit.links.append(call)
        return commit

    def _end_commit(self, commit: _RecordedCommit, problem: str) -> None:
        commit.problem = problem
        commit.ended_ns = commit.activity.visible_ns or self._now_ns()
        self._record(commit, 1)

    def _record(self, recorded: _Recorded, own_spans: int) -> None:
        recorded.request_count = len(recorded.activity.requests)
        add_spans = partial(recorded.add_to, new_id=self._new_id)
        if not self._sender.add(add_spans, own_spans + recorded.request_count):
            recorded.forget()

    def _chances(self, ratio: float) -> Iterator[Iterable[bool]]:
        """Yield runs of calls that are left out, each followed by one that is recorded.

        One random number for each run is as good as one for each call, and cheaper.
        """
        if ratio <= 0:
            yield repeat(_LEFT_OUT)
        scale = 0.0 if ratio >= 1 else 1 / log1p(-ratio)  # of the geometric distribution
        while True:
            yield repeat(_LEFT_OUT, min(int(log1p(-self._random()) * scale), sys.maxsize))
            yield _RECORDED


# The span of a group that has ended, and of which no call was recorded by then.
_NOBODY = _RecordedCommit("", None, "", 0)


def _id_bytes(span_id: int) -> bytes:
    return span_id.to_bytes(8, "big")


def _pair(key: str, value: str | int) -> KeyValue:
    if isinstance(value, str):
        return KeyValue(key=key, value=AnyValue(string_value=value))
    return KeyValue(key=key, value=AnyValue(int_value=value))


def _plain(value: object) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _fail(span: Span, problem: str) -> None:
    if problem:
        span.status.code = Status.STATUS_CODE_ERROR
        span.status.message = problem


@cache
def _call_span(method: str, code: str) -> bytes:
    """Encode what all spans of a method, such as ``KV.Get`` or ``Session.put``, have in common."""
    service, _, name = method.rpartition(".")
    path = f"shalekv.v1.KV/{SESSION}" if service == SESSION else f"shalekv.v1.{service}/{name}"
    told = {"rpc.system.name": "grpc", "rpc.method": path, "rpc.response.status_code": code}
    if code in _FAILURES:
        told["error.type"] = code
    attributes = [_pair(*each) for each in told.items()]
    span = Span(name=method, kind=_SERVER, attributes=attributes, flags=_OF_HERE)
    if code in _FAILURES:
        span.status.code = Status.STATUS_CODE_ERROR
    return span.SerializeToString()


def _name_of(request: StoreRequest) -> str:
    folder = request.name.partition("/")[0] if "/" in request.name else ""
    return f"{request.operation} {folder}".rstrip()


def _attributes_of_request(request: StoreRequest, *, has_ended: bool) -> list[KeyValue]:
    attributes = [
        _pair("shalekv.store.object", request.name),
        _pair("shalekv.store.attempts", request.attempts),
        _pair("shalekv.store.bytes", request.size_bytes),
    ]
    if request.problem:
        attributes.append(_pair("shalekv.store.problem", request.problem))
    if not has_ended:
        attributes.append(_pair("shalekv.store.unfinished", 1))
    return attributes
