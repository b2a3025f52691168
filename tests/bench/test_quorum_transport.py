"""Savings and cost of a chain of safekeepers: bytes sent by the writer, and commit latency.

Five safekeepers are processes on this machine, which share its processors and its disk with the
writer here. So the latencies of the two ways can be compared with each other, and with nothing
else; nothing is asserted about time. Copies of records are counted.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median, quantiles

import pytest

from shalekv.clock import LoopClock
from shalekv.format.quorum_messages import propose_request
from shalekv.protocol.quorum_records import Append, ToAcceptor, ToProposer
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.runtime import Runtime
from shalekv.settings import KIB, QuorumSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import DatabasePlace, Link
from tests.bench.sizes import sized
from tests.kit.constants import constants
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.processes import Processes
from tests.kit.quorum.log import GRACE_MS, Writing

pytestmark = pytest.mark.timeout(600)

MEMBERS = 5
ROUNDS = sized(5, 1)
WRITES = sized(200, 10)
PATIENT = {"shalekv.write.quorum.peer:CHAIN_TIMEOUT_MS": 600_000}  # on a busy machine
DEADLINE_S = 60


class CountedLink:
    """A stream whose messages are kept, to be counted when nothing is measured."""

    def __init__(self, link: Link, sent: list[ToAcceptor]) -> None:
        self._link = link
        self._sent = sent

    async def send(self, message: ToAcceptor) -> None:
        self._sent.append(message)
        await self._link.send(message)

    async def receive(self) -> ToProposer:
        return await self._link.receive()

    async def close(self) -> None:
        await self._link.close()


class CountingLinks:
    """The way of a writer to all safekeepers."""

    def __init__(self) -> None:
        self._links = GrpcLinks()
        self.sent: list[ToAcceptor] = []
        self.fetch, self.tail = self._links.fetch, self._links.tail
        self.admit, self.retire = self._links.admit, self._links.retire
        self.status, self.close = self._links.status, self._links.close

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        return CountedLink(await self._links.connect(address, place), self.sent)

    @property
    def appends(self) -> list[Append]:
        return [message for message in self.sent if isinstance(message, Append)]

    @property
    def sent_bytes(self) -> int:
        return sum(propose_request(message).ByteSize() for message in self.sent)


@asynccontextmanager
async def writing(
    url: str, runtime: Runtime, way: str
) -> AsyncIterator[tuple[Writing, CountingLinks]]:
    """A writer in this process that sends so; every member follows it."""
    links = CountingLinks()
    store = open_store(url, runtime, StoreSettings())
    quorum = QuorumSettings.model_validate({"safekeeper_transport": way})
    settings = WriterSettings(flush_interval_ms=0)
    cas = CasStore(store, runtime, StoreSettings())
    with constants(PATIENT):
        opened = await open_log(cas, settings, address="here:1", links=links, quorum=quorum)
    it = Writing(opened, links)  # type: ignore[arg-type] # it wants those of a test in one process
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(it.engine.run(stop_grace_ms=GRACE_MS))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await stand(it, links, way)
            yield it, links
        finally:
            it.engine.close()
            await running
    await links.close()
    await store.close()


async def stand(it: Writing, links: CountingLinks, way: str) -> None:
    """Write until all members have everything, in a chain if there is to be one."""
    while True:
        await it.put(b"warm")
        await everywhere(it)
        if way == "direct" or len(links.appends[-1].relays) == MEMBERS - 1:
            return


async def everywhere(it: Writing) -> None:
    while True:
        report = it.slots.report()
        if all(member.flushed_lsn >= report.last_lsn for member in report.members):
            return
        await LoopClock().sleep_ms(1)


@pytest.mark.parametrize("value_bytes", [100, 16 * KIB])
async def test_bytes_and_latency_of_a_chain(tmp_path: Path, value_bytes: int) -> None:
    """Directly each record leaves the writer five times, by a chain once."""
    latencies_ms: dict[str, list[float]] = {"direct": [], "chain": []}
    sent_bytes = {"direct": 0, "chain": 0}
    copies = {"direct": 0, "chain": 0}
    value = Random(value_bytes).randbytes(value_bytes)
    with Processes() as processes, real_runtime() as runtime:
        cluster = await Cluster.started(processes, tmp_path, count=MEMBERS)
        assert await (await cluster.serve()).stop() == 0
        for _ in range(ROUNDS):
            for way, found_ms in latencies_ms.items():
                async with writing(cluster.url, runtime, way) as (it, links):
                    links.sent.clear()
                    for number in range(WRITES):
                        began = time.monotonic()
                        await it.put(b"key%03d" % number, value)
                        found_ms.append(1_000 * (time.monotonic() - began))
                    await everywhere(it)
                    records = [record for append in links.appends for record in append.records]
                    copies[way] += sum(len(record.payload) > value_bytes for record in records)
                    sent_bytes[way] += links.sent_bytes
    assert copies == {"direct": MEMBERS * ROUNDS * WRITES, "chain": ROUNDS * WRITES}
    for way, found_ms in latencies_ms.items():
        worst_ms = quantiles(found_ms, n=100)[98]
        sys.stdout.write(
            f"\n{value_bytes} bytes, {way}: {sent_bytes[way] / ROUNDS / WRITES:.0f} bytes sent for "
            f"a write, median {median(found_ms):.2f} ms, p99 {worst_ms:.2f} ms"
        )
    ratio = median(latencies_ms["chain"]) / median(latencies_ms["direct"])
    saved = sent_bytes["direct"] / sent_bytes["chain"]
    sys.stdout.write(f"\nchain: {saved:.2f} times fewer bytes, {ratio:.2f} times the latency\n")
