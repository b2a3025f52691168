"""Random histories of values that expire, sweeps, compactions and take-overs, against a dictionary.

What is read is at every moment what was written and has neither been replaced nor expired. What the
log tells of the end of values is true, once for each, and in the end complete.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.engine.expiry_scan import ssts
from shalekv.engine.expiry_sweep import ExpirySweep
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.letting_go import follow
from tests.kit.serving.messages import delete, delete_range, put
from tests.kit.serving.roles import Serving, pairs, serving
from tests.kit.serving.sweeping import (
    BY_HAND,
    check_log,
    compact,
    logged,
    told,
    untold,
)

KEYS = [b"a1", b"a2", b"b1", b"b2", b"c1"]
TTLS_MS = (0, 0, 1_000, 5_000, 60_000)


@dataclass(slots=True)
class History:
    """One database, its writer, and what it must hold."""

    database: Database
    random: Random
    writer: Serving
    stack: AsyncExitStack
    tracked_bytes: int
    held: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)  # value, expiry

    @property
    def now_ms(self) -> int:
        """Logical time."""
        return self.writer.engine.time.now_ms()

    @property
    def sweep(self) -> ExpirySweep:
        """That of the writer."""
        return self.writer.engine.expiry

    async def write(self) -> None:
        """One commit of some changes, the last of which counts for each key."""
        random, changes = self.random, []
        for _ in range(random.choice((1, 1, 3))):
            key, value = random.choice(KEYS), b"v%d" % random.randrange(10**6)
            drawn = random.random()
            if drawn < 0.6:
                ttl_ms = random.choice(TTLS_MS)
                changes.append(put(key, value, ttl_ms=ttl_ms))
                self.held[key] = value, self.now_ms + ttl_ms if ttl_ms else 0
            elif drawn < 0.85:
                changes.append(delete(key))
                self.held.pop(key, None)
            else:
                changes.append(delete_range(prefix=key[:1]))
                self.held = {k: v for k, v in self.held.items() if k[:1] != key[:1]}
        await self.writer.ask(kv_pb2.WriteRequest(changes=changes))

    async def expire(self) -> None:
        """Let time pass, and sometimes sweep, while something is written."""
        self.writer.pass_ms(self.random.choice((500, 1_000, 6_000, 60_000)))
        acts = [self.sweep.sweep, self.sweep.scan, self.write]
        chosen = self.random.sample(acts, self.random.randrange(len(acts) + 1))
        await asyncio.gather(*(act() for act in chosen))

    async def compact(self) -> None:
        """Merge everything that is in the WAL, and some of what is below."""
        await compact(self.database, l0_trigger_count=self.random.choice((1, 2, 4)))
        if self.random.random() < 0.7:
            await self.follow()

    async def follow(self) -> None:
        """The writer reads the levels that are there."""
        tree, manifest = self.writer.engine.levels.current.tree, await self.database.manifest()
        is_same = {info.id for info in ssts(tree)} == {info.id for info in manifest.leveled_ssts}
        if not is_same or tree.wal_id != manifest.wal_id_last_compacted:
            await follow(self.writer)

    async def take_over(self) -> None:
        """Another writer comes while this one may be sweeping."""
        await self.writer.put(b"time")  # which goes on from what is durable
        self.held[b"time"] = b"v", 0
        sweeping = asyncio.ensure_future(self.sweep.sweep())
        if self.random.random() < 0.5:
            await asyncio.sleep(0)
        await self.stack.aclose()
        await asyncio.gather(sweeping, return_exceptions=True)
        opening = serving(self.database, **BY_HAND, expiry_tracked_bytes=self.tracked_bytes)
        self.writer = await self.stack.enter_async_context(opening)

    async def check(self) -> None:
        """Reads are right, and so is what the log tells."""
        now_ms = self.now_ms
        live = {k: v for k, (v, at_ms) in self.held.items() if not 0 < at_ms <= now_ms}
        assert dict(pairs(await self.writer.scan())) == live
        for key in KEYS:
            assert (await self.writer.get(key)).found is (key in live)
        check_log(await logged(self.database))


async def live(seed: int, *, steps: int, tracked_bytes: int) -> int:
    """One history; how many values the log says have expired."""
    random = Random(seed)
    database = await Database.created(seed)
    async with AsyncExitStack() as stack:
        opening = serving(database, **BY_HAND, expiry_tracked_bytes=tracked_bytes)
        writer = await stack.enter_async_context(opening)
        it = History(database, random, writer, stack, tracked_bytes)
        acts = {it.write: 6, it.expire: 4, it.compact: 2, it.take_over: 1}
        for _ in range(steps):
            (act,) = random.choices([*acts], [*acts.values()])
            await act()
            await it.check()
        it.writer.pass_ms(120_000)
        await compact(database)
        await it.follow()
        await it.sweep.sweep()
        await it.sweep.scan()
        await it.check()
        assert untold(await logged(database), it.now_ms) == set()
    return len(await told(database))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), tracked_bytes=st.sampled_from([0, 1_000, 1 << 20]))
def test_each_value_that_expires_is_told_once_and_nothing_is_taken_away(
    seed: int, tracked_bytes: int
) -> None:
    """Whatever is compacted, taken over or kept in mind."""
    asyncio.run(live(seed, steps=25, tracked_bytes=tracked_bytes))


def test_histories_have_something_to_tell() -> None:
    """The test above is not empty."""
    found = [asyncio.run(live(seed, steps=40, tracked_bytes=1_000)) for seed in range(3)]
    assert sum(found) > 10
