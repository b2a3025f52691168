"""A database in a bucket while the store loses replies, throttles, refuses, or is unreachable.

Acknowledged writes stay, none is applied twice, and service resumes by itself when the fault is
over.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes.bucket_troubles import troubled_bucket
from tests.kit.processes.processes import Processes
from tests.kit.processes.schedule import ScheduleRun
from tests.servers.s3 import S3Server

SCHEDULES = {
    "replies are lost and the store throttles: no client notices": """
        serve server
        load server 20
        lose_replies 3
        load server 40
        throttle
        load server 40
        lose_replies 3
        load server 40
        all_met
        upkeep server
        check server
    """,
    "killed and overtaken while replies are lost": """
        serve first
        load first 30
        lose_replies 4
        load first 40
        kill first
        serve second
        load second 40
        lose_replies 4
        serve third
        load third 40
        fenced second
        check third
    """,
    "the store refuses everything, or is away: the server waits, and goes on by itself": """
        serve server
        load server 30
        deny
        times_out server
        heal
        load server 30
        vanish
        times_out server
        appear
        load server 30
        upkeep server
        check server
    """,
    "asked to stop while the store refuses, it ends when its grace is over": """
        serve server --shutdown-grace-ms 500
        load server 30
        deny
        times_out server
        fails server STORE
        heal
        serve next
        load next 20
        check next
    """,
}
CASES = [(name, False) for name in SCHEDULES] + [(name, True) for name in list(SCHEDULES)[:2]]


@pytest.mark.parametrize(("name", "is_two_phase"), CASES)
async def test_a_store_in_trouble_breaks_no_promise(
    processes: Processes, s3_server: S3Server, tmp_path: Path, name: str, *, is_two_phase: bool
) -> None:
    """Natively, and with compare-and-swap in two phases where that makes a difference."""
    records = tmp_path / "records.db" if is_two_phase else None
    async with troubled_bucket(s3_server, records) as bucket:
        await ScheduleRun(processes, tmp_path, bucket).play(SCHEDULES[name])
