"""Several writers on one database: one survives, and nothing that any of them promised is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from shalekv_client import Client, Fenced
from tests.kit.processes.child import Child, ChildFailed, Line
from tests.kit.processes.history import Fate
from tests.kit.processes.load import ONE_ATTEMPT, TIMEOUT_MS, send
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import Rivals, epoch_of, fenced_end, is_epoch_won, lost_writes
from tests.kit.processes.wal_contents import read_wal

DEADLINE_S = 200
POLL_MS = 100
NO_POLL = ("--fence-poll-ms", "3600000")  # a writer then learns of its successor from the WAL alone
SLACK_MS = 4_500  # of a busy machine; with the poll still below the default of 5 s


@pytest.mark.parametrize(("count", "in_flight"), [(2, "1"), (3, "4")])
async def test_writers_opened_at_once(
    processes: Processes, tmp_path: Path, count: int, in_flight: str
) -> None:
    """Of writers that open at the same time, also against one under load, that of the highest
    epoch survives; the others end as fenced, and every acknowledged write of all of them is there.
    """
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=count, tasks=tasks)
        flags = ("--max-parallel-writes", in_flight, "--fence-poll-ms", str(POLL_MS))
        before = await rivals.serve(*flags)
        opening = [rivals.start(*flags) for _ in range(count)]
        await asyncio.gather(*(_load_if_ready(rivals, writer) for writer in opening))
        *ended, survivor = sorted([before, *opening], key=epoch_of)
        for writer in ended:
            await fenced_end(writer)
        await rivals.end(survivor)


@pytest.mark.parametrize("in_flight", [("1", "1", "1"), ("4", "1", "4")])
async def test_writers_opened_in_turn(
    processes: Processes, tmp_path: Path, in_flight: tuple[str, ...]
) -> None:
    """Each writer that opens overtakes the one before it, under load and without waiting for it to
    look at the manifest; that one ends as fenced, and no acknowledged write is lost.
    """
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=3, tasks=tasks)
        before = await rivals.serve("--max-parallel-writes", in_flight[0], *NO_POLL)
        for width in in_flight[1:]:
            after = await rivals.serve("--max-parallel-writes", width, *NO_POLL)
            await fenced_end(before)
            before = after
        await rivals.end(before)


@pytest.mark.parametrize("in_flight", ["1", "4"])
async def test_opener_stopped_before_its_fence(
    processes: Processes, tmp_path: Path, in_flight: str
) -> None:
    """While an opener stands still between its epoch and its fence, the writer before it goes on
    and its acknowledgements count; when the opener goes on, it takes over with all of them.
    """
    flags = ("--max-parallel-writes", in_flight, *NO_POLL)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=4, tasks=tasks)
        before, opener = await rivals.serve_and_stop_opener(*flags)
        assert await rivals.load_of(before).acknowledged(500), before.report()
        await rivals.rest(before)
        opener.resume()
        await opener.ready()
        rivals.load(opener)
        async with Client(before.listen, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            await _expect_refusal(rivals, client)
        await fenced_end(before)
        await rivals.end(opener)


@pytest.mark.parametrize("in_flight", ["1", "4"])
async def test_opener_stopped_while_another_takes_over(
    processes: Processes, tmp_path: Path, in_flight: str
) -> None:
    """An opener that stood still behind its epoch while a later one took over never serves: it
    ends as fenced, and the fences that it puts in front of the serving writer lose nothing.
    """
    flags = ("--max-parallel-writes", in_flight, *NO_POLL)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=5, tasks=tasks)
        before, opener = await rivals.serve_and_stop_opener(*flags)
        survivor = await rivals.serve(*flags)
        await fenced_end(before)
        await rivals.rest(survivor)  # or it might be faster than the fences
        opener.resume()
        await fenced_end(opener)
        assert not any("listen" in line for line in opener.lines()), opener.report()
        rivals.load(survivor)
        await rivals.end(survivor)
        in_front = {
            each.wal_id for each in read_wal(rivals.folder) if each.epoch == epoch_of(opener)
        }
        displaced = [line for line in survivor.lines() if "displaced" in str(line.get("event"))]
        assert {line["wal_id"] for line in displaced} == in_front, survivor.report()


async def test_opener_stopped_in_its_edit(processes: Processes, tmp_path: Path) -> None:
    """An opener that stood still while it created the manifest with its epoch cannot know whether
    the edit counts: it is fenced, or begins again and takes over; one writer survives.
    """
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=8, tasks=tasks)
        before = await rivals.serve(*NO_POLL)
        opener = await rivals.start_and_stop_in_edit(*NO_POLL)
        between = await rivals.serve(*NO_POLL)
        await fenced_end(before)
        opener.resume()
        await _load_if_ready(rivals, opener)
        loser, survivor = sorted((opener, between), key=epoch_of)
        await fenced_end(loser)
        await rivals.end(survivor)


@pytest.mark.parametrize("in_flight", ["1", "4"])
async def test_serving_writer_stopped_while_another_takes_over(
    processes: Processes, tmp_path: Path, in_flight: str
) -> None:
    """A serving writer that stood still while another took over acknowledges nothing more: what it
    had accepted is lost, told to its callers and in its log, and it ends as fenced.
    """
    flags = ("--max-parallel-writes", in_flight, *NO_POLL)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=6, tasks=tasks)
        stopped = await rivals.serve(*flags)
        async with Client(stopped.listen, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            await client.status()  # connects
            stopped.pause()
            survivor = await rivals.serve(*flags)
            late = tasks.create_task(_expect_refusal(rivals, client))
            assert await rivals.load_of(survivor).acknowledged(200)
            stopped.resume()
            await late
        await fenced_end(stopped)
        lost = lost_writes(stopped)
        assert lost, stopped.report()
        acknowledged = {attempt.seq for attempt in rivals.history.of_fate(Fate.ACKNOWLEDGED)}
        assert acknowledged.isdisjoint(line["seq"] for line in lost)
        assert {line["reason"] for line in lost} == {"FENCED"}
        assert set(rivals.load_of(stopped).reasons()) == {"FENCED"}
        await rivals.end(survivor)


async def test_idle_writer_notices_within_one_poll(processes: Processes, tmp_path: Path) -> None:
    """A writer without writes learns from its next poll that another has taken over."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        rivals = Rivals(processes, tmp_path / "db", seed=7, tasks=tasks)
        idle = rivals.start("--fence-poll-ms", str(POLL_MS))
        await idle.ready()
        survivor = await rivals.serve()
        last = await fenced_end(idle)
        won = await survivor.line(is_epoch_won)
        assert _ms_between(won, last) <= POLL_MS + SLACK_MS, idle.report()
        await rivals.end(survivor)


async def _load_if_ready(rivals: Rivals, writer: Child) -> None:
    """Wait until a writer has won its epoch, and put load on it unless it ends before it serves."""
    await writer.line(is_epoch_won)
    with suppress(ChildFailed):
        await writer.ready()
        rivals.load(writer)


async def _expect_refusal(rivals: Rivals, client: Client) -> None:
    """A write that is sent to a writer that was fenced is refused, and not applied."""
    attempt = rivals.history.begin([b"late"])
    with pytest.raises(Fenced) as refused:
        await send(client, attempt)
    rivals.history.refused(attempt, str(refused.value))


def _ms_between(first: Line, second: Line) -> float:
    """From one log line to another, by their timestamps."""
    begun, ended = (datetime.fromisoformat(line["timestamp"]) for line in (first, second))
    return (ended - begun).total_seconds() * 1000
