"""What calls cost, as metrics, statistics and the calls themselves tell it, by a real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.protocol.access import Verb
from shalekv.runtime import Runtime
from shalekv.server.access.guard import Guard
from shalekv.store.memory import MemoryStore
from shalekv.telemetry.costs import ANONYMOUS, BACKGROUND, NO_PREFIX
from shalekv.telemetry.metrics import FAMILIES, Metrics
from shalekv_client import (
    Client,
    ConditionFailed,
    Cost,
    CostDimension,
    Durability,
    Exists,
    Missing,
    SyncClient,
    costs_of_calls,
)
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.in_process import Served, memory_store, serving
from tests.kit.serving.guarded import HeldPolicy, HeldTokens, policy_of, prefix
from tests.kit.serving.sweeping import compact_store

PRICES = {"write": "0.0054", "list": "0.0055", "read": "0.00037", "delete": "0"}  # of 1,000
TELEMETRY = {"usd_per_1000": ",".join(f"{kind}s={usd}" for kind, usd in PRICES.items())}
NOTHING = Cost(0, 0, 0, 0, 0, 0, shared_by=0, dollars=0.0)
PUT = Cost(1, 0, 0, 0, 0, 0, shared_by=1, dollars=0.0000054)


@asynccontextmanager
async def served_client(*, coalesce: bool = False) -> AsyncIterator[tuple[Served, Client]]:
    async with (
        serving(memory_store(), telemetry=TELEMETRY) as served,
        Client(served.listen, coalesce=coalesce) as client,
    ):
        yield served, client


async def move_to_levels(served: Served) -> None:
    """Compact what is in memory, and wait until the writer has dropped it there."""
    engine, store = served.writer.engine, store_of(served)
    await compact_store(store, Runtime(LoopClock(), Random(1), InlineWorkers()))
    await engine.ownership.confirm()
    while engine.memtable.key_count:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


def store_of(served: Served) -> MemoryStore:
    store = served.store
    assert isinstance(store, MemoryStore)
    return store


def dollars_by(metrics: Metrics, family: str, label: int = 0) -> dict[str, Decimal]:
    """The dollars of a family by one of its labels, as they are written."""
    found = Counter[str]()
    for each, labels, sample in metrics:
        if each is FAMILIES[family]:
            found[labels[label]] += Decimal(repr(sample))  # type: ignore[assignment]
    return dict(found)  # type: ignore[arg-type]


async def test_dollars_equal_counted_requests_to_the_last_digit() -> None:
    """The dollars of metrics, by every dimension, are those of the requests that were counted."""
    async with served_client() as (served, client), client.session() as session:
        keys = [prefix + b"%d" % number for number in range(20) for prefix in (b"a/", b"b:", b"c")]
        await asyncio.gather(*(client.put(key, b"v") for key in keys))
        await asyncio.gather(*(session.put(key, b"w") for key in keys))
        await move_to_levels(served)
        await asyncio.gather(*(client.get(key) for key in keys))
        await client.batch_get([b"b:x", b"b:y"])
        await client.count(prefix=b"a/")
        [entry async for entry in client.scan(prefix=b"a/")]
        metrics, counted = Metrics(), Counter(store_of(served).sent.by_kind)
        served.writer.admin.store_use.collect(metrics)
        served.server.collect(metrics)
        stats = await client.stats()
    assert dollars_by(metrics, "principal_calls")[ANONYMOUS] == 3 * len(keys) + 4
    wanted = sum(Decimal(PRICES[kind]) * count / 1_000 for kind, count in counted.items() if count)
    by_method = dollars_by(metrics, "method_cost_dollars")
    assert {"KV.Put", "KV.Get", "Session.put", BACKGROUND} <= {*by_method}
    assert {*dollars_by(metrics, "principal_cost_dollars")} == {ANONYMOUS, BACKGROUND}
    assert {*dollars_by(metrics, "prefix_cost_dollars")} <= {"a/", "b:", NO_PREFIX, BACKGROUND}
    for family in ("cost", "method_cost", "principal_cost", "prefix_cost"):
        assert sum(dollars_by(metrics, f"{family}_dollars").values()) == wanted
    for dimension in CostDimension:
        origins = [each for each in stats.origins if each.dimension is dimension]
        sums = Counter[str]()
        for each in origins:
            sums.update({kind.name.lower(): count for kind, count in each.requests.items()})
        assert +sums == +counted
        assert sum(Decimal(repr(each.dollars)) for each in origins) == wanted
        calls = {each.name: each.calls for each in origins}
        if dimension is CostDimension.METHOD:
            assert (calls["KV.Put"], calls["Session.put"]) == (len(keys), len(keys))
        elif dimension is CostDimension.PRINCIPAL:
            others = ("batch_get", "count", "scan", "session", "stats")
            assert calls[ANONYMOUS] == 3 * len(keys) + len(others)
        else:  # the charged commit of a group stands for all of them
            assert sum(calls.values()) >= 2 * len(keys)


async def test_the_first_call_of_a_token_is_charged_to_its_principal() -> None:
    """Also if it has to be looked up who calls, while the call is in progress."""
    tokens = HeldTokens("root", "ann")
    tokens.known.set()
    guard = Guard(tokens, HeldPolicy(policy_of(ann=prefix(b"a/", Verb.READ))))
    async with (
        serving(memory_store(), guard, telemetry=TELEMETRY) as served,
        Client(served.listen, access_token="root", coalesce=False) as root,
        Client(served.listen, access_token="ann", coalesce=False) as ann,
    ):
        await root.put(b"a/1", b"v")
        await move_to_levels(served)
        assert await ann.get(b"a/1") is not None
        served.server.collect(metrics := Metrics())
    charged = dollars_by(metrics, "principal_cost_dollars")
    assert {"token:root", "token:ann"} <= charged.keys() <= {"token:root", "token:ann", BACKGROUND}


@pytest.mark.parametrize("coalesce", [False, True], ids=["unary", "session"])
async def test_a_call_tells_its_own_cost(*, coalesce: bool) -> None:
    """A read tells its requests, and none if memory or a cache has the answer; a write those of
    its group, and what it has read itself.
    """
    async with served_client(coalesce=coalesce) as (served, client):
        with costs_of_calls() as costs:
            await client.put(b"a/1", b"v", idempotency_key=b"once")
            await client.get(b"a/1")
            await client.put(b"a/1", b"v", idempotency_key=b"once")
            await client.put(b"a/2", b"v", durability=Durability.MEMORY)
        assert costs == [PUT, NOTHING, NOTHING, NOTHING]
        await client.put(b"a/3", b"v")
        await move_to_levels(served)
        with costs_of_calls() as costs:
            await client.put(b"a/1", b"w", condition=Exists())
        (conditional,) = costs
        assert (conditional.writes, conditional.shared_by) == (1, 1)
        assert conditional.reads > 0
        of_reads = conditional.reads * Decimal(PRICES["read"]) / 1_000
        assert conditional.dollars == float(Decimal("0.0000054") + of_reads)
        await move_to_levels(served)
        with costs_of_calls() as costs:
            await client.batch_get([b"a/1", b"a/2"])
            await client.get(b"a/1")
            await client.describe(b"a/1")
            await client.count(prefix=b"a/")
        assert costs[0].reads > 0
        assert costs[0].dollars == float(costs[0].reads * Decimal(PRICES["read"]) / 1_000)
        assert costs[1:] == [NOTHING] * 3
        with pytest.raises(ConditionFailed), costs_of_calls() as costs:
            await client.put(b"a/1", b"x", condition=Missing())
        assert costs == []


async def test_writes_of_a_group_share_its_cost() -> None:
    """Each write of a group tells the requests of the group, and its own part of the dollars."""
    async with served_client(coalesce=True) as (_, client):
        with costs_of_calls() as costs:
            await asyncio.gather(*(client.put(b"%d" % number, b"v") for number in range(30)))
        assert {each.writes for each in costs} == {1}
        assert max(each.shared_by for each in costs) > 1
        for each in costs:
            assert each.dollars == float(Decimal("0.0000054") / each.shared_by)


async def test_a_call_that_does_not_ask_is_told_nothing() -> None:
    """Costs are told inside of `costs_of_calls` alone; of a client without asyncio as well."""
    async with served_client() as (served, client):
        with costs_of_calls() as costs:
            pass
        await client.put(b"k", b"v")
        assert costs == []

        def ask() -> list[Cost]:
            with SyncClient(served.listen) as other, costs_of_calls() as costs:
                other.put(b"k", b"w")
                with other.session() as session:
                    session.get(b"k")
                other.get(b"k")
            return costs

        assert await asyncio.to_thread(ask) == [PUT, NOTHING, NOTHING]
