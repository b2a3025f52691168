"""Sending of spans to a collector of OpenTelemetry: protobuf over HTTP (OTLP).

    loop:    what has ended ----> queue of `QUEUE_MAX` spans, or dropped
    thread:  queue ----> spans ----> batches ----> collector

The exporter of the SDK encodes a span in 45 us of processor time, more than a get takes, so spans
are made as messages at once.
"""

from __future__ import annotations

import gzip
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import requests
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shalekv.telemetry.contained import contained
from shalekv.version import VERSION

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

QUEUE_MAX = 4_096  # spans that wait to be sent; more are dropped, and counted
BATCH_MAX = 512  # spans of one request to the collector, or those of one call
BATCH_DELAY_S = 5.0  # for which spans wait for others: a request takes some ms of CPU time
EXPORT_TIMEOUT_S = 5.0  # of one batch, with all attempts
RETRY_DELAY_S = 1.0  # before the second attempt; doubled with each
CLOSE_TIMEOUT_S = 1.0  # by which the end of the process may be delayed
LOG_INTERVAL_S = 60.0  # between two lines about spans that were lost
TRACES_PATH = "/v1/traces"

_TURN_COUNT = 16  # calls, commits and jobs; then the loop may go on, if it waits
_RETRIED = frozenset({429, 502, 503, 504})  # statuses, by the specification of OTLP
# Without the error, which may repeat a header: they have credentials.
_UNSENDABLE = "its address or a header of OTEL_EXPORTER_OTLP_HEADERS is none of HTTP: correct it"
_SCOPE = InstrumentationScope(name="shalekv", version=VERSION)
_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}

Spans: TypeAlias = "RepeatedCompositeFieldContainer[Span]"
# Adds spans, whose times are those of an activity plus the nanoseconds that it is told.
AddSpans: TypeAlias = Callable[[Spans, int], None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TraceCollector:
    """Address of a collector, and what it asks of those who send."""

    endpoint: str  # a URL; `TRACES_PATH` is added to it
    headers: Mapping[str, str] = field(default_factory=dict)
    certificate_file: str = ""  # of its authority; empty: those that the machine trusts
    client_files: tuple[str, str] | str | None = None  # certificate and key, or both in one
    compression: str = ""  # "gzip" or "deflate"; nothing else compresses


class SpanSender:
    """A bounded queue, and a thread that sends what is in it. Its methods are for one thread."""

    def __init__(
        self, collector: TraceCollector, resource: Sequence[KeyValue], now_ns: Callable[[], int]
    ) -> None:
        """Send to `collector`. `now_ns` is the clock of spans in the queue.

        `resource` describes the process.
        """
        self._collector = _Connection(collector)
        self._resource = Resource(attributes=resource)
        self._now_ns = now_ns
        self._queue: deque[tuple[AddSpans, int]] = deque()
        self._added = self._refused = 0  # spans, counted by the loop
        self._taken = self._lost = 0  # counted by the thread
        self._log_next_s = 0.0
        self._is_due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans for which there was no place, and those that the collector has not taken."""
        return self._refused + self._lost

    def add(self, add_spans: AddSpans, count: int) -> bool:
        """Send `count` spans some time later; False: they are dropped, since the queue is full.

        `add_spans` is called in the thread.
        """
        waiting = self._added - self._taken
        if waiting + count > QUEUE_MAX:
            self._refused += count
            return False
        self._added += count
        self._queue.append((add_spans, count))
        if waiting < BATCH_MAX <= waiting + count:
            self._is_due.set()
        return True

    def close(self) -> None:
        """Send what is left. What cannot be sent in `CLOSE_TIMEOUT_S` is lost."""
        self._collector.ends_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._collector.is_closing.set()
        self._is_due.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            self._is_due.wait(BATCH_DELAY_S)
            self._is_due.clear()
            is_closing = self._collector.is_closing.is_set()
            for message, count in self._batches():
                problem = self._collector.send(message)
                if problem:
                    self._lost += count
                    self._tell(problem)

    def _batches(self) -> Iterator[tuple[bytes, int]]:
        """Yield messages that are ready to be sent, with the numbers of their spans."""
        while self._queue:
            offset_ns = time.time_ns() - self._now_ns()
            message = ExportTraceServiceRequest()
            of_process = message.resource_spans.add(resource=self._resource)
            spans = of_process.scope_spans.add(scope=_SCOPE).spans
            count = turns = 0
            while self._queue and count < BATCH_MAX:
                add_spans, more = self._queue.popleft()
                self._taken += more
                count += more
                _add(add_spans, spans, offset_ns)
                turns += 1
                if not turns % _TURN_COUNT:
                    time.sleep(0)
            yield message.SerializeToString(), count

    def _tell(self, problem: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._log_next_s:
            self._log_next_s = now_s + LOG_INTERVAL_S
            _log.warning(
                "spans are lost",
                otlp_endpoint=self._collector.endpoint,
                problem=problem,
                spans_dropped=self.dropped,
            )


class _Connection:
    """Connection to a collector. For one thread, but `is_closing` and `ends_s`."""

    def __init__(self, collector: TraceCollector) -> None:
        self.endpoint = collector.endpoint
        url = collector.endpoint.rstrip("/")
        self._url = url if url.endswith(TRACES_PATH) else url + TRACES_PATH
        self._session = requests.Session()
        self._session.headers.update(collector.headers)
        self._session.headers["Content-Type"] = "application/x-protobuf"
        # Told with each request: otherwise REQUESTS_CA_BUNDLE would take precedence.
        self._verify = collector.certificate_file or True
        self._certificate = collector.client_files
        self._compress = _COMPRESSIONS.get(collector.compression)
        if self._compress is not None:
            self._session.headers["Content-Encoding"] = collector.compression
        self.is_closing = threading.Event()  # nothing is tried again
        self.ends_s = inf  # when nobody waits any longer for what is sent

    def send(self, message: bytes) -> str:
        """Send a message; returns why it was not taken, or ""."""
        data = message if self._compress is None else self._compress(message)
        end_s, delay_s = min(time.monotonic() + EXPORT_TIMEOUT_S, self.ends_s), RETRY_DELAY_S
        while True:
            try:
                reply = self._session.post(
                    self._url,
                    data=data,
                    verify=self._verify,
                    cert=self._certificate,
                    timeout=max(end_s - time.monotonic(), 0.1),
                    allow_redirects=False,
                )
            except ValueError:
                return _UNSENDABLE
            except Exception as error:  # noqa: BLE001 - the thread goes on with the next batch
                problem = _problem_of(error)
            else:
                if HTTPStatus.OK <= reply.status_code < HTTPStatus.MULTIPLE_CHOICES:
                    return ""
                problem = f"it answers with status {reply.status_code}"
                if reply.status_code not in _RETRIED:
                    return problem
            if time.monotonic() + delay_s > end_s or self.is_closing.wait(delay_s):
                return problem
            delay_s *= 2


def _problem_of(error: Exception) -> str:
    if isinstance(error, requests.exceptions.SSLError):
        return "there is no TLS connection to it: a certificate is missing or not trusted"
    if isinstance(error, requests.RequestException):
        return "it does not answer"
    return str(error) or type(error).__name__  # such as a file of certificates that is missing


@contained
def _add(add_spans: AddSpans, spans: Spans, offset_ns: int) -> None:
    add_spans(spans, offset_ns)
