"""Compaction and collection all the time, beside a load of every kind, on a real S3 server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from uuid import uuid4

import pytest

from tests.e2e.mixed_load import BEHIND_MS, PACE, MixedLoad
from tests.kit.processes.child import Child, Line
from tests.kit.processes.cluster import ALONE, TINY
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of
from tests.servers.s3 import S3Server

LOAD_S, SOAK_S = 5.0, 300.0
LOAD_S_MAX = 300.0  # maximum duration of a load until enough was compacted and collected
ENOUGH, ENOUGH_SOAK = 2, 10  # compactions of levels, and collections
FLAGS = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]


RESTLESS = (
    *("--poll-interval-ms", "50", "--manifest-interval-ms", "300"),
    *("--reader-snapshot-ttl-s", "20", "--block-cache-bytes", "1048576"),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("duration_s", "enough"),
    [(LOAD_S, ENOUGH), pytest.param(SOAK_S, ENOUGH_SOAK, marks=pytest.mark.soak)],
)
async def test_nothing_is_lost_or_comes_back_while_all_is_compacted_and_collected(
    processes: Processes, s3_server: S3Server, duration_s: float, enough: int
) -> None:
    """Replies to reads, scans, snapshots and replicas are states of the log; nothing that is read
    is ever missing, and a crash loses nothing.
    """
    bucket = f"mixed-{uuid4().hex}"
    s3_server.create_bucket(bucket)
    url = f"s3://{bucket}/database"
    env = s3_server.environment | {"SHALEKV_STORE__ENDPOINT_URL": s3_server.endpoint}
    server = await processes.serve(url, *FLAGS, env=env)
    readers = await asyncio.gather(*(processes.read(url, *RESTLESS, env=env) for _ in range(2)))
    addresses = [reader.listen for reader in readers]
    load = MixedLoad(server.listen, random_of("mixed load").getrandbits(32), addresses)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        began_s = time.monotonic()
        while goes_on(server, time.monotonic() - began_s, duration_s, enough):
            await load.passed(PACE)
        await load.stop()
    load.check()
    for reader in readers:
        assert load.done[reader.listen]
        await load.check_end(reader.listen, behind_ms=BEHIND_MS)
        assert not errors_of(reader), errors_of(reader)[:5]
        assert await reader.stop() == 0, reader.report()
    check_children(server, enough)
    await server.kill()
    again = await processes.serve(url, *ALONE, env=env)
    await load.check_end(again.listen)
    assert await again.stop() == 0, again.report()
    fsck = await processes.run("fsck", "--deep", "--url", url, env=env)
    assert fsck.stderr().startswith("clean"), fsck.report()
    views = load.views.views
    sys.stdout.write(f"{dict(load.done)}, {len(load.commits)} commits, {len(views)} views\n")


def goes_on(server: Child, passed_s: float, duration_s: float, enough: int) -> bool:
    """Return whether a load continues: for this time, and until compactor and collector did enough.

    On a busy machine they come to it late.
    """
    if passed_s < duration_s or passed_s >= LOAD_S_MAX + duration_s:
        return passed_s < duration_s
    lines = server.lines()
    return min(len(_merges(lines)), len(_collections(lines))) < enough


def errors_of(child: Child) -> list[Line]:
    return [each for each in child.lines() if each.get("level") in ("error", "critical")]


def check_children(server: Child, enough: int) -> None:
    """Compactor and collector have worked all the time, and met nothing that should not be."""
    lines = server.lines()
    assert not errors_of(server), errors_of(server)[:5]
    assert not [each for each in lines if each.get("event") == "child process has ended"]
    assert len(_merges(lines)) >= enough
    assert len(_collections(lines)) >= enough


def _merges(lines: Sequence[Line]) -> list[Line]:
    return [each for each in lines if each.get("event") == "compacted" and "from_level" in each]


def _collections(lines: Sequence[Line]) -> list[Line]:
    return [each for each in lines if each.get("deleted_objects")]
