"""Maps failed calls, and failed operations of sessions, to the errors of `shalekv_client.errors`.

This is the published table of errors, seen from the client. The reason in the
`google.rpc.ErrorInfo` of the domain "shalekv" decides. A status without it was made by gRPC or a
proxy, and then nothing proves that a mutation was not applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from shalekv.v1 import kv_pb2
from shalekv_client import errors
from shalekv_client.errors import ErrorDetails, ShaleKVError
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.trace_context import REQUEST_ID, TRACE_ID, TRACEPARENT, call_names

if TYPE_CHECKING:  # imported by the first call that fails
    from google.rpc import error_details_pb2, status_pb2

DOMAIN = "shalekv"

_CODE_NAMES: Mapping[int, str] = MappingProxyType({code.value: code.name for code in StatusCode})

_BY_REASON: Mapping[str, type[ShaleKVError]] = MappingProxyType(
    {
        "INVALID_REQUEST": errors.InvalidRequest,
        "CONDITION_FAILED": errors.ConditionFailed,
        "NOT_A_COUNTER": errors.NotACounter,
        "COUNTER_OVERFLOW": errors.CounterOverflow,
        "RANGE_TOO_COSTLY": errors.RangeTooCostly,
        "IDEMPOTENCY_KEY_REUSED": errors.KeyReused,
        "IDEMPOTENCY_KEY_EXPIRED": errors.KeyExpired,
        "POLICY_CHANGED": errors.PolicyChanged,
        "PAGE_EXPIRED": errors.PageExpired,
        "NOT_THE_WRITER": errors.NotTheWriter,
        "TOO_STALE": errors.TooStale,
        "SEQ_NOT_REACHED": errors.SeqNotReached,
        "WAL_COLLECTED": errors.WalCollected,
        "WATCH_TOO_SLOW": errors.WatchTooSlow,
        "OVERLOADED": errors.Overloaded,
        "QUEUE_FULL": errors.Overloaded,
        "MEMTABLE_FULL": errors.Overloaded,
        "LOG_FULL": errors.Overloaded,
        "QUOTA_EXCEEDED": errors.QuotaExceeded,
        "UNAUTHENTICATED": errors.Unauthenticated,
        "PERMISSION_DENIED": errors.PermissionDenied,
        "QUORUM_UNAVAILABLE": errors.NotApplied,
        "ISSUER_UNAVAILABLE": errors.AccessUnknown,
        "POLICY_UNKNOWN": errors.AccessUnknown,
        "IMPLAUSIBLE_TIME": errors.NotApplied,
        "LOG_BEHIND_ARCHIVE": errors.NotApplied,
        "NOT_A_MEMBER": errors.NotApplied,
        "LOG_DAMAGED": errors.NotApplied,
        "RECORD_TRIMMED": errors.NotApplied,
        "REPLY_TOO_LARGE": errors.ReplyTooLarge,
        "DEADLINE_PASSED": errors.DeadlinePassed,
        "PROFILE_REFUSED": errors.NotApplied,
        "WRONG_ROLE": errors.Unimplemented,
        "STOPPING": errors.Stopping,
        "FENCED": errors.Fenced,
        "STANDING_BY": errors.Stopping,
        "STREAM_TOO_SLOW": errors.StreamTooSlow,
        "OUTCOME_UNKNOWN": errors.OutcomeUnknown,
        "WRITE_TIMED_OUT": errors.DeadlineExceeded,
        "DATABASE_NOT_FOUND": errors.NotApplied,
        "DATABASE_EXISTS": errors.NotApplied,
        "DATABASE_MISMATCH": errors.NotApplied,
        "MANIFEST_VERSION_EXISTS": errors.NotApplied,
        "MANIFEST_CONFLICT": errors.OutcomeUnknown,
        "SNAPSHOT_NOT_FOUND": errors.SnapshotNotFound,
        "SNAPSHOT_EXISTS": errors.SnapshotExists,
        "LEASE_LOST": errors.LeaseLost,
        "WAL_UNPROTECTED": errors.NotApplied,
        "ORIGIN_LOST": errors.NotApplied,
        "BACKUP_NOT_FOUND": errors.NotApplied,
        "BACKUP_BUSY": errors.NotApplied,
        "LOAD_UNKNOWN": errors.LoadUnknown,
        "PART_FAILED": errors.NotApplied,
        "SUPERSEDED": errors.NotApplied,
        "INVALID_URL": errors.NotApplied,
        "INVALID_SETTING": errors.NotApplied,
    }
)

# For the reasons of a newer server, which this client does not know.
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
        "UNIMPLEMENTED": errors.Unimplemented,  # no such method: nothing can have been applied
    }
)


# The field of a change whose kind the server does not know: it finds none that is set.
_CHANGE = r"changes\[\d+\]|(then|otherwise)\[\d+\]\.change"
_OLDER = "this server does not know {}: it may be older than this client, or none of ShaleKV"


def error_of(
    address: str,
    call: CallFailed,
    *,
    timeout_ms: float | None = None,
    method: str = "",
    sent: Metadata = (),
) -> ShaleKVError:
    """Return the error for a failed call to the server at `address`.

    `timeout_ms` is the timeout of the call, and `method` its name, for the messages of a
    DEADLINE_EXCEEDED and an UNIMPLEMENTED without details. `sent` is its metadata: the names in it
    count if the server has not told any.
    """
    error = _error_of(address, call, timeout_ms, method)
    if not sent and not call.metadata:
        return error
    names = {**dict(sent), **dict(call.metadata)}
    trace_id = names.get(TRACE_ID) or call_names("", str(names.get(TRACEPARENT, ""))).trace_id
    return error.again(str(names.get(REQUEST_ID, "")), str(trace_id))


def _error_of(
    address: str, call: CallFailed, timeout_ms: float | None, method: str
) -> ShaleKVError:
    code = call.code.name
    message = call.message or code
    status = _rich_status(call)
    info = _error_info(status)
    if info is not None:
        advice_ms = _retry_after_ms(status)
        return _error_with_reason(
            ErrorDetails(address, code, message, info.reason, dict(info.metadata), advice_ms)
        )
    if call.is_unsent and call.code is StatusCode.UNAVAILABLE:
        return errors.Unreachable(ErrorDetails(address, code, message))
    if call.code is StatusCode.DEADLINE_EXCEEDED and timeout_ms is not None:
        message = f"no answer within {timeout_ms:.0f} ms"
    if call.code is StatusCode.UNIMPLEMENTED and method:
        message = _OLDER.format(f"the call {method}")
    return _error_without_reason(ErrorDetails(address, code, message))


def error_of_stream(address: str, call: CallFailed) -> ShaleKVError:
    """Return the error for a stream to the server at `address` that has ended.

    INTERNAL without a reason says only that it is over: transports make that status themselves.
    """
    error = error_of(address, call)
    if call.code is StatusCode.INTERNAL and not error.reason:
        return errors.ConnectionLost(error.details)
    return error


def error_of_operation(address: str, failure: kv_pb2.OperationError) -> ShaleKVError:
    """Return the error for an operation of a session that the server at `address` has failed."""
    code = _CODE_NAMES.get(failure.code, "UNKNOWN")
    found = ErrorDetails(
        address,
        code,
        failure.message or code,
        failure.reason,
        dict(failure.metadata),
        failure.retry_delay_ms or None,
        failure.request_id,
        failure.trace_id,
    )
    return _error_with_reason(found) if found.reason else _error_without_reason(found)


def silence(address: str, timeout_ms: int) -> errors.DeadlineExceeded:
    """Return the error for a stream on which nothing came for `timeout_ms`."""
    message = f"nothing came for {timeout_ms} ms"
    return errors.DeadlineExceeded(ErrorDetails(address, "DEADLINE_EXCEEDED", message))


def too_large(address: str, method: str, size_bytes: int, message_bytes_max: int) -> ShaleKVError:
    """Return the error for a request that does not fit into a message, and so is not sent."""
    message = f"the {method} has {size_bytes} bytes, and a message at most {message_bytes_max}"
    return errors.InvalidRequest(ErrorDetails(address, "INVALID_ARGUMENT", message))


def not_an_answer(address: str, method: str) -> ShaleKVError:
    """Return the error for a reply that does not fit the request."""
    message = f"the server's reply does not fit {method}"
    return errors.ServerFailed(ErrorDetails(address, "INTERNAL", message))


def _error_with_reason(found: ErrorDetails) -> ShaleKVError:
    if found.reason == "INVALID_REQUEST" and re.fullmatch(_CHANGE, found.metadata.get("field", "")):
        message = _OLDER.format(f"the kind of change in {found.metadata['field']}")
        return errors.Unimplemented(replace(found, message=message))
    kind = _BY_REASON.get(found.reason) or _BY_CODE_WITH_REASON.get(found.code)
    if kind is None and found.retry_after_ms is not None and found.code == "RESOURCE_EXHAUSTED":
        kind = errors.Overloaded
    return (kind or errors.ServerFailed)(found)


def _error_without_reason(found: ErrorDetails) -> ShaleKVError:
    return _BY_BARE_CODE.get(found.code, errors.ServerFailed)(found)


def _rich_status(call: CallFailed) -> status_pb2.Status | None:
    """Return the status with details; None if there is none, or it is not that of the call."""
    from google.rpc import status_pb2

    try:
        status = status_pb2.Status.FromString(call.details)
    except DecodeError:
        return None
    return status if status.code == call.code else None


def _error_info(status: status_pb2.Status | None) -> error_details_pb2.ErrorInfo | None:
    from google.rpc import error_details_pb2

    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _retry_after_ms(status: status_pb2.Status | None) -> int | None:
    from google.rpc import error_details_pb2

    info = error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            return max(0, info.retry_delay.ToMilliseconds())
    return None


def not_reached(address: str, seq: int, min_seq: int) -> errors.SeqNotReached:
    """Return the error for a reply with an older state than the client has seen before."""
    message = f"the server is at seq {seq}, and this client has seen seq {min_seq}"
    found = ErrorDetails(
        address, "DEADLINE_EXCEEDED", message, "SEQ_NOT_REACHED", {"seq": str(seq)}
    )
    return errors.SeqNotReached(found)
