"""Every call of the client does what its documentation says, over a real socket."""

from __future__ import annotations

import pytest

from shalekv.v1 import admin_pb2
from shalekv_client import (
    Add,
    Batch,
    Change,
    Client,
    Delete,
    DeleteRange,
    Put,
    RequestKind,
)
from tests.kit.serving.dict_server import EPOCH, DictServer


async def filled(client: Client, count: int) -> list[bytes]:
    """Puts keys k00, k01, ... whose values are their numbers; returns the keys."""
    keys = [b"k%02d" % number for number in range(count)]
    await client.write(Put(key, key[1:]) for key in keys)
    return keys


async def test_batch_counts_what_it_was_made_from() -> None:
    """A batch made from changes equals one to which they were added."""
    changes: list[Change] = [
        Put(b"a", b"12", ttl_ms=5),
        Delete(b"b"),
        DeleteRange(b"c", b"d"),
        DeleteRange(prefix=b"ef"),
        Add(b"n", -3),
    ]
    batch = Batch().put(b"a", b"12", ttl_ms=5).delete(b"b")
    batch.delete_range(start=b"c", end=b"d").delete_range(prefix=b"ef").add(b"n", -3)
    assert list(Batch(changes)) == changes == list(batch)
    assert Batch(changes).size_bytes == batch.size_bytes == 9


async def test_scan_can_be_read_by_messages(client: Client) -> None:
    """`read` returns the entries of one message, and none at the end."""
    await filled(client, 7)
    scan = client.scan()
    assert (await anext(scan)).key == b"k00"
    assert [len(await scan.read()) for _ in range(4)] == [2, 3, 1, 0]


async def test_status_is_typed(client: Client) -> None:
    """The status has process, writer, memtable and manifest; parts that are not set are None."""
    await filled(client, 3)
    status = await client.status()
    assert (status.version, status.url, status.uptime_ms) == ("0.0.7", "memory://dict", 90_061_000)
    assert (status.view.epoch, status.view.seq, status.memtable.keys) == (EPOCH, 1, 3)
    assert status.writer is not None
    assert status.writer.commits == 1
    assert status.manifest.wal_id_last_compacted is None


async def test_stats_are_typed(client: Client, server: DictServer) -> None:
    """Every kind of request has a number; kinds that a newer server adds are ignored."""
    process = admin_pb2.ProcessRequests(role="collector", uptime_ms=60_000)
    process.requests.add(kind=admin_pb2.REQUEST_KIND_LIST, requests=7)
    process.requests.add(kind=99, requests=1)  # of a newer server
    reply = admin_pb2.StatsReply(url="s3://b", endpoint="here:9", records="sqlite")
    reply.processes.append(process)
    server.state.stats.append(reply)
    stats = await client.stats()
    assert (stats.view.epoch, stats.url, stats.endpoint) == (EPOCH, "s3://b", "here:9")
    assert stats.records == "sqlite"
    (collector,) = stats.processes
    assert (collector.role, collector.uptime_ms) == ("collector", 60_000)
    assert collector.requests == dict.fromkeys(RequestKind, 0) | {RequestKind.LIST: 7}


async def test_large_messages_pass(client: Client) -> None:
    """Values above gRPC's usual limit of 4 MiB are sent and received."""
    value = b"x" * (5 * 1024 * 1024)
    await client.put(b"large", value)
    found = await client.get(b"large")
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "localhost:",
        ":7654",
        "localhost:0",
        "localhost:65536",
        "http://x:1",
        "::1:7",
    ],
)
async def test_address_must_be_host_and_port(address: str) -> None:
    """An address that is not HOST:PORT is refused at once; gRPC would accept some as
    another one.
    """
    with pytest.raises(ValueError, match="address is HOST:PORT"):
        Client(address)


async def test_timeout_must_be_positive(client: Client) -> None:
    """A call with a timeout of 0 is refused before it is sent."""
    with pytest.raises(ValueError, match="timeout_ms"):
        await client.get(b"k", timeout_ms=0)


def test_clients_belong_to_a_running_loop() -> None:
    """A client that is created without a running event loop is refused."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        Client("127.0.0.1:7654")
