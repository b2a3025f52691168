"""The network comes between a writer and its safekeepers: one of them, a majority, or one way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.quorum.namespaces import namespaces
from tests.e2e.quorum.uplink import uplink
from tests.kit.processes.child import Child
from tests.kit.processes.cutting import ALONE, ByProxy, ByRoutes, Cutting, Judged
from tests.kit.processes.load import Load
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import LENIENT, Cluster
from tests.kit.processes.rivals import fenced_end

DEADLINE_S = 200
WRITES = 100
# Writes wait for a majority as long as it takes: what ends them is the fence.
PATIENT = ("--quorum-timeout-ms", "3600000", *ALONE)
BY_ITS_POLL = ("--fence-poll-ms", "100")
BY_THE_MEMBERS = ("--fence-poll-ms", "3600000")  # it does not look at the manifest

BOTH = {"requests": True, "replies": True}
NO_REQUESTS = {"requests": True, "replies": False}
NO_REPLIES = {"requests": False, "replies": True}


@asynccontextmanager
async def judged(cluster: Cluster, seed: int) -> AsyncIterator[Judged]:
    """Whatever runs, ends in time."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        yield Judged(cluster, tasks, seed)


async def overtaken(
    cluster: Cluster, all_of: Judged, old: Child, cutting: Cutting, cut: dict[str, bool]
) -> tuple[Load, Child]:
    """Cut the old writer off from two of three, under load, and have another one take over.

    The load on the old one, and the new writer, which has acknowledged some.
    """
    load = all_of.load(old)
    assert await load.acknowledged(WRITES), load.reasons()
    cutting.cut([0, 1], **cut)
    began_s = time.monotonic()
    new = await cluster.serve(*ALONE, *LENIENT, create=False)
    sys.stdout.write(f"taken over after {time.monotonic() - began_s:.2f} s\n")
    acknowledged = load.acknowledged_count
    others = all_of.load(new)
    assert await others.acknowledged(WRITES), others.reasons()
    assert load.acknowledged_count == acknowledged, "acknowledged after the fence"
    await all_of.rest(others)
    return load, new


async def ends_as_fenced(load: Load, old: Child) -> None:
    """The old writer ends, and each of its clients is told so."""
    await fenced_end(old)
    await load.ended.wait()
    assert len(load.ended_by) == 6, load.reasons()
    sys.stdout.write(f"told by the old writer: {dict(load.reasons())}\n")


@pytest.mark.parametrize("cut", [BOTH, NO_REQUESTS, NO_REPLIES], ids=["both", "there", "back"])
async def test_a_writer_that_is_cut_off_acknowledges_nothing_more(
    processes: Processes, tmp_path: Path, cut: dict[str, bool]
) -> None:
    """An old writer is cut off from a majority while a new one takes over: it acknowledges nothing
    after the fence, its pending writes end as unknown, and both histories check. It learns of it
    from the manifest while it is cut off, and no packet that arrives later changes anything.
    """
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    async with uplink() as way, judged(cluster, 1) as all_of:
        old = await cluster.serve(*PATIENT, *BY_ITS_POLL, env=way.env)
        assert way.connection_count >= 3, "it does not use its way"
        load, new = await overtaken(cluster, all_of, old, ByProxy(way, cluster), cut)
        acknowledged = load.acknowledged_count
        await ends_as_fenced(load, old)
        assert load.acknowledged_count == acknowledged, "acknowledged after the fence"
        assert set(load.reasons()) == {"OUTCOME_UNKNOWN"}, load.reasons()
        way.heal()
        await all_of.end(new)


@pytest.mark.parametrize("cut", [BOTH, NO_REPLIES], ids=["both", "back"])
async def test_a_writer_that_comes_back_learns_of_its_successor(
    processes: Processes, tmp_path: Path, cut: dict[str, bool]
) -> None:
    """The same with a writer that never looks at the manifest and is cut off from all: when it is
    back, and all that was sent arrives late, it is told by the members. It may acknowledge by then
    what a majority had on disk and said so before they voted for the other one, which thus has it.
    """
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    async with uplink() as way, judged(cluster, 2) as all_of:
        old = await cluster.serve(*PATIENT, *BY_THE_MEMBERS, env=way.env)
        cutting = ByProxy(way, cluster)
        load = all_of.load(old)
        assert await load.acknowledged(WRITES), load.reasons()
        cutting.cut([0, 1, 2], **cut)
        new = await cluster.serve(*ALONE, *LENIENT, create=False)
        others = all_of.load(new)
        assert await others.acknowledged(WRITES), others.reasons()
        assert old.running, old.report()
        way.heal()
        await ends_as_fenced(load, old)
        await all_of.rest(others)
        await all_of.end(new)


async def test_a_machine_that_is_cut_off_acknowledges_nothing_more(
    processes: Processes, tmp_path: Path
) -> None:
    """The same between machines of a real network, whose packets vanish."""
    with namespaces(4) as (network, spaces):
        cluster = Cluster(processes, tmp_path)
        cluster.spaces = spaces[:3]
        cluster.addresses = [f"{network.address(space)}:7655" for space in spaces[:3]]
        await cluster.start("--insecure")
        async with judged(cluster, 3) as all_of:
            listen = ("--insecure", "--listen", f"{network.address(spaces[3])}:7654")
            old = await cluster.serve(*PATIENT, *BY_ITS_POLL, *listen, space=spaces[3])
            cutting = ByRoutes(network, cluster, spaces[3])
            load, new = await overtaken(cluster, all_of, old, cutting, BOTH)
            acknowledged = load.acknowledged_count
            await ends_as_fenced(load, old)
            assert load.acknowledged_count == acknowledged, "acknowledged after the fence"
            assert set(load.reasons()) == {"OUTCOME_UNKNOWN"}, load.reasons()
            cutting.heal()
            await all_of.end(new)


async def test_a_safekeeper_is_cut_off_and_comes_back(processes: Processes, tmp_path: Path) -> None:
    """No write fails while one of three is cut off, in both directions or in one; when it is back
    it gets what it lacks, and makes up the majority without the one that is killed then.
    """
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    async with uplink() as way, judged(cluster, 4) as all_of:
        writer = await cluster.serve(*ALONE, *LENIENT, "--reply-timeout-ms", "1000", env=way.env)
        load = all_of.load(writer)
        for cut in (BOTH, NO_REQUESTS, NO_REPLIES):
            assert await load.acknowledged(WRITES), load.reasons()
            way.cut([cluster.addresses[0]], **cut)
            assert await load.acknowledged(3 * WRITES), load.reasons()
            way.heal()
        await cluster.kill([1])
        assert await load.acknowledged(WRITES), load.reasons()
        await all_of.rest(load)
        await all_of.end(writer)


async def test_a_slow_link_holds_up_nobody(processes: Processes, tmp_path: Path) -> None:
    """With a slow link to one of three nobody waits for it; when it is needed, it is waited for."""
    cluster = Cluster(processes, tmp_path)
    await cluster.start()
    async with uplink() as way, judged(cluster, 5) as all_of:
        writer = await cluster.serve(*ALONE, *LENIENT, env=way.env)
        load = all_of.load(writer)
        for delay_ms in (0, 100):
            way.slow([cluster.addresses[0]], delay_ms)
            began_s = time.monotonic()
            assert await load.acknowledged(3 * WRITES), load.reasons()
            took_s = time.monotonic() - began_s
            sys.stdout.write(f"{3 * WRITES} writes, one link by {delay_ms} ms: {took_s:.2f} s\n")
        await cluster.kill([1])
        assert await load.acknowledged(WRITES), load.reasons()
        await all_of.rest(load)
        await all_of.end(writer)
