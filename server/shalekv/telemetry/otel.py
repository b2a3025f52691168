"""Spans by the SDK of OpenTelemetry, sent to a collector over HTTP (OTLP); needs the extra `otel`.

Activities have all times and requests, so a span is made at its end, complete. Until then it has
only its name, by which others link to it. `server/docs/traces.md` describes spans and attributes.

    loop:    ended call, commit, job ----> spans ----> queue of `QUEUE_MAX`, or dropped
    thread:                                              queue ----> batches ----> collector
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from types import MappingProxyType
from typing import TypeAlias

import structlog
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanContext as OtelContext

from shalekv.telemetry.activity import Activity, CallActivity, CommitActivity, StoreRequest
from shalekv.version import VERSION
from shalekv_wire.trace_context import SpanContext

QUEUE_MAX = 4_096  # spans that wait to be sent; more are dropped, and counted
BATCH_MAX = 512  # spans of one request to the collector
BATCH_DELAY_MS = 5_000.0  # for which spans wait for others: a request takes some ms of CPU time
EXPORT_TIMEOUT_S = 5.0  # of one batch, with all attempts
CLOSE_TIMEOUT_S = 1.0  # by which the end of the process may be delayed
LINKS_MAX = 32  # from a commit to calls that have waited for it
LOG_INTERVAL_S = 60.0  # between two lines about spans that were lost
OFFSET_INTERVAL_NS = 10_000_000_000  # between two comparisons with the clock of the machine
TRACES_PATH = "/v1/traces"

_SCOPE = InstrumentationScope("shalekv", VERSION)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
# Codes for which the server is to blame, by the semantic conventions of gRPC.
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_OK_STATUS = Status(StatusCode.UNSET)
SESSION = "Session"
_NO_ANSWER = "it does not answer"

Attributes: TypeAlias = Mapping[str, str | int]

_log = structlog.get_logger(__name__)


class _ProcessResource(Resource):
    """The process, which encoders look up for each span: by a hash that is made once."""

    def __hash__(self) -> int:
        """Return the hash of its attributes, which do not change."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


class _OpenSpan:
    """A span that has begun: its name for others, and what is known of it."""

    __slots__ = ("context", "is_ended", "links", "name", "parent")

    def __init__(self, name: str, context: OtelContext, parent: OtelContext | None = None) -> None:
        self.name = name
        self.context = context
        self.parent = parent
        self.links: list[Link] = []
        self.is_ended = False


class OtelTracer:
    """Implements `telemetry.tracing.Tracer`. Its methods are for one thread, that of the loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        ratio: float,
        role: str,
        database_url: str,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Send spans to the collector at `endpoint`, a URL.

        `ratio` of the calls whose caller does not decide it are recorded. `database_url` has no
        credentials. `now_ns` is the clock of activities.
        """
        self._ratio = ratio
        self._now_ns = now_ns
        self._offset_ns = self._offset_until_ns = 0
        self._ids = RandomIdGenerator()
        described = Resource.create(
            {
                "service.name": "shalekv",
                "service.version": VERSION,
                "service.instance.id": str(uuid.uuid4()),
                "shalekv.role": role,
                "shalekv.database.url": database_url,
            }
        )
        self._resource = _ProcessResource(described.attributes, described.schema_url)
        self._sink = _Sink(endpoint)

    @property
    def dropped(self) -> int:
        """The number of spans that could not be sent."""
        return self._sink.dropped

    def close(self) -> None:
        """Send what is left, for at most `CLOSE_TIMEOUT_S`. Blocks: call it in a thread."""
        self._sink.close()

    def samples(self, parent: SpanContext | None) -> bool:
        """Return whether to record a call: as its caller does, or by chance."""
        if parent is not None:
            return parent.is_sampled
        return random.random() < self._ratio  # noqa: S311 (nothing is kept secret)

    def begin_call(self, method: str, activity: CallActivity) -> SpanContext:
        """Name the span of a call."""
        parent = None if activity.parent is None else _remote(activity.parent)
        span = activity.span = _OpenSpan(method, self._new_context(parent), parent)
        told = _told(span.context)
        activity.trace_id = told.trace_id
        return told

    def end_call(self, activity: CallActivity, code: str) -> None:
        """Record a call, what it has waited for, and its store requests."""
        span: _OpenSpan = activity.span
        now_ns = self._now_ns()
        attributes = {**_attributes_of(span.name), "rpc.response.status_code": code}
        if activity.ssts_searched or activity.blocks_cached or activity.blocks_fetched:
            attributes["shalekv.read.ssts_searched"] = activity.ssts_searched
            attributes["shalekv.read.blocks_cached"] = activity.blocks_cached
            attributes["shalekv.read.blocks_fetched"] = activity.blocks_fetched
        status = _OK_STATUS
        if code in _FAILURES:
            attributes["error.type"] = code
            status = Status(StatusCode.ERROR)
        if activity.commit is not None:
            attributes["shalekv.commit.wal_id"] = activity.commit.wal_id
            span.links.append(Link(self._joined(activity.commit, span.context)))
        began_ns, interval = activity.began_ns, (activity.began_ns, now_ns)
        self._record(span, SpanKind.SERVER, attributes, interval, status)
        for wait, waited_ns in activity.waited_ns.items():
            # When it began is not recorded; that is exact for what calls wait for first.
            self._record_child(span, wait, began_ns, began_ns + waited_ns)
            began_ns += waited_ns
        self._record_requests(span, activity, now_ns)

    def end_commit(self, activity: CommitActivity, problem: str = "") -> None:
        """Record a group, if one of its calls is recorded."""
        span: _OpenSpan | None = activity.span
        if span is None:
            activity.span = _NOBODY
        elif not span.is_ended:
            self._record_commit(span, activity, problem)

    def begin_job(self, name: str) -> Activity:
        """Begin a job."""
        activity = Activity(self._now_ns())
        activity.span = _OpenSpan(name, self._new_context(None))
        return activity

    def end_job(self, activity: Activity, attributes: Attributes, problem: str = "") -> None:
        """Record a job, and its first store requests."""
        span: _OpenSpan = activity.span
        now_ns = self._now_ns()
        counts = {f"shalekv.store.sent.{kind}": n for kind, n in activity.sent.items()}
        status = Status(StatusCode.ERROR, problem) if problem else _OK_STATUS
        interval = (activity.began_ns, now_ns)
        self._record(span, SpanKind.INTERNAL, {**attributes, **counts}, interval, status)
        self._record_requests(span, activity, now_ns)

    def _joined(self, commit: CommitActivity, call: OtelContext) -> OtelContext:
        """Return the span of the group that a recorded call belongs to, with a link to the call."""
        span: _OpenSpan | None = commit.span
        if span is None or span is _NOBODY:
            has_ended = span is _NOBODY  # the call was answered in a later turn of the loop
            span = commit.span = _OpenSpan("commit", self._new_context(None))
            span.links.append(Link(call))
            if has_ended:
                self._record_commit(span, commit, "")
        elif not span.is_ended and len(span.links) < LINKS_MAX:
            span.links.append(Link(call))
        return span.context

    def _record_commit(self, span: _OpenSpan, commit: CommitActivity, problem: str) -> None:
        span.is_ended = True
        now_ns = commit.visible_ns or self._now_ns()
        attributes = {
            "shalekv.commit.wal_id": commit.wal_id,
            "shalekv.commit.commits": commit.commit_count,
            "shalekv.commit.bytes": commit.size_bytes,
            "shalekv.commit.attempts": sum(each.attempts for each in commit.requests),
        }
        status = Status(StatusCode.ERROR, problem) if problem else _OK_STATUS
        stages = (
            ("taken", commit.began_ns),
            ("encoded", commit.encoded_ns),
            ("stored", commit.stored_ns),
            ("visible", commit.visible_ns),
        )
        # Events cost a tenth of child spans, and most groups are recorded: each has many calls.
        events = [(stage, at_ns) for stage, at_ns in stages if at_ns]
        interval = (commit.queued_ns, now_ns)
        self._record(span, SpanKind.INTERNAL, attributes, interval, status, events)
        self._record_requests(span, commit, now_ns)

    def _record_requests(self, parent: _OpenSpan, activity: Activity, now_ns: int) -> None:
        for request in activity.requests:
            span = _OpenSpan(_name_of(request), self._new_context(parent.context), parent.context)
            interval = (request.began_ns, request.ended_ns or now_ns)
            attributes = _attributes_of_request(request)
            self._record(span, SpanKind.CLIENT, attributes, interval, _OK_STATUS)

    def _record_child(self, parent: _OpenSpan, name: str, began_ns: int, ended_ns: int) -> None:
        span = _OpenSpan(name, self._new_context(parent.context), parent.context)
        self._record(span, SpanKind.INTERNAL, {}, (began_ns, ended_ns), _OK_STATUS)

    def _record(
        self,
        span: _OpenSpan,
        kind: SpanKind,
        attributes: Attributes,
        interval: tuple[int, int],
        status: Status,
        events: Sequence[tuple[str, int]] = (),
    ) -> None:
        if interval[1] > self._offset_until_ns:
            now_ns = self._now_ns()
            self._offset_ns = time.time_ns() - now_ns
            self._offset_until_ns = now_ns + OFFSET_INTERVAL_NS
        offset_ns = self._offset_ns
        self._sink.add(
            ReadableSpan(
                span.name,
                span.context,
                span.parent,
                self._resource,
                attributes,
                [Event(name, timestamp=at_ns + offset_ns) for name, at_ns in events],
                span.links,
                kind=kind,
                status=status,
                start_time=interval[0] + offset_ns,
                end_time=interval[1] + offset_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def _new_context(self, parent: OtelContext | None) -> OtelContext:
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        span_id = self._ids.generate_span_id()
        return OtelContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


# The span of a group that has ended, and of which no call was recorded by then.
_NOBODY = _OpenSpan("", OtelContext(0, 0, is_remote=False))


class _Sink:
    """The way of spans to the collector: a bounded queue, and a thread that sends batches."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = _CountingExporter(endpoint)
        self._added = self._refused = 0
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_MAX,
            schedule_delay_millis=BATCH_DELAY_MS,
            max_export_batch_size=BATCH_MAX,
        )

    @property
    def dropped(self) -> int:
        """Spans for which there was no place, and those that the collector has not taken."""
        return self._refused + self._exporter.lost

    def add(self, span: ReadableSpan) -> None:
        """Send a span some time later, or drop it: the queue is full."""
        if self._added - self._exporter.begun >= QUEUE_MAX:
            self._refused += 1
            return
        self._added += 1
        self._processor.on_end(span)

    def close(self) -> None:
        # By itself it waits for longer, and its thread does not hinder the end of the process.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        self._exporter.is_closed = True


class _CountingExporter(SpanExporter):
    """Sends batches to a collector; counts and logs those that were lost. For one thread."""

    def __init__(self, endpoint: str) -> None:
        url = endpoint.rstrip("/")
        url = url if url.endswith(TRACES_PATH) else url + TRACES_PATH
        self._endpoint = endpoint
        self._inner: SpanExporter = trace_exporter.OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        self._problem = _LastProblem()
        self._log_next_s = 0.0
        self.begun = 0  # spans that have left the queue
        self.lost = 0
        self.is_closed = False  # nobody waits any longer for what is sent, and nothing is logged

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self.begun += len(spans)
        with self._problem.kept_from_log():
            result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            now_s = time.monotonic()
            if now_s >= self._log_next_s and not self.is_closed:
                self._log_next_s = now_s + LOG_INTERVAL_S
                _log.warning(
                    "spans are lost",
                    otlp_endpoint=self._endpoint,
                    problem=self._problem.text,
                    spans_dropped=self.lost,
                )
        return result


class _LastProblem(logging.Filter):
    """Last failure of the exporter, in plain words, in place of its lines in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.text = _NO_ANSWER

    @contextmanager
    def kept_from_log(self) -> Iterator[None]:
        """Keep the lines of the exporter from the log while entered."""
        logger = logging.getLogger(trace_exporter.__name__)
        logger.addFilter(self)
        try:
            yield
        finally:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Refuse a line, and keep the status that it has told."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        codes = [each for each in arguments if isinstance(each, int)]
        self.text = f"it answers with status {codes[0]}" if codes else _NO_ANSWER
        return False


def _remote(parent: SpanContext) -> OtelContext:
    trace_id, span_id = int(parent.trace_id, 16), int(parent.span_id, 16)
    return OtelContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)


def _told(context: OtelContext) -> SpanContext:
    return SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", is_sampled=True)


@cache
def _attributes_of(method: str) -> Attributes:
    """Return the attributes of all calls of a method, such as ``KV.Get`` or ``Session.put``."""
    service, _, name = method.rpartition(".")
    path = f"shalekv.v1.KV/{SESSION}" if service == SESSION else f"shalekv.v1.{service}/{name}"
    return MappingProxyType({"rpc.system.name": "grpc", "rpc.method": path})


def _name_of(request: StoreRequest) -> str:
    folder = request.name.partition("/")[0] if "/" in request.name else ""
    return f"{request.operation} {folder}".rstrip()


def _attributes_of_request(request: StoreRequest) -> Attributes:
    attributes: dict[str, str | int] = {
        "shalekv.store.object": request.name,
        "shalekv.store.attempts": request.attempts,
        "shalekv.store.bytes": request.size_bytes,
    }
    if request.problem:
        attributes["shalekv.store.problem"] = request.problem
    if not request.ended_ns:
        attributes["shalekv.store.unfinished"] = 1
    return attributes
