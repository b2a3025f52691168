"""The election in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from random import SystemRandom

import pytest

from shalekv.clock import LoopClock
from shalekv.roles.electors.etcd import EtcdElector
from shalekv.roles.electors.etcd_client import EtcdClient, EtcdSilent
from shalekv.roles.electors.place import EtcdAddress
from shalekv.runtime import Runtime, ThreadWorkers
from tests.servers.process import free_port
from tests.servers.record_stores import EtcdServer

TTL_MS = 6_000
LASTING_TTL_MS = 9_000  # so long that whoever waits for the machine renews in time
DEADLINE_S = 60
pytestmark = pytest.mark.timeout(900)  # the first test may have to install the server
_numbers = count()


def address_of(etcd: EtcdServer) -> EtcdAddress:
    host, _, port = etcd.address.rpartition(":")
    return EtcdAddress(host, int(port))


@asynccontextmanager
async def electors(
    etcd: EtcdServer,
    key: str,
    *names: str,
    before: tuple[EtcdAddress, ...] = (),
    ttl_ms: int = TTL_MS,
) -> AsyncIterator[tuple[list[EtcdElector], dict[str, str]]]:
    """Electors of these names, and what each was told last; `before` are servers asked first."""
    told: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        made = []
        for name in names:
            client = EtcdClient((*before, address_of(etcd)), key, timeout_ms=5_000)
            stack.callback(client.close)
            runtime = Runtime(LoopClock(), SystemRandom(), ThreadWorkers(1))
            hear = partial(told.__setitem__, name)
            made.append(EtcdElector(client, runtime, holder=name, ttl_ms=ttl_ms, told=hear))
        async with asyncio.timeout(DEADLINE_S):
            yield made, told


def new_key() -> str:
    return f"unit/{next(_numbers)}"


async def test_one_of_several_is_elected(etcd_server: EtcdServer) -> None:
    """The others wait, and are told who it is; it stays elected longer than a lease lasts."""
    async with (
        electors(etcd_server, new_key(), "a", "b", "c", ttl_ms=LASTING_TTL_MS) as (made, told),
        asyncio.TaskGroup() as tasks,
    ):
        campaigns = [tasks.create_task(each.campaign()) for each in made]
        done, others = await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        keeping = tasks.create_task(next(iter(done)).result().keep())
        await asyncio.wait(others, timeout=1.5 * LASTING_TTL_MS / 1_000)
        assert not any(each.done() for each in [*others, keeping])
        assert len(set(told.values())) == 1
        for each in [*others, keeping]:
            each.cancel()


async def test_a_lease_that_is_not_renewed_is_taken(etcd_server: EtcdServer) -> None:
    """When its holder is gone, another one is elected; the first then knows that it is over."""
    async with electors(etcd_server, new_key(), "a", "b") as ((first, second), told):
        tenure = await first.campaign()
        await (await second.campaign()).resign()
        assert told == {"a": "a", "b": "b"}
        assert "the lease could not be renewed" in await tenure.keep()


async def test_a_release_hands_over(etcd_server: EtcdServer) -> None:
    """A lease that was released is there for others, and renewed no more."""
    async with electors(etcd_server, new_key(), "a", "b") as ((first, second), _):
        tenure = await first.campaign()
        await tenure.resign()
        other = await second.campaign()
        assert await tenure.keep() == "the lease has ended in etcd"
        await other.resign()


async def test_a_key_that_was_deleted_is_lost(etcd_server: EtcdServer) -> None:
    """Whoever deletes the key by hand, ends the tenure."""
    key = new_key()
    async with electors(etcd_server, key, "a") as ((elector,), _):
        tenure = await elector.campaign()
        etcd_server.delete(key)
        assert await tenure.keep() == "somebody has deleted the lease"


async def test_another_server_is_asked_when_one_is_gone(etcd_server: EtcdServer) -> None:
    """Of several servers one that answers is enough."""
    gone = EtcdAddress("127.0.0.1", free_port())
    async with electors(etcd_server, new_key(), "a", before=(gone,)) as ((elector,), _):
        await (await elector.campaign()).resign()


async def test_silence_is_told_and_waited_out(etcd_server: EtcdServer) -> None:
    """A client that reaches nobody says so, and a candidate goes on asking."""
    gone = EtcdServer(f"127.0.0.1:{free_port()}")
    client = EtcdClient([address_of(gone)], "key", timeout_ms=500)
    with pytest.raises(EtcdSilent, match=f"none of {gone.address} has answered"):
        await client.holder()
    client.close()
    async with electors(gone, new_key(), "a") as ((elector,), told):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(elector.campaign(), timeout=1.0)
        assert told == {}
    assert etcd_server.address != gone.address
