"""The worked examples of the seeds on writers and fences, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

import pytest

from shalekv.errors import Fenced, ManifestVersionExists
from shalekv.roles.writer import Writer
from tests.contract.opening import OpenStore, names_in
from tests.kit.household import Household, everything, running
from tests.kit.processes.in_process import put_at, real_runtime

OPENERS = 4


class OnAStore:
    """The fixtures of the suites. A store adds `open_store`."""

    tick_ms: ClassVar[int] = 2_000  # HTTP tells whole seconds

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """A function whose every call opens one and the same, at first empty, database."""
        raise AssertionError("a class that tests a store overrides this fixture")

    @pytest.fixture
    def household(self, open_store: OpenStore) -> Iterator[Household]:
        """What opens the roles of a database."""
        with real_runtime() as runtime:
            yield Household(open_store, runtime, self.tick_ms)

    @pytest.fixture
    async def it(self, household: Household) -> AsyncIterator[Household]:
        """The same, when the database is there."""
        try:
            await household.create()
            yield household
        finally:
            await household.close()


class FencingSuite(OnAStore):
    async def test_a_writer_fills_slot_after_slot(self, it: Household) -> None:
        """Seed 000, "Writer Protocol", 1: the first writer fences slot 0, writes 1, 2 and 3."""
        async with it.writing() as writer:
            for number in range(3):
                await put_at(writer, b"key", b"%d" % number)
            assert await names_in(it.store(), "wal/") == wal_names(0, 1, 2, 3)
            assert await everything(writer) == {b"key": b"2"}

    async def test_an_older_writer_loses_its_slot(self, it: Household) -> None:
        """Example 2: the new writer's fence takes the slot; the old one's next write is refused."""
        old = await it.open_writer()
        async with running(old) as ended:
            await put_at(old, b"key", b"old 1")
            await put_at(old, b"key", b"old 2")
            async with it.writing() as new:
                assert new.epoch == old.epoch + 1
                with pytest.raises(Fenced):
                    await put_at(old, b"key", b"too late")
                with pytest.raises(Fenced):
                    await ended
                await put_at(new, b"other", b"new")
                assert await everything(new) == {b"key": b"old 2", b"other": b"new"}
                # A fence and two writes of the old one, then the same of the new one.
                assert await names_in(it.store(), "wal/") == wal_names(*range(5))

    async def test_a_writer_is_fenced_with_many_uploads_in_flight(self, it: Household) -> None:
        """With three uploads in flight, what was acknowledged is what the newer writer finds."""
        old = await it.open_writer(max_parallel_writes=3)
        told: dict[bytes, bool] = {}

        async def try_to_put(number: int) -> None:
            key = b"%03d" % number
            try:
                await put_at(old, key, b"old")
            except Fenced:
                told[key] = False
            else:
                told[key] = True

        async with running(old), asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(try_to_put(number))
                await asyncio.sleep(0)
            async with it.writing() as new:
                found = await everything(new)
                await put_at(new, b"new", b"1")
        acknowledged = {key for key, is_done in told.items() if is_done}
        assert acknowledged <= found.keys()

    async def test_of_openers_at_once_one_is_left(self, it: Household) -> None:
        """Seed 003: of those that open at the same time, the last one serves, the others can't."""
        outcomes = await asyncio.gather(
            *(it.open_writer(retry=False) for _ in range(OPENERS)), return_exceptions=True
        )
        writers = [each for each in outcomes if isinstance(each, Writer)]
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        assert all(isinstance(each, ManifestVersionExists | Fenced) for each in refused)
        assert writers
        assert len({writer.epoch for writer in writers}) == len(writers)
        done = []
        for writer in writers:
            async with running(writer):
                try:
                    await put_at(writer, b"key", b"%d" % writer.epoch)
                except Fenced:
                    continue
                done.append(writer.epoch)
                writer.close()
        assert done == [max(writer.epoch for writer in writers)]

    async def test_a_stalled_writer_stays_fenced_after_collection(self, it: Household) -> None:
        """Rule F1: what the collector deletes makes no room for a write that nobody would read."""
        stalled = await it.open_writer()
        async with it.writing() as new:
            for number in range(5):
                await put_at(new, b"key", b"%d" % number)
            await it.compact()
            await put_at(new, b"key", b"last")
            assert (await it.collect()).deleted_objects > 0
            async with running(stalled):
                with pytest.raises(Fenced):
                    await put_at(stalled, b"key", b"from the past")
            assert await everything(new) == {b"key": b"last"}
        async with it.writing() as later:
            assert await everything(later) == {b"key": b"last"}


def wal_names(*wal_ids: int) -> list[str]:
    """The names of these slots."""
    return [f"wal/{wal_id:020d}.sst" for wal_id in wal_ids]
