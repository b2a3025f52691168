"""Electors at an API server of Kubernetes, and what is seen there of their terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.server.election.elector import Elector, Term
from tests.kit.timeouts import until
from tests.servers.kubernetes import KubernetesApi
from tests.stores.elections import LEASE, in_kubernetes

LONG_MS = 600_000  # nothing lapses within a test
TTL_MS = 2_000
SHORT_MS = 1_000


@asynccontextmanager
async def elector(
    kubernetes: KubernetesApi, name: str = "a:1", *, ttl_ms: int = LONG_MS
) -> AsyncIterator[Elector]:
    async with in_kubernetes(kubernetes).electors(name, ttl_ms=ttl_ms) as ((made,), _):
        yield made


@asynccontextmanager
async def kept(term: Term) -> AsyncIterator[asyncio.Task[str]]:
    """The term is renewed meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(term.keep())
        yield keeping
        keeping.cancel()


async def renewals(kubernetes: KubernetesApi, count: int) -> None:
    """Wait for this many changes of the time of renewal."""
    for _ in range(count):
        before = kubernetes.lease(LEASE)["spec"]["renewTime"]
        await until(lambda: kubernetes.lease(LEASE)["spec"]["renewTime"] != before, "a renewal")  # noqa: B023 - called before the next


def holder_of(kubernetes: KubernetesApi) -> str:
    return str(kubernetes.lease(LEASE)["spec"]["holderIdentity"])


def requests(kubernetes: KubernetesApi, method: str) -> int:
    return sum(each.startswith(f"{method} ") for each in kubernetes.seen)
