"""The table from errors to statuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors
from shalekv.rpc.status import (
    DOMAIN,
    TABLE,
    Applied,
    metadata_of,
    operation_error,
    row_of,
    status_of,
    status_of_bug,
)
from shalekv_wire.status import StatusCode


def _classes(
    kind: type[errors.ShaleError] = errors.ShaleError,
) -> Iterator[type[errors.ShaleError]]:
    """This error and its subclasses in the package of the server: others may have their own."""
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("shalekv."):
            yield from _classes(below)


def _example(kind: type[errors.ShaleError]) -> errors.ShaleError:
    if issubclass(kind, errors.InvalidRequest):
        return kind("changes[3].put.key", "is empty")
    if issubclass(kind, errors.QuotaExceeded):
        return kind("too much", retry_after_ms=2_500, quota="calls_per_s")
    if issubclass(kind, errors.Overloaded):
        return kind("too much", retry_after_ms=2_500)
    if issubclass(kind, errors.Fenced | errors.Superseded):
        return kind("taken over", own_epoch=3, newer_epoch=5)
    if issubclass(kind, errors.CorruptObject):
        return kind("wal/00000000000000000001.sst", 17, "does not match")
    if issubclass(kind, errors.StoreError):
        return kind("file:///db", "create", "wal/00000000000000000001.sst", "no space left")
    return EXAMPLES[kind] if kind in EXAMPLES else kind("what happened")


EXAMPLES: Mapping[type[errors.ShaleError], errors.ShaleError] = {
    errors.ConditionFailed: errors.ConditionFailed(
        "the key has a value", condition="absent", found_seq=7
    ),
    errors.NotTheWriter: errors.NotTheWriter("KV.Put", writer_address="there:7654"),
    errors.PermissionDenied: errors.PermissionDenied("it is not allowed", verb="read"),
    errors.StandingBy: errors.StandingBy("another is elected", writer_address="there:7654"),
    errors.TooStale: errors.TooStale(staleness_ms=700, max_staleness_ms=500),
    errors.SeqNotReached: errors.SeqNotReached(min_seq=9, seq=7),
    errors.WalCollected: errors.WalCollected(start_seq=3, oldest_seq=5),
    errors.WalUnprotected: errors.WalUnprotected(wal_id_min=3, first_wal_id=5),
    errors.WatchTooSlow: errors.WatchTooSlow("it was not taken", next_seq=8),
}


def _info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


ALL = list(_classes())


def test_every_error_has_a_row_of_its_own() -> None:
    """The table has exactly the classes of errors."""
    assert set(ALL) == set(TABLE)


def test_reasons_are_unique() -> None:
    """A reason identifies the class of an error."""
    assert [r for r, count in Counter(kind.reason for kind in ALL).items() if count > 1] == []


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_its_reason(kind: type[errors.ShaleError]) -> None:
    """A status has the code of the table, our domain, the reason, and all of its metadata."""
    error = _example(kind)
    status = status_of(error, error_id="abc")
    info = _info(status)
    assert status.code == row_of(kind).code
    assert (info.domain, info.reason) == (DOMAIN, error.reason)
    assert status.message == str(error)
    assert dict(info.metadata) == {"error_id": "abc"} | {
        name: str(getattr(error, attribute)) for name, attribute in metadata_of(kind).items()
    }


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_operation_gets_the_error_of_a_call(kind: type[errors.ShaleError]) -> None:
    """The error of an operation has code, message, reason, metadata and advice of the status."""
    status = status_of(_example(kind), error_id="abc")
    reported = operation_error(status)
    info = _info(status)
    assert (reported.code, reported.message) == (status.code, status.message)
    assert (reported.reason, reported.metadata) == (info.reason, info.metadata)
    assert reported.retry_delay_ms == (2_500 if issubclass(kind, errors.Overloaded) else 0)


def test_a_peer_that_has_to_wait_is_told_how_long() -> None:
    """UNAUTHENTICATED has advice about a retry if credentials are not looked at for a while."""
    waiting = errors.Unauthenticated("too often", retry_after_ms=2_500)
    assert operation_error(status_of(waiting)).retry_delay_ms == 2_500
    assert len(status_of(errors.Unauthenticated("not known")).details) == 1


def test_unavailable_means_not_applied() -> None:
    """No error that may follow the upload of a write is UNAVAILABLE."""
    unavailable = {k for k, row in TABLE.items() if row.code is StatusCode.UNAVAILABLE}
    assert unavailable == {
        *_classes(errors.Stopping),
        errors.QuorumUnavailable,
        errors.IssuerUnavailable,
        errors.PolicyUnknown,
        errors.StoreUnavailable,
    }
    assert {TABLE[kind].applied for kind in unavailable} == {Applied.NO}


def test_status_of_a_bug_has_an_id_and_no_details() -> None:
    """The status of an unexpected exception is INTERNAL, with an id and none of its text."""
    status = status_of_bug("c0ffee")
    assert status.code == StatusCode.INTERNAL
    assert dict(_info(status).metadata) == {"error_id": "c0ffee"}
    assert "c0ffee" in status.message


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_long_texts_fit_into_metadata(character: str) -> None:
    """No status exceeds the 8 KiB that clients accept, for texts of any length and script."""
    long = character * 100_000
    for error in (
        errors.InvalidRequest(long, long),
        errors.BadChecksum(long, 7, long),
        errors.StoreUnavailable(long, long, long, long),
    ):
        status = status_of(error, error_id="abc")
        percent_encoded = 3 * len(status.message.encode())
        assert status.message.endswith("...")
        assert percent_encoded + len(status.SerializeToString()) * 4 / 3 < 8 * 1024
