"""Reads go to readers by the policy of the client, and to other servers when those fail."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shalekv.errors import QueueFull, Stopping
from shalekv.v1 import kv_pb2
from shalekv_client import Client, OutcomeUnknown, ReadLevel, RetryPolicy, SyncClient, TooStale
from shalekv_client.operations import GET
from shalekv_client.policies import Destination
from shalekv_client.routing import endpoints, fleet
from tests.kit.serving.dict_server import Failure, bare, received, refusing, silent
from tests.unit.client.cluster import Cluster, cluster

QUICK = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=20)
HOURS_MS = 3_600_000

together = pytest.mark.parametrize("coalesce", [True, False], ids=["together", "alone"])


def gets(running: Cluster) -> list[int]:
    """Return how many gets each server was asked for, the writer last."""
    return [member.state.calls["Get"] for member in (*running.readers, running.writer)]


async def fill(running: Cluster) -> None:
    """Put a key with a temporary client."""
    async with Client(running.writer.address) as client:
        await client.put(b"k", b"v")


async def test_writer_policy_reads_at_the_writer() -> None:
    """With the policy `writer` no reader is asked, even if only a reader's address is given."""
    async with cluster() as running:
        await fill(running)
        for addresses in (running.addresses, running.readers[0].address):
            async with Client(addresses, reads="writer") as client:
                assert (await client.get(b"k")) is not None
                assert await client.batch_get([b"x"]) == [None]
        assert gets(running) == [0, 0, 2]


@together
@pytest.mark.parametrize(
    "how",
    [
        bare(grpc.StatusCode.UNAVAILABLE),
        refusing(Stopping("stopping")),
        refusing(QueueFull("full", retry_after_ms=HOURS_MS)),
        silent(),
    ],
    ids=["lost", "stopping", "full", "silent"],
)
async def test_read_goes_on_at_another_server(how: Failure, *, coalesce: bool) -> None:
    """A reader that does not serve causes no error, and is avoided afterwards."""
    async with cluster() as running:
        await fill(running)
        for reader in running.readers:
            reader.state.failures.append(how)
        async with Client(running.addresses, coalesce=coalesce, replica_wait_ms=60) as client:
            await client.put(b"other", b"")
            assert (await client.get(b"k")) is not None
            assert await client.batch_get([b"x"]) == [None]
        assert gets(running) == [1, 1, 1]


@pytest.mark.parametrize(
    "how", [bare(grpc.StatusCode.UNAVAILABLE), silent()], ids=["lost", "silent"]
)
async def test_call_of_any_server_that_may_be_done_is_not_repeated(how: Failure) -> None:
    """The first server that is asked for a change, as of snapshots, is the only one."""
    async with cluster() as running:
        for reader in running.readers:
            reader.state.failures.append(how)
        async with Client(running.addresses, replica_wait_ms=10) as client:
            with pytest.raises(OutcomeUnknown):
                await client.fleet.unary(
                    GET.method,
                    kv_pb2.GetRequest(key=b"k"),
                    destination=Destination.BY_POLICY,
                    is_repeatable=False,
                    timeout_ms=1_000,
                )
        assert sum(gets(running)) == 1


async def test_server_that_hangs_costs_one_read() -> None:
    """A reader that hangs is asked for its status repeatedly before it is read again."""
    async with cluster() as running:
        await fill(running)
        hung = running.readers[0]
        hung.state.failures.extend([silent()] * 500)
        hung.state.status_is_silent = True
        async with Client(running.addresses, replica_wait_ms=30) as client:
            while hung.state.statuses < 2:  # it is passed over for longer than a status may take
                assert (await client.get(b"k")) is not None
            assert hung.state.calls["Get"] == 1
            hung.state.status_is_silent = False
            hung.state.failures.clear()
            while hung.state.calls["Get"] == 1:
                assert (await client.get(b"k")) is not None


async def test_closing_does_not_wait_for_a_server_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing cancels a request for the status that is still open."""
    async with cluster(readers=1) as running:
        await fill(running)
        (hung,) = running.readers
        hung.state.failures.append(bare(grpc.StatusCode.UNAVAILABLE))
        hung.state.status_is_silent = True
        monkeypatch.setattr(endpoints, "AVOID_INITIAL_S", 0.0)
        monkeypatch.setattr(fleet, "PROBE_MS", HOURS_MS)
        async with Client(running.addresses) as client, asyncio.timeout(10.0):
            while not hung.state.statuses:
                assert (await client.get(b"k")) is not None
            await client.close()


async def test_reader_that_lags_costs_one_read() -> None:
    """A reader that was behind is read again once its status has reached the required seq."""
    async with cluster() as running:
        behind = running.readers[0]
        behind.state.lag()
        async with Client(running.addresses, replica_wait_ms=30) as client:
            await client.put(b"k", b"v")
            statuses = behind.state.statuses
            while behind.state.statuses < statuses + 2:
                assert (await client.get(b"k")) is not None
            assert behind.state.calls["Get"] <= 1
            running.tell(running.writer)
            behind.state.unmet = None
            while behind.state.calls["Get"] < 3:
                assert (await client.get(b"k")) is not None


@pytest.mark.parametrize("level", [ReadLevel.LINEARIZABLE, ReadLevel.UNCOMMITTED])
async def test_levels_of_the_writer_are_read_there(level: ReadLevel) -> None:
    """LINEARIZABLE and UNCOMMITTED reads and scans go to the writer with any policy."""
    async with cluster() as running:
        await fill(running)
        async with Client(running.addresses) as client:
            assert (await client.get(b"k", read_level=level)) is not None
            assert len(await client.batch_get([b"k"], read_level=level)) == 1
            assert [entry.key async for entry in client.scan(read_level=level)] == [b"k"]
        async with Client(running.readers[0].address) as client:
            assert (await client.get(b"k", read_level=level)) is not None
        assert gets(running)[1:] == [0, 2]
        assert [len(member.state.scan_headers) for member in running.readers] == [0, 0]


async def test_a_staleness_bound_falls_through_to_a_fresh_server() -> None:
    """When a reader is older than a read allows, another reader is asked, then the writer."""
    async with cluster() as running:
        await fill(running)
        first, second = running.readers
        first.state.staleness_ms = second.state.staleness_ms = 500
        async with Client(running.addresses, max_staleness_ms=100) as client:
            assert (await client.get(b"k")) is not None
            assert gets(running) == [1, 1, 1]
            second.state.staleness_ms = 0
            entries = [entry async for entry in client.scan(max_staleness_ms=99)]
            assert len(entries) == 1
            assert (await client.get(b"k", max_staleness_ms=600)) is not None
        (bound, *_) = {header.max_staleness_ms for header in second.state.scan_headers} or {99}
        assert bound == 99


@together
async def test_slow_reader_is_hedged(*, coalesce: bool) -> None:
    """A get without an answer for `hedge_ms` is sent to a second server, whose answer counts."""
    async with cluster() as running:
        await fill(running)
        running.readers[0].state.failures.append(silent())
        async with Client(
            running.addresses, coalesce=coalesce, hedge_ms=1_000, replica_wait_ms=HOURS_MS
        ) as client:
            await client.put(b"k", b"v")
            for _ in range(2):
                assert (await client.get(b"k")) is not None
        assert sum(gets(running)) == 3


async def test_only_gets_are_hedged() -> None:
    """Writes, and reads that only the writer answers, are sent once however slow it is."""
    async with cluster() as running, Client(running.addresses, hedge_ms=1) as client:
        await client.put(b"k", b"v")
        writer = running.writer
        writer.state.answering.clear()
        level = ReadLevel.LINEARIZABLE
        calls = [client.put(b"k", b"w"), client.get(b"k", read_level=level)]
        async with asyncio.TaskGroup() as tasks:
            under_way = [tasks.create_task(call) for call in calls]
            await received(writer, 3)
            done, _ = await asyncio.wait(under_way, timeout=0.05)  # fifty times hedge_ms
            assert not done
            writer.state.answering.set()
        assert (writer.state.calls["Put"], gets(running)) == (2, [0, 0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reads": "nobody"}, "nobody"),
        ({"consistency": "strong"}, "strong"),
        ({"hedge_ms": 0}, "hedge_ms"),
        ({"replica_wait_ms": -1}, "replica_wait_ms"),
        ({"token": "x"}, "not a session token"),
    ],
)
async def test_options_are_checked(options: dict[str, object], message: str) -> None:
    """An invalid option is refused at once, by name."""
    with pytest.raises(ValueError, match=message):
        Client("127.0.0.1:1", **options)  # type: ignore[arg-type] # one table for all


@pytest.mark.parametrize("addresses", [[], "", "a:1,", ["a:1", "b"]])
async def test_every_address_must_be_one(addresses: list[str] | str) -> None:
    """Each address of a list is checked, and there must be at least one."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client(addresses)


async def test_staleness_bound_that_nobody_meets_is_an_error() -> None:
    """When no server is fresh enough, the read raises what the readers answered."""
    async with cluster() as running:
        for reader in running.readers:
            reader.state.staleness_ms = 500
        await running.writer.stop()
        async with Client(running.addresses, retry=QUICK) as client:
            with pytest.raises(TooStale) as caught:
                await client.get(b"k", max_staleness_ms=100, timeout_ms=1_500)
        assert caught.value.staleness_ms == 500


async def test_threads_read_as_tasks_do() -> None:
    """The client for threads accepts several addresses and the same options."""
    async with cluster() as running:
        addresses = ",".join(running.addresses)

        def work() -> None:
            with SyncClient(addresses, reads="any", hedge_ms=500, max_staleness_ms=5) as client:
                assert client.addresses == tuple(running.addresses)
                assert client.put(b"k", b"v").seq == 1
                assert client.get(b"k") is not None
                token = client.token
                assert token is not None
            with SyncClient(addresses, token=str(token), consistency="none") as other:
                other.advance(token)
                assert other.token == token

        await asyncio.to_thread(work)
