"""Random histories of writes, compactions, snapshots, leases and collections.

After every step all that active manifests name is there (I8), and so is what leases protect;
and when all is over, one collection leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.manifest import Lease
from shalekv.core.sst_table import SstInfo
from shalekv.engine.collection.collecting import Collecting
from shalekv.errors import LeaseLost, SnapshotExists, SnapshotNotFound, WalUnprotected
from shalekv.format import names
from tests.kit.engine.collection import AGE_S, Ground
from tests.kit.engine.interrupted_store import InterruptedStore

NAMES = ("one", "two", "three")


class History:
    """A database, jobs that are under way, and two collectors."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.jobs: list[tuple[Lease, list[SstInfo]]] = []
        self.fences: set[str] = set()
        self.collectors = [
            ground.collecting(),
            ground.collecting(deletes_per_s_count=2),
            ground.collecting(wal_retention_s=2 * AGE_S, wal_retention_bytes=2_000),
        ]
        self.acts: dict[str, Callable[[int], Awaitable[object]]] = {
            "wal": lambda n: ground.wal(n % 4 + 1),
            "fence": self.fence,
            "compact": self.compact,
            "merge": lambda _: ground.merge(),
            "begin": self.begin,
            "write": self.write,
            "publish": self.publish,
            "forget": self.forget,
            "create": self.create,
            "share": self.share,
            "renew": self.renew,
            "delete": self.delete,
            "time": self.pass_time,
            "hold": self.hold,
            "release": lambda n: ground.consumers().release(NAMES[n % 3]),
            "collect": lambda n: self.collectors[n % 3].collect(),
            "collect while": self.collect_while,
        }

    async def do(self, act: str, number: int) -> None:
        """One step; what is refused as it must be is no failure."""
        try:
            await self.acts[act](number)
        except (LeaseLost, SnapshotNotFound, SnapshotExists, WalUnprotected):
            return

    async def check(self) -> None:
        """I8, and F1."""
        ground = self.ground
        await ground.check_reachable()
        current = await ground.manifest()
        held = {lease.id for lease in current.leases}
        needed = {
            names.level_name(info.id)
            for lease, infos in self.jobs
            for info in infos
            if lease.id in held
        }
        assert not (needed | self.fences) - ground.names()

    async def fence(self, _: int) -> None:
        await self.ground.fence()
        self.fences.add(names.wal_name(self.ground.last_wal_id))

    async def compact(self, number: int) -> None:
        first = (await self.ground.manifest()).first_uncompacted_wal_id
        if first <= self.ground.last_wal_id:
            await self.ground.compact(min(first + number, self.ground.last_wal_id))

    async def begin(self, number: int) -> None:
        c = (await self.ground.manifest()).first_uncompacted_wal_id
        lease = await self.ground.lease(5 * number, wal_id_min=c if number % 2 else None)
        self.jobs.append((lease, [await self.ground.write_sst(lease)]))

    async def write(self, number: int) -> None:
        if self.jobs:
            lease, infos = self.jobs[number % len(self.jobs)]
            infos.append(await self.ground.write_sst(lease))

    async def publish(self, number: int) -> None:
        if self.jobs:
            lease, infos = self.jobs.pop(number % len(self.jobs))
            await self.ground.publish(lease, *infos)

    async def forget(self, number: int) -> None:
        if self.jobs:
            del self.jobs[number % len(self.jobs)]

    async def hold(self, number: int) -> None:
        first = max(0, self.ground.last_wal_id - number)
        await self.ground.consumers(ttl_s=3 * number).hold(NAMES[number % 3], first)

    async def create(self, number: int) -> None:
        name = NAMES[number % 3]
        ttl_ms = None if number % 5 == 0 else number * 1_000
        await self.ground.snapshots().create(name=name, ttl_ms=ttl_ms)

    async def share(self, number: int) -> None:
        await self.ground.snapshots().share(NAMES[number % 3], ttl_ms=number * 1_000)

    async def renew(self, number: int) -> None:
        await self.ground.snapshots().renew(NAMES[number % 3], ttl_ms=number * 1_000)

    async def delete(self, number: int) -> None:
        await self.ground.snapshots().delete(NAMES[number % 3])

    async def pass_time(self, number: int) -> None:
        self.ground.pass_time(number)

    async def collect_while(self, number: int) -> None:
        """Something else happens in the middle of a collection."""
        acts = [act for act in self.acts if act != "collect while"]

        async def act(at: int) -> None:
            if at == number:
                await self.do(acts[number % len(acts)], number)
                await self.check()

        retained_s = 2 * AGE_S if number % 2 else 0
        store = InterruptedStore(self.ground.store, act)
        collecting: Collecting = self.ground.collecting(store, wal_retention_s=retained_s)
        await collecting.collect()


# What lets things get old, and deletes them, comes more often.
ACTS = [*sorted(History(Ground()).acts), *["time", "collect"] * 3]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(1, 25)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_what_is_needed_stays_and_what_is_not_goes(steps: list[tuple[str, int]]) -> None:
    """I8 after each step of any history; no garbage at its end."""

    async def live() -> None:
        ground = await Ground.created()
        history = History(ground)
        for act, number in steps:
            await history.do(act, number)
            await history.check()
        for snapshot in (await ground.manifest()).snapshots:
            await ground.snapshots().delete(snapshot.id.hex())
        ground.pass_time(AGE_S + 200)  # all leases have expired
        await history.collectors[0].collect()
        await history.check()
        assert ground.names() == await ground.needed() | history.fences

    asyncio.run(live())
