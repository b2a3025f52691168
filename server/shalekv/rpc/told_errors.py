"""From a gRPC error of another node back to the error that it tells of."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors
from shalekv.errors import CorruptObject, InvalidRequest, ShaleError
from shalekv.rpc.status import DOMAIN
from shalekv.write.quorum.links import LinkBroken

_DETAILS = "grpc-status-details-bin"

# Those that a text makes, by their reasons. What is not here says no more than that a node cannot
# answer now: a link that is broken.
_OF_REASON: Mapping[str, type[ShaleError]] = {
    kind.reason: kind
    for kind in (
        errors.DatabaseExists,
        errors.DatabaseMismatch,
        errors.DatabaseNotFound,
        errors.InvalidSetting,
        errors.InvalidUrl,
        errors.LogDamaged,
        errors.NotAMember,
        errors.RecordTrimmed,
    )
}
_CORRUPT: Mapping[str, type[CorruptObject]] = {
    kind.reason: kind
    for kind in (
        errors.BadChecksum,
        errors.BadMagic,
        errors.BadStructure,
        errors.CorruptObject,
        errors.Truncated,
        errors.UnsupportedVersion,
        errors.WrongObject,
    )
}


def told_error(error: grpc.aio.AioRpcError, address: str) -> ShaleError | LinkBroken:
    """The error that the node at `address` tells of."""
    status = _status_of(error)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if not detail.Unpack(info):
            detail.Unpack(bad)
    text = f"{address}: {status.message}"
    if info.domain == DOMAIN:
        kind = _OF_REASON.get(info.reason)
        if kind is not None:
            return kind(text)
        if info.reason == InvalidRequest.reason and bad.field_violations:
            violation = bad.field_violations[0]
            return InvalidRequest(violation.field, f"{address}: {violation.description}")
        corrupt = _CORRUPT.get(info.reason)
        if corrupt is not None:
            offset = int(info.metadata.get("offset", "0"))
            return corrupt(info.metadata.get("object", address), offset, text)
    return LinkBroken(f"{text} ({error.code().name})")


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata():
        if key == _DETAILS and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status(message=error.details() or "it does not answer")
