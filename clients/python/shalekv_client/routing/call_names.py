"""Names that a program gives its calls: a request id, and a span; and their metadata."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shalekv_wire.status import Metadata
from shalekv_wire.trace_context import REQUEST_ID, REQUEST_ID_CHARS_MAX, TRACEPARENT, call_names

REQUEST_ID_HERE: ContextVar[str] = ContextVar("shalekv_request_id", default="")


@contextmanager
def request_id_of_calls(request_id: str) -> Iterator[None]:
    """Give the calls of this task a name for the operators of servers, while entered.

        with request_id_of_calls("checkout-81"):
            await client.get(b"greeting")

    Servers note it in their logs, audit logs and lists of slow calls, and the error of a call has
    it. It counts for scans and calls with one reply of any client, and for operations of sessions
    that are submitted inside. Raises ValueError unless it has 1 to 128 printable ASCII characters,
    with no space at its ends.
    """
    if not request_id or call_names(request_id, "").request_id != request_id:
        limits = f"1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters, no space at its ends"
        raise ValueError(f"a request id has {limits}: {request_id!r} is none")
    token = REQUEST_ID_HERE.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID_HERE.reset(token)


def metadata_of(traceparent: str, request_id: str) -> Metadata:
    """Return the metadata of a call; each may be empty."""
    if not traceparent and not request_id:
        return ()
    named = ((TRACEPARENT, traceparent), (REQUEST_ID, request_id))
    return tuple((key, value) for key, value in named if value)


def metadata_here(traceparent: str = "") -> Metadata:
    """Return the metadata of a call that is made here, inside of `request_id_of_calls` or not."""
    return metadata_of(traceparent, REQUEST_ID_HERE.get())
