"""Contexts of traces (W3C Trace Context), and the interface of what records spans.

A call is recorded if its caller's span is, or, without one, by chance (`--trace-ratio`). Without a
tracer nothing is recorded, and costs nothing; the trace id of the caller is passed on all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shalekv.telemetry.activity import Activity, CallActivity, CommitActivity

TRACEPARENT = "traceparent"  # the metadata of a call
TRACE_ID = "x-trace-id"  # the metadata of a reply
_SAMPLED = 0x01
_PATTERN = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The name of a span, as callers tell it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    is_sampled: bool

    def traceparent(self) -> str:
        """Encode it as metadata."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def parse_traceparent(text: str) -> SpanContext | None:
    """Decode the metadata `traceparent`; None: it is missing or malformed, and so ignored."""
    match = _PATTERN.fullmatch(text) if text else None
    if match is None or text.startswith("ff"):
        return None
    trace_id, span_id, flags = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


class Tracer(Protocol):
    """Records spans: `telemetry.otel`, if the process exports any."""

    def samples(self, traceparent: str) -> bool:
        """Return whether to record a call with this metadata; empty: its caller has told none.

        Asked once for each call, before anything is made for it.
        """
        ...

    def begin_call(self, method: str, activity: CallActivity) -> SpanContext:
        """Set `activity.span`, and return the name of the span. REQUIRES: the call is sampled."""
        ...

    def end_call(self, activity: CallActivity, code: str) -> None:
        """Record the span of a call: admission, store requests, and a link to its commit.

        `code` is the name of its status. Begins the span of the group of its commit, if it is the
        first one of the group that is recorded. REQUIRES: it has a span.
        """
        ...

    def end_commit(self, activity: CommitActivity, problem: str = "") -> None:
        """Record the span of a group with its stages and requests, if one of its calls has one.

        REQUIRES: all of its calls that are told at once were answered, so that it links to them.
        Called once for each group.
        """
        ...

    def begin_job(self, name: str, activity: Activity) -> None:
        """Set the span of a job beside the calls, such as a merge: each is recorded."""
        ...

    def end_job(
        self, activity: Activity, attributes: Mapping[str, str | int], problem: str = ""
    ) -> None:
        """Record the span of a job with its store requests. REQUIRES: it has a span."""
        ...
