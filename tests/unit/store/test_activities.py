"""Requests to a store are recorded in the activity of the task that sends them, which pays them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore, RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.counting import Operation, StoreCallCounts
from shalekv.store.local import LocalStore
from shalekv.telemetry.activity import CURRENT, Activity, CallActivity
from tests.kit.inline_runtime import InlineClock, gathered, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore


class Ticks:
    """A clock that shows one microsecond more each time that it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


def told(activity: Activity) -> list[tuple[str, str, int, int, str]]:
    """What is recorded of each request."""
    return [
        (each.operation, each.name, each.attempts, each.size_bytes, each.problem)
        for each in activity.requests
    ]


async def test_each_request_is_recorded_with_its_attempts() -> None:
    """Operation, name, attempts, size, problem and times of each request are recorded."""
    inner = ScriptedStore()
    ticks = Ticks()
    store = CasStore(inner, inline_runtime(), StoreSettings(), counts=StoreCallCounts(now_ns=ticks))
    call = CallActivity(0)
    CURRENT.set(call)
    inner.creates = [Fate.REFUSED]
    await store.claim("wal/1", b"12345")
    inner.creates = [Fate.REPLY_LOST]
    await store.claim("wal/2", b"1")
    inner.read_fates = [Fate.REFUSED]
    assert await store.get_range("wal/1", 1, 2) == b"23"
    await gathered(store.list("wal/"))
    await store.delete(["wal/1", "wal/2"])
    await store.delete(["wal/1", "levels/2"])
    assert told(call) == [
        ("create", "wal/1", 2, 5, "the script says so"),
        ("create", "wal/2", 1, 1, "REPLY_LOST"),
        ("get", "wal/2", 1, 1, ""),
        ("get_range", "wal/1", 2, 2, "the script says so"),
        ("list", "wal/", 1, 0, ""),
        ("delete", "wal/", 1, 0, ""),
        ("delete", "", 1, 0, ""),
    ]
    for each in call.requests:
        assert each.began_ns < each.attempt_began_ns < each.ended_ns
        assert each.waiting_calls == 1


async def test_a_request_that_fails_or_is_given_up_is_recorded() -> None:
    """An error ends a request; one whose task is cancelled was given up."""
    inner = ScriptedStore()
    store = CasStore(inner, inline_runtime(), StoreSettings(read_attempts=1))
    call = CallActivity(0)
    CURRENT.set(call)
    inner.read_fates = [Fate.REFUSED]
    with pytest.raises(StoreUnavailable):
        await store.head("wal/1")

    async def hang() -> int:
        await asyncio.Event().wait()
        return 0

    inner.now_ms = hang  # type: ignore[method-assign]
    asking = asyncio.create_task(store.now_ms())
    await asyncio.sleep(0)
    assert call.requests[1].ended_ns == 0
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [(each.problem, each.ended_ns > 0) for each in call.requests] == [
        ("the script says so", True),
        ("given up", True),
    ]


async def test_the_time_of_an_attempt_is_that_of_the_store() -> None:
    """Each attempt is timed, failed ones too; what the caller does between two objects of a list
    does not count.
    """
    inner, ticks = ScriptedStore(), Ticks()
    runtime = inline_runtime()
    shared = StoreCallCounts(now_ns=ticks)
    store = CasStore(inner, runtime, StoreSettings(), counts=shared)
    inner.creates = [Fate.REFUSED, Fate.ANSWERED]
    await store.claim("wal/1", b"x")
    await store.claim("wal/2", b"x")
    async for _ in store.list("wal/"):
        ticks.now_ns += 1_000_000
    counts = shared.by_folder
    created, listed = (counts[each, "wal"] for each in (Operation.CREATE, Operation.LIST))
    assert (created.durations.count, created.durations.total) == (3, 3)
    assert (listed.durations.count, listed.durations.total) == (1, 3)


class Purposes:
    """Work for several activities on one store, some of it for none."""

    def __init__(self, inner: ObjectStore, store: CasStore) -> None:
        self.inner = inner
        self.store = store
        self.calls = [CallActivity(0) for _ in range(3)]
        self.read_now = Counter[Activity | None]()  # reads that took no waiting

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, activity in enumerate([*self.calls, None]):
                tasks.create_task(self._work(activity, f"levels/{number}"))

    async def _work(self, activity: Activity | None, name: str) -> None:
        CURRENT.set(activity)
        await self.store.claim(name, name.encode())
        await asyncio.gather(self.store.get(name), self.store.get_range(name, 0, 1))
        self.read_now[activity] += self.store.get_range_now(name, 0, 1) is not None
        await self.store.head(name)
        await gathered(self.store.list("levels/"))
        await self.store.delete([name])

    def check(self) -> None:
        """Check that everything was charged once, to those for whom it was sent."""
        one = {
            RequestKind.WRITE: 1,
            RequestKind.LIST: 1,
            RequestKind.READ: 3,
            RequestKind.DELETE: 1,
        }
        whole = Counter[RequestKind]()
        for activity in [*self.calls, None]:
            own = Counter(one) + Counter({RequestKind.READ: self.read_now[activity]})
            assert activity is None or activity.sent == own
            whole += own
        assert +Counter(self.inner.sent.by_kind) == whole


async def test_each_request_is_charged_to_the_task_that_sends_it() -> None:
    """Requests of concurrent tasks, and of tasks that these begin, are charged to nobody else."""
    inner = ScriptedStore()
    purposes = Purposes(inner, CasStore(inner, inline_runtime(), StoreSettings()))
    await purposes.run()
    purposes.check()


async def test_requests_that_threads_carry_out_are_charged(tmp_path: Path) -> None:
    """On a store whose requests are carried out by threads, it is the same."""
    workers = ThreadWorkers(2)
    runtime = Runtime(InlineClock(), Random(1), workers)
    inner = LocalStore(tmp_path, runtime)
    purposes = Purposes(inner, CasStore(inner, runtime, StoreSettings()))
    await purposes.run()
    purposes.check()
    await inner.close()
    workers.close()


async def test_a_request_that_counts_in_a_total_is_charged_once() -> None:
    """The requests to the store of another database count in the total, and are charged once."""
    own, other = ScriptedStore(), ScriptedStore()
    other.sent.add_up_in(own.sent)
    call = CallActivity(0)
    CURRENT.set(call)
    await CasStore(other, inline_runtime(), StoreSettings()).now_ms()
    assert call.sent == {RequestKind.READ: 1}
    assert own.sent.total == other.sent.total == 1
