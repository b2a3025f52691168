"""Processes that stop at a request while what they rest on expires and is collected: F1, F2, F3.

Or the name of their manifest is free again, since it was made by others and collected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes.processes import Processes
from tests.kit.processes.schedule import ScheduleRun

NO_POLL = "--fence-poll-ms 3600000 --open-timeout-ms 3600000"
SHORT = f"{NO_POLL} --snapshot-ttl-s 2"
FENCE = "'before create wal/ 1'"
FIRST_EDIT = "'before create manifest/ 1'"
# The renewal of a short snapshot would show the writer the opener's epoch.
OVERTAKEN_OPENER = f"""
        serve before {NO_POLL}
        write before
        stalling opener {FENCE} serve {SHORT}
        stalled opener
        slot
        write before
        kill before
        drop_snapshots
"""
WRITTEN = f"""
        serve server {SHORT}
        write server
        stop server
"""

SCHEDULES = {
    # The fences and the writes before take a slot each: 4 + 6, and the next one.
    "F1: a writer that was overtaken and collected acknowledges nothing": f"""
        stalling old 'before create wal/ 11' serve --create {SHORT} --max-parallel-writes 4
        ready old
        write old
        late old 5
        stalled old
        slot
        serve new {SHORT} --max-parallel-writes 4
        late old 5
        write new
        compact
        write new
        compact
        gone 4
        resume old
        fenced old
        refused
        write new
        check new
    """,
    "F1: an opener that was overtaken and collected never serves": f"""
        {OVERTAKEN_OPENER}
        serve new {SHORT}
        write new
        compact
        gone 0
        resume opener
        fenced opener
        never_served opener
        write new
        check new
    """,
    "F1: a fence in a collected slot does not count": f"""
        {OVERTAKEN_OPENER}
        compact
        gone 0
        resume opener
        ready opener
        write opener
        check opener
    """,
    "F2: a compactor whose outputs were collected publishes nothing of them": f"""
        serve server {SHORT}
        write server
        stalling compactor 'after create levels/ 1' compactor --compactor-lease-ttl-s 2
        stalled compactor
        outputs
        write server
        gone_outputs
        resume compactor
        ends compactor OK
        logs compactor compaction failed
        says compactor lease
        outputs
        write server
        check server
    """,
    "a compactor that is killed before it publishes leaves what the next one does not miss": f"""
        serve server {SHORT}
        write server
        stalling compactor 'before create manifest/ 2' compactor
        stalled compactor
        kill compactor
        write server
        compact
        write server
        check server
    """,
    "F3: a snapshot that was dropped while it was renewed stays gone": f"""
        {WRITTEN}
        run snapshot create --name short --ttl 1h
        stalling renewal {FIRST_EDIT} snapshot renew short --ttl 1h
        stalled renewal
        run snapshot renew short --ttl 1s
        gone_snapshot
        resume renewal
        ends renewal USAGE
        says renewal has expired
        no_snapshots
    """,
    "a snapshot at a recycled manifest id is made again": f"""
        {WRITTEN}
        stalling making {FIRST_EDIT} snapshot create --name kept
        stalled making
        recycle
        resume making
        ends making OK
        made_again snapshot
        collect
        serve server
        check server
    """,
    "an epoch at a recycled manifest id is not won": f"""
        {WRITTEN}
        stalling opener {FIRST_EDIT} serve {SHORT}
        stalled opener
        recycle
        resume opener
        ready opener
        made_again epoch
        write opener
        check opener
    """,
    "a publication at a recycled manifest id is made again": f"""
        {WRITTEN}
        stalling compactor 'before create manifest/ 2' compactor
        stalled compactor
        recycle
        resume compactor
        ends compactor OK
        made_again levels
        collect
        serve server
        check server
    """,
}


@pytest.mark.parametrize("name", SCHEDULES)
async def test_a_process_that_was_stopped_for_long_does_no_harm(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """It finds out before it acknowledges, serves, publishes or reports anything as done."""
    await ScheduleRun(processes, tmp_path).play(SCHEDULES[name])
