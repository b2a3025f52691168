"""Names of a call that its caller chooses: W3C Trace Context, and `x-request-id`.

The server sends them back: the name of the call as it is, of the span the id of its trace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

TRACEPARENT = "traceparent"  # the metadata of a call
TRACE_ID = "x-trace-id"  # the metadata of a reply
REQUEST_ID = "x-request-id"  # of both
REQUEST_ID_CHARS_MAX = 128  # longer ones are cut off
_SAMPLED = 0x01
_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The name of a span, as callers tell it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    is_sampled: bool

    def traceparent(self) -> str:
        """Encode it as metadata."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


class CallNames(NamedTuple):
    """Names that a caller gives its call: a request id, and the span that it is part of."""

    request_id: str = ""  # printable ASCII; empty: it has none
    parent: SpanContext | None = None  # the span of the caller; None: it has told none

    @property
    def trace_id(self) -> str:
        """The trace of the caller; empty: it has told none."""
        return "" if self.parent is None else self.parent.trace_id

    def echo(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the reply."""
        named = ((REQUEST_ID, self.request_id), (TRACE_ID, self.trace_id))
        return tuple((key, value) for key, value in named if value)


UNNAMED = CallNames()


def parse_traceparent(text: str) -> SpanContext | None:
    """Decode the metadata `traceparent`; None: it is missing or malformed, and so ignored."""
    match = _PATTERN.fullmatch(text) if text else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def call_names(request_id: str, traceparent: str) -> CallNames:
    """Check and convert both; `UNNAMED` if there is neither. What cannot be sent is ignored."""
    if not request_id and not traceparent:
        return UNNAMED
    if not (request_id.isascii() and request_id.isprintable()):
        request_id = ""
    request_id = request_id.strip()[:REQUEST_ID_CHARS_MAX].rstrip()  # else it could not be sent
    names = CallNames(request_id, parse_traceparent(traceparent))
    return UNNAMED if names == UNNAMED else names
