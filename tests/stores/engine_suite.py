"""Crash recovery, compaction and collection of the shipped roles on a real store."""

from __future__ import annotations

from random import Random

from tests.contract.opening import names_in
from tests.kit.household import Household, everything, running, write_all
from tests.kit.processes.in_process import put_at
from tests.stores.fencing_suite import OnAStore

KEYS = 400
VALUE_BYTES = 200
ROUNDS = 6


class EngineSuite(OnAStore):
    async def test_what_was_acknowledged_survives_a_crash(self, it: Household) -> None:
        """Each writer ends in the middle of it all, and the next one has every acknowledged put."""
        expected: dict[bytes, bytes] = {}
        for life in range(3):
            writer = await it.open_writer()
            async with running(writer):
                assert await everything(writer) == expected
                for number in range(8):
                    key, value = b"%d" % (number % 5), b"%d/%d" % (life, number)
                    await put_at(writer, key, value)
                    expected[key] = value
        async with it.writing() as writer:
            assert await everything(writer) == expected
        await it.check()

    async def test_compaction_and_collection_change_no_answer(self, it: Household) -> None:
        """While levels are built and garbage goes, every scan gives what was written last."""
        random = Random(7)
        expected: dict[bytes, bytes] = {}
        async with it.writing() as writer:
            for _ in range(ROUNDS):
                keys = random.sample(range(2 * KEYS), KEYS)
                changes = {b"key %05d" % key: random.randbytes(VALUE_BYTES) for key in keys}
                await write_all(writer, changes)
                expected |= changes
                await it.compact()
                assert await everything(writer) == expected
            before = await names_in(it.store(), "levels/")
            report = await it.collect()
            assert report.deleted_objects > 0
            assert await everything(writer) == expected
        async with it.writing() as writer:
            assert await everything(writer) == expected
            await it.collect()
            left = await names_in(it.store(), "levels/")
            assert left
            assert len(left) < len(before)
            assert await everything(writer) == expected
        await it.check()
