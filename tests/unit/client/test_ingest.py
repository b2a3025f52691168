"""Loads go to the writer at any address, are committed once, and fail with precise errors."""

from __future__ import annotations

import grpc
import pytest

from shalekv.errors import (
    InvalidRequest,
    LeaseLost,
    LoadUnknown,
    MemtableFull,
    ShaleError,
    StoreUnavailable,
)
from shalekv.v1 import manifest_pb2
from shalekv_client import Client, Ingested, RetryPolicy
from shalekv_client import InvalidRequest as RefusedRequest
from shalekv_client import LeaseLost as LostLease
from shalekv_client import LoadUnknown as UnknownLoad
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)
SSTS = [manifest_pb2.SstInfo(sstinfo_format_version=1, id=bytes(16), first_key=b"a", last_key=b"b")]


async def test_a_load_is_committed_once(server: DictServer) -> None:
    """The second call returns the number of the first, and `already_applied`."""
    async with Client(server.address) as client:
        await client.put(b"k", b"v")
        assert await client.ingest("monday", SSTS) == Ingested(2, 2, already_applied=False)
        assert client.token is not None
        assert client.token.seq == 2
        await client.put(b"k", b"v")
        assert await client.ingest("monday", iter(SSTS)) == Ingested(2, None, already_applied=True)
        assert client.token.seq == 3
    [first, second] = [each for each in server.state.requests if hasattr(each, "load_id")]
    assert first == second
    assert (first.load_id, [*first.ssts], first.header.idempotency_key) == ("monday", SSTS, b"")


@pytest.mark.parametrize(
    "failure",
    [
        losing(),
        bare(grpc.StatusCode.UNAVAILABLE),
        refusing(MemtableFull("the compactor is behind", retry_after_ms=1)),
        refusing(StoreUnavailable("x", "get", "y", "503")),
    ],
)
async def test_what_may_pass_is_repeated(server: DictServer, failure: object) -> None:
    """A load is repeated after transient errors and lost answers, since it has an id."""
    server.state.failures.extend([failure, failure])  # type: ignore[list-item]
    async with Client(server.address, retry=QUICK) as client:
        assert (await client.ingest("monday", SSTS)).seq == 1
    assert server.state.calls["IngestSst"] == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("ssts[0]", "is missing"), RefusedRequest),
        (LeaseLost("too late"), LostLease),
        (LoadUnknown("forgotten"), UnknownLoad),
    ],
)
async def test_what_does_not_pass_is_raised(
    server: DictServer, error: ShaleError, expected: type[Exception]
) -> None:
    """Permanent errors are raised at once, with a class of their own."""
    server.state.failures.append(refusing(error))
    async with Client(server.address, retry=QUICK) as client:
        with pytest.raises(expected, match=str(error).partition(":")[0].replace("[", r"\[")):
            await client.ingest("monday", SSTS)
    assert server.state.calls["IngestSst"] == 1


async def test_what_does_not_fit_in_a_message_never_leaves(server: DictServer) -> None:
    """A load of too many files, or with a timeout of 0, is refused without being sent."""
    async with Client(server.address, message_bytes_max=1_000) as client:
        with pytest.raises(RefusedRequest, match="IngestSst has"):
            await client.ingest("monday", SSTS * 100)
        with pytest.raises(ValueError, match="timeout_ms must be positive"):
            await client.ingest("monday", SSTS, timeout_ms=0)
    assert not server.state.calls["IngestSst"]
