"""The one table from errors to gRPC: code, reason, and whether a write was applied.

An error is sent as a `google.rpc.Status` whose details have an `ErrorInfo` (domain "shalekv", the
error's `reason`, metadata), and where it applies a `RetryInfo` or a `BadRequest`. The errors of
gRPC itself have no `ErrorInfo`, and say nothing about the write: UNAVAILABLE *with* an `ErrorInfo`
means that nothing was applied, a bare UNAVAILABLE means that this is unknown. So no error that can
follow the upload of a write may have UNAVAILABLE here.

`errors_page` publishes the table as server/docs/errors.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors
from shalekv.v1 import kv_pb2
from shalekv_wire.status import StatusCode

DOMAIN = "shalekv"
# A status is sent as metadata, of which clients accept 8 KiB. Its message is sent twice, once with
# up to three characters for a byte.
TEXT_BYTES_MAX = 700


class Applied(StrEnum):
    """Conclusion of a caller from an error: whether its write was applied."""

    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """gRPC status of a class of errors."""

    code: StatusCode
    applied: Applied
    log: bool = False  # the server is at fault: log the error for its operator


_Code = StatusCode
_NO = Applied.NO
_UNKNOWN = Applied.UNKNOWN

# Every class of `shalekv.errors` has a row of its own, because whether a retry is safe has to be
# decided for each.
TABLE: Mapping[type[errors.ShaleError], ErrorStatus] = {
    errors.ShaleError: ErrorStatus(_Code.INTERNAL, _UNKNOWN, log=True),
    errors.InvalidRequest: ErrorStatus(_Code.INVALID_ARGUMENT, _NO),
    errors.Overloaded: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.QueueFull: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.MemtableFull: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.LogFull: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.QuotaExceeded: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.Unauthenticated: ErrorStatus(_Code.UNAUTHENTICATED, _NO),
    # Another server may reach the issuer.
    errors.IssuerUnavailable: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.PermissionDenied: ErrorStatus(_Code.PERMISSION_DENIED, _NO),
    errors.PolicyChanged: ErrorStatus(_Code.ABORTED, _NO),
    errors.PolicyUnknown: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.ReplyTooLarge: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    errors.RangeTooCostly: ErrorStatus(_Code.RESOURCE_EXHAUSTED, _NO),
    # gRPC advises ABORTED for a test-and-set that the caller has to repeat from the beginning.
    errors.ConditionFailed: ErrorStatus(_Code.ABORTED, _NO),
    errors.NotACounter: ErrorStatus(_Code.FAILED_PRECONDITION, _NO),
    errors.CounterOverflow: ErrorStatus(_Code.OUT_OF_RANGE, _NO),
    errors.KeyReused: ErrorStatus(_Code.FAILED_PRECONDITION, _NO),
    errors.KeyExpired: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN),
    errors.NotTheWriter: ErrorStatus(_Code.FAILED_PRECONDITION, _NO),
    errors.TooStale: ErrorStatus(_Code.FAILED_PRECONDITION, _NO),
    errors.PageExpired: ErrorStatus(_Code.ABORTED, _NO),
    errors.SnapshotNotFound: ErrorStatus(_Code.NOT_FOUND, _NO),
    errors.SnapshotExists: ErrorStatus(_Code.ALREADY_EXISTS, _NO),
    errors.LeaseLost: ErrorStatus(_Code.ABORTED, _NO),
    errors.BackupNotFound: ErrorStatus(_Code.NOT_FOUND, _NO),
    errors.BackupBusy: ErrorStatus(_Code.ABORTED, _NO),
    errors.WalCollected: ErrorStatus(_Code.OUT_OF_RANGE, _NO),
    errors.WalUnprotected: ErrorStatus(_Code.OUT_OF_RANGE, _NO),
    errors.WatchTooSlow: ErrorStatus(_Code.ABORTED, _NO),
    errors.StreamTooSlow: ErrorStatus(_Code.ABORTED, _UNKNOWN),
    errors.PartFailed: ErrorStatus(_Code.INTERNAL, _NO, log=True),
    errors.LoadUnknown: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN),
    errors.DeadlinePassed: ErrorStatus(_Code.DEADLINE_EXCEEDED, _NO),
    errors.SeqNotReached: ErrorStatus(_Code.DEADLINE_EXCEEDED, _NO),
    errors.ProfileRefused: ErrorStatus(_Code.FAILED_PRECONDITION, _NO),
    errors.WrongRole: ErrorStatus(_Code.UNIMPLEMENTED, _NO),
    errors.Stopping: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.Fenced: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.Superseded: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.StandingBy: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.OutcomeUnknown: ErrorStatus(_Code.UNKNOWN, _UNKNOWN),
    errors.WriteTimedOut: ErrorStatus(_Code.DEADLINE_EXCEEDED, _UNKNOWN),
    # Raised before anything is sent to a safekeeper; a write that was sent ends as unknown.
    errors.QuorumUnavailable: ErrorStatus(_Code.UNAVAILABLE, _NO),
    errors.NotAMember: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.LogDamaged: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.RecordTrimmed: ErrorStatus(_Code.OUT_OF_RANGE, _NO),
    errors.LogBehindArchive: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.DatabaseError: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN, log=True),
    errors.DatabaseNotFound: ErrorStatus(_Code.NOT_FOUND, _NO, log=True),
    errors.DatabaseExists: ErrorStatus(_Code.ALREADY_EXISTS, _NO),
    errors.DatabaseMismatch: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.ImplausibleTime: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.OriginLost: ErrorStatus(_Code.FAILED_PRECONDITION, _NO, log=True),
    errors.ManifestVersionExists: ErrorStatus(_Code.ABORTED, _NO),
    # The last of its requests may have been on its way at the deadline.
    errors.ManifestConflict: ErrorStatus(_Code.ABORTED, _UNKNOWN),
    errors.IllegalState: ErrorStatus(_Code.INTERNAL, _UNKNOWN, log=True),
    errors.CorruptObject: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.BadMagic: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.UnsupportedVersion: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN, log=True),
    errors.Truncated: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.BadChecksum: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.WrongObject: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.BadStructure: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    errors.StoreError: ErrorStatus(_Code.UNKNOWN, _UNKNOWN, log=True),
    errors.ObjectNotFound: ErrorStatus(_Code.DATA_LOSS, _UNKNOWN, log=True),
    # Only reads end with this error: an upload is repeated until its outcome is known.
    errors.StoreUnavailable: ErrorStatus(_Code.UNAVAILABLE, _NO, log=True),
    errors.StoreRefused: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN, log=True),
    errors.StoreUnfit: ErrorStatus(_Code.FAILED_PRECONDITION, _UNKNOWN, log=True),
    errors.StoreBroken: ErrorStatus(_Code.INTERNAL, _UNKNOWN, log=True),
    errors.InvalidUrl: ErrorStatus(_Code.INVALID_ARGUMENT, _NO),
    errors.InvalidSetting: ErrorStatus(_Code.INVALID_ARGUMENT, _NO),
}

# Metadata of an `ErrorInfo`, for a class and its subclasses: name -> attribute of the error.
_METADATA: Mapping[type[errors.ShaleError], Mapping[str, str]] = {
    errors.ShaleError: {},
    errors.InvalidRequest: {"field": "field"},
    errors.ConditionFailed: {"condition": "condition", "found_seq": "found_seq"},
    errors.NotTheWriter: {"writer_address": "writer_address"},
    errors.TooStale: {"staleness_ms": "staleness_ms"},
    errors.WalCollected: {"oldest_seq": "oldest_seq"},
    errors.WatchTooSlow: {"next_seq": "next_seq"},
    errors.SeqNotReached: {"seq": "seq"},
    errors.Overloaded: {"retry_after_ms": "retry_after_ms"},
    errors.QuotaExceeded: {"retry_after_ms": "retry_after_ms", "quota": "quota"},
    errors.PermissionDenied: {"verb": "verb"},
    errors.Fenced: {"own_epoch": "own_epoch", "newer_epoch": "newer_epoch"},
    errors.Superseded: {"own_epoch": "own_epoch", "newer_epoch": "newer_epoch"},
    errors.StandingBy: {"writer_address": "writer_address"},
    errors.CorruptObject: {"object": "name", "offset": "offset"},
    errors.StoreError: {"object": "name", "operation": "operation"},
}


def row_of(kind: type[errors.ShaleError]) -> ErrorStatus:
    """Return the row of a class of errors, or that of its nearest base class."""
    return next(TABLE[cls] for cls in kind.__mro__ if cls in TABLE)


def metadata_of(kind: type[errors.ShaleError]) -> Mapping[str, str]:
    """Return the names in the metadata of an error, with the attributes that they show."""
    return next(_METADATA[cls] for cls in kind.__mro__ if cls in _METADATA)


def status_of(error: errors.ShaleError, *, error_id: str = "") -> status_pb2.Status:
    """Convert `error` to a status; `error_id` is that of its log line, if there is one."""
    names = metadata_of(type(error)).items()
    metadata = {name: _short(str(getattr(error, attribute))) for name, attribute in names}
    if error_id:
        metadata["error_id"] = error_id
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    return _status(row_of(type(error)).code, str(error), [info, *_advice(error)])


def status_of_bug(error_id: str) -> status_pb2.Status:
    """Make the status of an unexpected exception, with nothing but the id of its log line."""
    message = (
        f"unexpected error {error_id}: the log of the server has the details under this error_id"
    )
    info = error_details_pb2.ErrorInfo(
        reason=errors.ShaleError.reason, domain=DOMAIN, metadata={"error_id": error_id}
    )
    return _status(row_of(errors.ShaleError).code, message, [info])


def operation_error(
    status: status_pb2.Status, names: Mapping[str, str] = MappingProxyType({})
) -> kv_pb2.OperationError:
    """Convert a status to the error of an operation of a session, or of a watch.

    `names` are its `request_id` and `trace_id`, those that it has.
    """
    error = kv_pb2.OperationError(code=status.code, message=status.message)
    if names:
        error.request_id, error.trace_id = names.get("request_id", ""), names.get("trace_id", "")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            error.reason = info.reason
            error.metadata.update(info.metadata)
        elif detail.Unpack(retry):
            error.retry_delay_ms = retry.retry_delay.ToMilliseconds()
    return error


def _status(code: StatusCode, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=int(code), message=_short(message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _short(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= TEXT_BYTES_MAX:
        return encoded.decode()
    return encoded[: TEXT_BYTES_MAX - 3].decode(errors="ignore") + "..."


def _advice(error: errors.ShaleError) -> Iterator[Message]:
    if isinstance(error, errors.Overloaded):
        yield _retry(error.retry_after_ms)
    if isinstance(error, errors.Unauthenticated) and error.retry_after_ms:
        yield _retry(error.retry_after_ms)
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_short(error.field), description=_short(error.problem)
        )
        yield error_details_pb2.BadRequest(field_violations=[violation])


def _retry(after_ms: int) -> Message:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(after_ms)
    return retry


_BEFORE = f"""# Errors

Generated by `python -m shalekv.cli.reference`; a test fails when this page is not current.

Every error of a ShaleKV server carries a `google.rpc.Status` in the trailing metadata
`grpc-status-details-bin`, with a `google.rpc.ErrorInfo`: its `domain` is `{DOMAIN}`, its `reason`
is one of those below and never changes its meaning, its `metadata` says more. The message is for
people and may change.

## What a client may conclude

| what it got | was the write applied? |
|---|---|
| a reply | yes |
| an `ErrorInfo` of domain `{DOMAIN}` | as the table says: no, or unknown |
| `UNAVAILABLE` with such an `ErrorInfo` | no: it may be sent again, here or elsewhere |
| bare `UNAVAILABLE`, `CANCELLED`, `DEADLINE_EXCEEDED` | unknown |
| any other code without such an `ErrorInfo` | unknown, unless the code is `UNIMPLEMENTED` |

A bare code was made by gRPC itself, in the client, in the server, or in something between. Some
[limits](wire.md#limits) of the server are reported so: `RESOURCE_EXHAUSTED` for a message over
`message_bytes_max`, for metadata over 16 KiB, and while incomplete messages take too much memory;
and `UNIMPLEMENTED` for a method that no version has.

Unknown means that the write may be applied now, later, or never. Read the key to find out, or write
again what may be written twice.

## Reasons

"Retry" marks errors with a `google.rpc.RetryInfo`: the delay after which to try again. A
`BadRequest` names the field that was wrong.

| reason | code | applied? | metadata | meaning |
|---|---|---|---|---|
"""

# As a reason, the base class stands for exceptions without a class; its docstring does not say so.
_UNEXPECTED = "A bug in the server. Report it with what the log says under its `error_id`."

_AFTER = """
Errors for which the server or its store is to blame have an `error_id` in their metadata: the log
line of the server with the same `error_id` has the details, which clients never see.

If its call has a name or is part of a trace, an error tells both, so that operators
[find the call](observability.md#slow-calls): in the metadata `x-request-id` and `x-trace-id`, or in
`request_id` and `trace_id` of an `OperationError`.
"""


def errors_page() -> str:
    """Return the page with the table of errors, server/docs/errors.md."""
    return _BEFORE + "".join(f"| {' | '.join(row)} |\n" for row in _rows()) + _AFTER


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for kind in sorted(TABLE, key=lambda kind: (row_of(kind).code, kind.reason)):
        row = row_of(kind)
        names = [f"`{name}`" for name in metadata_of(kind)]
        if row.log:
            names.append("`error_id`")
        if issubclass(kind, errors.Overloaded | errors.Unauthenticated):
            names.append("Retry")
        applied = "no" if row.applied is Applied.NO else "unknown"
        # The meaning of a class is the first paragraph of its docstring.
        meaning = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        if kind is errors.ShaleError:
            meaning = _UNEXPECTED
        yield f"`{kind.reason}`", f"`{row.code.name}`", applied, ", ".join(names), meaning
