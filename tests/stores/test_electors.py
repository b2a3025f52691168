"""Properties of every elector: in the bucket, in a real etcd, at an API server of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.server.election.elector import EtcdAddress
from shalekv.server.election.etcd import EtcdClient, EtcdUnavailable
from tests.servers.kubernetes import kubernetes_api
from tests.servers.process import free_port
from tests.servers.record_stores import EtcdServer
from tests.stores.elections import Election, in_bucket, in_etcd, in_kubernetes

BUCKET, ETCD, KUBERNETES = "bucket", "etcd", "kubernetes"
TIMEOUT_MS = 500
pytestmark = pytest.mark.timeout(900)  # the first test may have to install etcd
with_a_server = pytest.mark.parametrize("election", [ETCD, KUBERNETES], indirect=True)


@pytest.fixture(params=[BUCKET, ETCD, KUBERNETES])
async def election(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Election]:
    """The place of the election."""
    match request.param:
        case "bucket":
            yield in_bucket()
        case "etcd":
            yield in_etcd(request.getfixturevalue("etcd_server"))
        case _:
            async with kubernetes_api(tmp_path) as api:
                yield in_kubernetes(api)


async def test_one_of_several_is_elected(election: Election) -> None:
    """The others wait, and are notified of its name; it stays elected longer than a lease lasts."""
    ttl_ms = election.lasting_ttl_ms
    async with (
        election.electors("a", "b", "c", ttl_ms=ttl_ms) as (made, reported),
        asyncio.TaskGroup() as tasks,
    ):
        campaigns = [tasks.create_task(each.campaign()) for each in made]
        done, others = await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        keeping = tasks.create_task(next(iter(done)).result().keep())
        await asyncio.wait(others, timeout=1.5 * ttl_ms / 1_000)
        assert not any(each.done() for each in [*others, keeping])
        assert len(reported) == 3
        assert len(set(reported.values())) == 1
        for each in [*others, keeping]:
            each.cancel()


async def test_a_lease_that_is_not_renewed_is_taken(election: Election) -> None:
    """When its holder is gone, another one is elected; the first then knows that it is over."""
    async with election.electors("a", "b") as ((first, second), reported):
        term = await first.campaign()
        await (await second.campaign()).resign()
        assert reported == {"a": "a", "b": "b"}
        assert "the lease could not be renewed" in await term.keep()


async def test_a_release_hands_over(election: Election) -> None:
    """A lease that was released is there for others, and renewed no more."""
    async with election.electors("a", "b") as ((first, second), _):
        term = await first.campaign()
        await term.resign()
        other = await second.campaign()
        assert await term.keep() == election.taken
        await other.resign()


async def test_a_release_is_not_waited_for(election: Election) -> None:
    """A candidate is elected after a release without waiting for the lease to lapse."""
    async with election.electors("a", "b", ttl_ms=600_000) as ((first, second), _):
        await (await first.campaign()).resign()
        await (await second.campaign()).resign()


@with_a_server
async def test_a_lease_that_was_deleted_is_lost(election: Election) -> None:
    """Deletion of the lease by hand ends the term; then another one is elected."""
    async with election.electors("a", "b") as ((first, second), _):
        term = await first.campaign()
        election.delete()
        assert await term.keep() == "somebody has deleted the lease"
        await (await second.campaign()).resign()


@with_a_server
async def test_silence_is_waited_out(election: Election) -> None:
    """A candidate that reaches no server keeps trying."""
    port = free_port()
    silent = replace(
        election,
        elect=f"etcd://127.0.0.1:{port}/key" if election.elect.startswith(ETCD) else election.elect,
        environment={**election.environment, "KUBERNETES_SERVICE_PORT": str(port)},
    )
    async with silent.electors("a") as ((elector,), reported):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(elector.campaign(), timeout=1.0)
        assert reported == {}


async def test_another_server_is_asked_when_one_is_gone(etcd_server: EtcdServer) -> None:
    """An election needs only one of several etcd servers."""
    election = in_etcd(etcd_server)
    servers = f"etcd://127.0.0.1:{free_port()},"
    several = replace(election, elect=election.elect.replace("etcd://", servers))
    async with several.electors("a") as ((elector,), _):
        await (await elector.campaign()).resign()


async def test_silence_of_etcd_is_reported() -> None:
    """The error of a client that reaches no server names those it has tried."""
    port = free_port()
    client = EtcdClient([EtcdAddress("127.0.0.1", port)], "key", timeout_ms=TIMEOUT_MS)
    with pytest.raises(EtcdUnavailable, match=f"none of 127.0.0.1:{port} has answered"):
        await client.holder()
    client.close()
