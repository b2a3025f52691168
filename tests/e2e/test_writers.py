"""Writers that are killed, stopped, paused and overtaken: nothing that they promised is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.kit.processes.history import History
from tests.kit.processes.load import Load, check_whole_wal, read_state
from tests.kit.processes.processes import Processes
from tests.kit.processes.schedule import ScheduleRun
from tests.kit.seeds import random_of, run_seed

# A writer then learns of its successor from the WAL alone.
NO_POLL = "--fence-poll-ms 3600000 --open-timeout-ms 3600000"
BURST_S = 0.4  # a kill comes at a random moment within it
KILLS_SOAK = 67

SCHEDULES = {
    "killed under load, with other numbers of slots in flight": """
        serve first --max-parallel-writes 4
        load first 150
        kill first
        serve second --max-parallel-writes 1
        load second 100
        kill second
        serve third
        load third 50
        check third
    """,
    "stopped under load: all is answered": """
        serve first --max-parallel-writes 4
        load first 150
        stop first
        serve second --max-parallel-writes 1
        load second 50
        stop second
        serve third
        check third
    """,
    "opened at once: that of the highest epoch survives": """
        serve before --max-parallel-writes 4 --fence-poll-ms 100
        load before 50
        start one --max-parallel-writes 4 --fence-poll-ms 100
        start two --fence-poll-ms 100
        start three --fence-poll-ms 100
        survive survivor before one two three
        load survivor 50
        check survivor
    """,
    "opened in turn: each is fenced without looking at the manifest": f"""
        serve first --max-parallel-writes 4 {NO_POLL}
        load first 50
        serve second --max-parallel-writes 1 {NO_POLL}
        load second 50
        fenced first
        serve third {NO_POLL}
        load third 50
        fenced second
        check third
    """,
    "opened once at the same time: the first serves on, the other ends": """
        serve before --fence-poll-ms 100
        load before 50
        stalling other 'before create manifest/ 1' serve --open-once
        stalled other
        serve first --open-once --fence-poll-ms 100
        load first 50
        fenced before
        resume other
        ends other CONFLICT
        never_served other
        load first 50
        check first
    """,
    "opened once where neither found a database: the first serves on, the other ends": """
        stalling other 'before create manifest/ 1' serve --open-once --create
        stalled other
        serve first --open-once --fence-poll-ms 100
        load first 50
        resume other
        ends other CONFLICT
        never_served other
        load first 50
        check first
    """,
    "an opener is stopped before its fence: the writer before it goes on until then": f"""
        serve before --max-parallel-writes 4 {NO_POLL}
        load before 50
        stalling opener 'before create wal/ 1' serve --max-parallel-writes 4 {NO_POLL}
        stalled opener
        logs opener epoch won
        load before 200
        rest before
        resume opener
        ready opener
        load opener 20
        late before 1
        fenced before
        refused
        check opener
    """,
    "an opener is stopped before its fence while another takes over: it never serves": f"""
        serve before {NO_POLL}
        load before 50
        stalling opener 'before create wal/ 1' serve --max-parallel-writes 4 {NO_POLL}
        stalled opener
        serve survivor {NO_POLL}
        load survivor 30
        fenced before
        rest survivor
        resume opener
        fenced opener
        never_served opener
        load survivor 30
        check survivor
    """,
    "an opener is stopped in its edit of the manifest: one writer survives": f"""
        serve before {NO_POLL}
        load before 50
        stalling opener 'after create manifest/ 1' serve {NO_POLL}
        stalled opener
        serve between {NO_POLL}
        load between 30
        fenced before
        resume opener
        survive survivor opener between
        check survivor
    """,
    "paused while another takes over: what it had accepted is lost, and told as lost": f"""
        serve paused --max-parallel-writes 4 {NO_POLL}
        load paused 50
        write paused
        pause paused
        serve survivor {NO_POLL}
        late paused 1
        load survivor 100
        resume paused
        fenced paused
        lost paused
        refused
        check survivor
    """,
    "writers come and go while everything inactive is deleted": """
        serve first
        write first
        collect
        kill first
        serve second
        write second
        collect
        stop second
        serve third
        write third
        collect
        check third
    """,
}


@pytest.mark.parametrize("name", SCHEDULES)
async def test_no_promise_of_a_writer_is_broken(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """Acknowledged writes are there, whole and once; refused ones are not."""
    await ScheduleRun(processes, tmp_path).play(SCHEDULES[name])


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_many_kills_lose_nothing(processes: Processes, tmp_path: Path) -> None:
    """No acknowledged write is lost in many kills at random moments, with a growing log."""
    random, history = random_of("many kills"), History(run_seed())
    for number in range(KILLS_SOAK):
        in_flight = str(random.choice([1, 4]))
        server = await processes.serve(f"file://{tmp_path}/db", "--max-parallel-writes", in_flight)
        history.check_state(await read_state(server.listen))
        if number == KILLS_SOAK - 1:
            check_whole_wal(tmp_path / "db", history, await read_state(server.listen))
            continue
        load = Load(history, server.listen, Random(random.getrandbits(64)))
        running = asyncio.create_task(load.run())
        await asyncio.sleep(random.uniform(0, BURST_S))  # a moment of chance
        await server.kill()
        await running
