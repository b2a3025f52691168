"""Places of an election, on real servers, and electors that campaign there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import SystemRandom

from shalekv.cli.process.peers import peer_contexts
from shalekv.clock import Clock, LoopClock, MachineClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.election.elector import Elector
from shalekv.server.election.opening import open_elector
from shalekv.settings import ElectionSettings, StoreSettings, TlsSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.processes.in_process import wall_clock_ms
from tests.kit.store import STORE_NOW_MS
from tests.servers.kubernetes import NAMESPACE, KubernetesApi
from tests.servers.record_stores import EtcdServer

DEADLINE_S = 60
LEASE = "shale"  # the name of the Lease

_numbers = count()


class LoopAndWallClock(LoopClock):
    """The time of the loop, and the time of day of this machine."""

    def wall_ms(self) -> int | None:
        return wall_clock_ms()


@dataclass(frozen=True, slots=True)
class Election:
    """Place of an election, and its times."""

    elect: str
    ttl_ms: int = 2_000
    lasting_ttl_ms: int = 3_000  # of a lease that is renewed
    clock: Clock = field(default_factory=LoopAndWallClock)  # of the candidates
    taken: str = "b has taken the lease"  # what "a" is notified of when "b" has it
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: str = ""
    delete: Callable[[], None] = lambda: None  # by an operator
    tls: TlsSettings = field(default_factory=TlsSettings)
    objects: MemoryObjects = field(default_factory=MemoryObjects)

    @asynccontextmanager
    async def electors(
        self, *names: str, ttl_ms: int | None = None
    ) -> AsyncIterator[tuple[list[Elector], dict[str, str]]]:
        """Run electors of these names; yield them, and the last notification of each."""
        reported: dict[str, str] = {}
        settings = ElectionSettings(
            elect=self.elect,
            lease_ttl_ms=ttl_ms or self.ttl_ms,
            kubernetes_credentials_path=self.credentials,
        )
        async with AsyncExitStack() as stack:
            made = []
            for name in names:
                workers = ThreadWorkers(1)
                stack.callback(workers.close)
                runtime = Runtime(self.clock, SystemRandom(), workers)
                store = MemoryStore(lambda: STORE_NOW_MS, objects=self.objects)
                opening = open_elector(
                    settings,
                    CasStore(store, runtime, StoreSettings()),
                    runtime,
                    open_tls=lambda: peer_contexts(self.tls).current,
                    holder=name,
                    on_holder_change=partial(reported.__setitem__, name),
                    environment=self.environment,
                )
                made.append(await stack.enter_async_context(opening))
            async with asyncio.timeout(DEADLINE_S):
                yield made, reported


def in_bucket() -> Election:
    return Election("bucket")


def in_etcd(server: EtcdServer, tls: TlsSettings | None = None) -> Election:
    key = f"unit/{next(_numbers)}"
    return Election(
        f"etcd{'s' if tls else ''}://{server.address}/{key}",
        tls=tls or TlsSettings(),
        ttl_ms=6_000,  # long enough on a busy machine, where etcd has a clock of its own
        lasting_ttl_ms=9_000,
        clock=MachineClock(),
        taken="the lease has ended in etcd",
        delete=lambda: server.delete(key),
    )


def in_kubernetes(api: KubernetesApi) -> Election:
    return Election(
        f"kubernetes://{NAMESPACE}/{LEASE}",
        environment=api.environment,
        credentials=api.credentials,
        delete=lambda: api.delete(LEASE),
    )
