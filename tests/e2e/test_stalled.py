"""Writers that stand still while others take over, compact and collect: rule F1 on a real store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shalekv_client import Client
from tests.e2e.late_writes import WRITES, check_history, send_late, write
from tests.kit.processes.child import Child
from tests.kit.processes.history import History
from tests.kit.processes.load import ONE_ATTEMPT, TIMEOUT_MS
from tests.kit.processes.meanwhile import ALONE, NEVER_LOOKS, SERVE, SHORT_LIVED, Meanwhile, stalled
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import FIRST_FENCE, epoch_of, fenced_end
from tests.kit.processes.wal_contents import read_wal, wal_ids, wal_path

DEADLINE_S = 200


@pytest.mark.parametrize("in_flight", [1, 4])
async def test_a_writer_that_was_overtaken_and_collected_acknowledges_nothing(
    processes: Processes, tmp_path: Path, in_flight: int
) -> None:
    """A writer that stood still at an upload while another took over, and while all slots but
    fences were compacted and collected, acknowledges nothing when it goes on.
    """
    flags = (*SHORT_LIVED, "--max-parallel-writes", str(in_flight))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        database, history = Meanwhile(processes, tmp_path / "db"), History(1)
        # Its fences and the writes before take a slot each.
        stop_at = f"before create wal/ {in_flight + WRITES + 1}"
        stalling = database.start_stalling(stop_at, *SERVE, "--create", *flags)
        await stalling.ready()
        async with Client(stalling.listen, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            await write(history, client)
            late = [tasks.create_task(send_late(history, client)) for _ in range(in_flight + 1)]
            await stalled(stalling)
            slot = wal_ids(database.folder)[-1] + 1
            survivor = await database.serve(*flags)
            late += [tasks.create_task(send_late(history, client)) for _ in range(in_flight + 1)]
            async with Client(survivor.listen, timeout_ms=TIMEOUT_MS) as other:
                await write(history, other)
                await database.compact()
                await write(history, other)
                await database.compact()
                overtaken = wal_path(database.folder, slot + in_flight)  # behind the fences
                await database.collect_until(lambda _: not overtaken.exists())
                stalling.resume()
                assert not [commit for commit in await asyncio.gather(*late) if commit]
                await fenced_end(stalling)
                await write(history, other)
        assert [each.epoch for each in read_wal(database.folder) if each.wal_id == slot] == [2]
        await check_history(database, history, survivor)


async def test_an_opener_that_was_overtaken_and_collected_never_serves(
    processes: Processes, tmp_path: Path
) -> None:
    """An opener that stood still between its epoch and its fence while a later one took over, and
    while the slot of its fence was compacted and collected, ends as fenced: its fence, which it
    can create, does not count.
    """
    async with asyncio.timeout(DEADLINE_S):
        database, history = Meanwhile(processes, tmp_path / "db"), History(2)
        opener, slot = await overtaken_opener(database, history)
        survivor = await database.serve(*SHORT_LIVED)
        async with Client(survivor.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
            await compact_and_collect(database, slot)
            opener.resume()
            await fenced_end(opener)
            assert wal_path(database.folder, slot).exists()  # as if nobody had been there
            assert not any("listen" in line for line in opener.lines()), opener.report()
            await write(history, client)
        await check_history(database, history, survivor)


async def test_a_fence_in_a_collected_slot_does_not_count(
    processes: Processes, tmp_path: Path
) -> None:
    """An opener that stood still between its epoch and its fence, while the writer before it went
    on and its slots were compacted and collected, fences behind them, and shows all of them.
    """
    async with asyncio.timeout(DEADLINE_S):
        database, history = Meanwhile(processes, tmp_path / "db"), History(3)
        opener, slot = await overtaken_opener(database, history)
        await compact_and_collect(database, slot)
        compacted = database.manifest().first_uncompacted_wal_id
        opener.resume()
        await opener.ready()
        assert wal_path(database.folder, slot).exists()
        async with Client(opener.listen, timeout_ms=TIMEOUT_MS) as client:
            await write(history, client)
        written = [each.wal_id for each in read_wal(database.folder) if each.commits]
        assert min(each for each in written if each >= compacted) > compacted
        assert epoch_of(opener) == database.manifest().writer_epoch
        await check_history(database, history, opener)


async def overtaken_opener(database: Meanwhile, history: History) -> tuple[Child, int]:
    """An opener that stands still before its fence, and the slot of that, which was written to.

    The writer before it has ended, and nothing keeps the slot.
    """
    before = await database.serve(*ALONE, *NEVER_LOOKS)
    async with Client(before.listen, timeout_ms=TIMEOUT_MS) as client:
        await write(history, client)
        opener = database.start_stalling(FIRST_FENCE, *SERVE, *SHORT_LIVED)
        await stalled(opener)
        slot = wal_ids(database.folder)[-1] + 1
        await write(history, client)
    await before.kill()
    assert wal_path(database.folder, slot).exists()
    await database.drop_snapshots()
    return opener, slot


async def compact_and_collect(database: Meanwhile, slot: int) -> None:
    """Compact all, and collect all that can be, a certain slot among it."""
    await database.compact()
    await database.collect_until(lambda _: not wal_path(database.folder, slot).exists())
