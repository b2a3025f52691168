"""From the status of a gRPC call to an error: the published table, read from the client's side.

What decides is the reason in `google.rpc.ErrorInfo` of the domain "shalekv". Without it the status
was made by gRPC or by something between, and then nothing proves that a mutation was not applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shalekv_client import errors
from shalekv_client.errors import ErrorDetails, ShaleKVError

DOMAIN = "shalekv"

_BY_REASON: Mapping[str, type[ShaleKVError]] = MappingProxyType(
    {
        "INVALID_REQUEST": errors.InvalidRequest,
        "NOT_IMPLEMENTED": errors.Unimplemented,
        "OVERLOADED": errors.Overloaded,
        "QUEUE_FULL": errors.Overloaded,
        "MEMTABLE_FULL": errors.Overloaded,
        "REPLY_TOO_LARGE": errors.ReplyTooLarge,
        "DEADLINE_PASSED": errors.DeadlinePassed,
        "STOPPING": errors.Stopping,
        "FENCED": errors.Fenced,
        "OUTCOME_UNKNOWN": errors.OutcomeUnknown,
        "DATABASE_NOT_FOUND": errors.NotApplied,
        "DATABASE_EXISTS": errors.NotApplied,
        "DATABASE_MISMATCH": errors.NotApplied,
        "MANIFEST_VERSION_EXISTS": errors.NotApplied,
        "MANIFEST_CONFLICT": errors.NotApplied,
        "INVALID_URL": errors.NotApplied,
        "INVALID_SETTING": errors.NotApplied,
    }
)

# For reasons that this client does not know: of a newer server.
_BY_CODE_WITH_REASON: Mapping[str, type[ShaleKVError]] = MappingProxyType(
    {
        "UNAVAILABLE": errors.NotApplied,
        "INVALID_ARGUMENT": errors.InvalidRequest,
        "UNIMPLEMENTED": errors.Unimplemented,
    }
)

_BY_BARE_CODE: Mapping[str, type[ShaleKVError]] = MappingProxyType(
    {
        "UNAVAILABLE": errors.ConnectionLost,
        "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
        "CANCELLED": errors.Cancelled,
        "UNIMPLEMENTED": errors.Unimplemented,  # no such method: nobody can have acted
    }
)

# How gRPC words it when it has no connection to send a call on. The words choose the class and
# the message only: reworded, the error is `ConnectionLost`, and as unknown as before.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")


class _FailedCall(Protocol):
    """The part of `grpc.aio.AioRpcError` that is read here."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def error_of(address: str, call: _FailedCall) -> ShaleKVError:
    """The error for a call to the server at `address` that gRPC reports as failed."""
    code = call.code().name
    message = call.details() or code
    status = _rich_status(call)
    info = _error_info(status)
    if info is None:
        return _bare(address, code, message)
    retry_after_ms = _retry_after_ms(status)
    found = ErrorDetails(address, code, message, info.reason, dict(info.metadata), retry_after_ms)
    kind = _BY_REASON.get(info.reason) or _BY_CODE_WITH_REASON.get(code)
    if kind is None and retry_after_ms is not None and code == "RESOURCE_EXHAUSTED":
        kind = errors.Overloaded
    return (kind or errors.ServerFailed)(found)


def silence(address: str, timeout_ms: int) -> ShaleKVError:
    """The error for a stream on which nothing came for `timeout_ms`."""
    message = f"nothing came for {timeout_ms} ms"
    return errors.DeadlineExceeded(ErrorDetails(address, "DEADLINE_EXCEEDED", message))


def _bare(address: str, code: str, message: str) -> ShaleKVError:
    if code == "UNAVAILABLE" and message.startswith(_NO_CONNECTION):
        cause = message.rpartition(": ")[2].rstrip("]")
        return errors.Unreachable(
            ErrorDetails(address, code, f"no connection to the server: {cause}")
        )
    kind = _BY_BARE_CODE.get(code, errors.ServerFailed)
    return kind(ErrorDetails(address, code, message))


def _rich_status(call: _FailedCall) -> status_pb2.Status | None:
    try:
        # An AioRpcError has the methods of a Call that are used, though not its type.
        return cast("status_pb2.Status | None", rpc_status.from_call(cast("grpc.Call", call)))
    except ValueError:  # what the details say contradicts the call: they are not to be trusted
        return None


def _error_info(status: status_pb2.Status | None) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _retry_after_ms(status: status_pb2.Status | None) -> int | None:
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            return max(0, info.retry_delay.ToMilliseconds())
    return None
