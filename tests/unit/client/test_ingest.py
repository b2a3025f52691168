"""Loads go to the writer, wherever it is, are committed once, and fail with errors that say why."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shalekv.errors import (
    Fenced,
    InvalidRequest,
    LeaseLost,
    LoadUnknown,
    MemtableFull,
    ShaleError,
    StoreUnavailable,
)
from shalekv.v1 import kv_pb2, manifest_pb2
from shalekv_client import Client, Ingested, NoWriter, RetryPolicy
from shalekv_client import InvalidRequest as RefusedRequest
from shalekv_client import LeaseLost as LostLease
from shalekv_client import LoadUnknown as UnknownLoad
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.client.cluster import cluster, until_called

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)
SSTS = [manifest_pb2.SstInfo(sstinfo_format_version=1, id=bytes(16), first_key=b"a", last_key=b"b")]
FENCED = refusing(Fenced("another took over", own_epoch=7, newer_epoch=8))


async def test_a_load_is_committed_once(server: DictServer) -> None:
    """The second call gets the number of the first, and is told so."""
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


async def test_the_writer_is_found_among_the_addresses() -> None:
    """Also when a reader is asked alone; no reader is asked to commit twice."""
    async with cluster() as running:
        async with Client(running.addresses) as client:
            assert not (await client.ingest("monday", SSTS)).already_applied
        async with Client(running.readers[0].address) as client:
            assert (await client.ingest("monday", SSTS)).already_applied
        assert running.writer.state.calls["IngestSst"] == 2
        running.readers[0].state.writer_address = ""
        async with Client(running.readers[0].address, retry=QUICK) as client:
            with pytest.raises(NoWriter):
                await client.ingest("tuesday", SSTS, timeout_ms=1_500)
    assert running.writer.state.loads.keys() == {"monday"}


@pytest.mark.parametrize("failure", [losing(), bare(grpc.StatusCode.CANCELLED), FENCED])
async def test_a_load_goes_on_at_the_next_writer(failure: object) -> None:
    """Whether the old one has committed it or not, the new one knows: it is committed once."""
    async with cluster() as running:
        async with Client(running.addresses, retry=QUICK) as client:
            await client.put(b"k", b"v")
            old = running.writer
            old.state.failures.append(failure)  # type: ignore[arg-type]
            ingest = asyncio.create_task(client.ingest("monday", SSTS))
            await until_called(old, "IngestSst")
            new = await running.take_over()
            old.state.role = kv_pb2.ROLE_READER  # it is not asked for writes any more
            old.state.epoch, old.state.writer_address = new.state.epoch, new.address
            running.tell(new)
            ingested = await ingest
        assert new.state.loads == {"monday": ingested.seq}
        assert ingested.already_applied == ("monday" in old.state.loads)


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
    """An answer that was lost, too: the load has an id."""
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
    """At once, as an error of its own kind."""
    server.state.failures.append(refusing(error))
    async with Client(server.address, retry=QUICK) as client:
        with pytest.raises(expected, match=str(error).partition(":")[0].replace("[", r"\[")):
            await client.ingest("monday", SSTS)
    assert server.state.calls["IngestSst"] == 1


async def test_what_does_not_fit_in_a_message_never_leaves(server: DictServer) -> None:
    """A load of very many files is refused here."""
    async with Client(server.address, message_bytes_max=1_000) as client:
        with pytest.raises(RefusedRequest, match="IngestSst has"):
            await client.ingest("monday", SSTS * 100)
    assert not server.state.calls["IngestSst"]
