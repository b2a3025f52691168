"""Acknowledged writes and answered reads stay true when processes are killed and stopped."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from tests.e2e.crashes.clients import Clients
from tests.e2e.crashes.fleet import WITHIN_S, Fleet, Role
from tests.e2e.crashes.troubles import Kind, Plan, Troubles, draw_troubles
from tests.kit.processes.bucket_troubles import TroubledBucket, troubled_bucket
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of
from tests.servers.s3 import S3Server
from tests.sim.history import Outcome
from tests.sim.levels import check_history
from tests.sim.requests import COUNTED

WRITER, COMPACTOR, COLLECTOR, READER = Role
KILL, STOP, TAKE_OVER = Kind
IN_FOLDER: Plan = {
    WRITER: {KILL: 1, STOP: 1},
    COMPACTOR: {KILL: 1, STOP: 1},
    COLLECTOR: {KILL: 1},
    READER: {KILL: 1},
}
IN_BUCKET: Plan = {
    WRITER: {KILL: 1, TAKE_OVER: 1},
    COMPACTOR: {KILL: 1},
    COLLECTOR: {STOP: 1},
    READER: {STOP: 1},
}
# Five times both are 200 kills and 50 stops.
SOAK_ROUNDS = 5
IN_FOLDER_SOAK: Plan = {
    WRITER: {KILL: 9, STOP: 2, TAKE_OVER: 2},
    COMPACTOR: {KILL: 6, STOP: 2},
    COLLECTOR: {KILL: 4, STOP: 1},
    READER: {KILL: 5, STOP: 1},
}
IN_BUCKET_SOAK: Plan = {
    WRITER: {KILL: 6, STOP: 1, TAKE_OVER: 1},
    COMPACTOR: {KILL: 4, STOP: 1},
    COLLECTOR: {KILL: 3, STOP: 1},
    READER: {KILL: 3, STOP: 1},
}
ACKNOWLEDGED_MIN = 100  # in each run
READERS = 2
AFTERWARDS = 40  # writes that must go through when all is over
REPEATED = 100  # requests that are sent again to a fresh writer
# Steps of a search for linearizability; where it gives up, the check of the commit order covers it.
STEPS, STEPS_SOAK = 1_000, 200_000


async def crash(
    cluster: Cluster, kept: Path, plan: Plan, purpose: str, bucket: TroubledBucket | None = None
) -> None:
    """Kill and stop by plan, under load; then judge. Raises `Violation`, `AssertionError`.

    What collectors delete goes to the folder `kept`.
    """
    random = random_of(purpose)
    fleet = Fleet(cluster, bucket, kept, Random(random.getrandbits(64)))
    clients = Clients(fleet, Random(random.getrandbits(64)))
    troubles = Troubles(fleet, clients, Random(random.getrandbits(64)))
    await under_load(fleet, clients, troubles, plan, random)
    await fleet.stop()
    last = await troubles.start_writer()
    await clients.read_all(last)
    await clients.repeat(last, REPEATED)
    await clients.read_all(last)
    assert await last.child.stop(within_s=WITHIN_S) == ExitCode.OK, last.child.report()
    await cluster.run("fsck", "--deep")
    history = clients.history
    outcomes = {each.name.lower(): len(history.attempts(each)) for each in Outcome}
    sys.stdout.write(
        f"{purpose}: {len(fleet.writers)} writers, attempts {outcomes}, {len(history.reads)} gets, "
        f"{len(history.scans)} scans, {len(clients.seen)} of replicas; paused for "
        f"{troubles.stopped_ms} ms; {dict(troubles.notes)}, told {dict(clients.reasons)}\n"
    )
    steps_max = STEPS if plan in (IN_FOLDER, IN_BUCKET) else STEPS_SOAK
    stored = await fleet.stored()
    check_history(history, stored, counters=[COUNTED], seen=clients.seen, steps_max=steps_max)
    planned = {(role, kind): n for role, kinds in plan.items() for kind, n in kinds.items()}
    assert troubles.made == Counter(planned)
    assert len(history.attempts(Outcome.ACKNOWLEDGED)) >= ACKNOWLEDGED_MIN


async def under_load(
    fleet: Fleet, clients: Clients, troubles: Troubles, plan: Plan, random: Random
) -> None:
    """All that is planned happens while clients write and read; then all goes well for a while."""
    drawn = {
        role: draw_troubles(role, counts, Random(random.getrandbits(64)))
        for role, counts in plan.items()
    }
    await troubles.start_writer(drawn[WRITER][0].pin)
    fleet.readers += await asyncio.gather(*(troubles.start_reader() for _ in range(READERS)))
    async with asyncio.TaskGroup() as load:
        load.create_task(clients.run())
        faults = None
        if fleet.bucket is not None:
            faults = load.create_task(fleet.make_store_faults())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(troubles.writers(drawn[WRITER]))
            tasks.create_task(troubles.compactors(drawn[COMPACTOR]))
            tasks.create_task(troubles.collectors(drawn[COLLECTOR]))
            tasks.create_task(troubles.readers(drawn[READER]))
        if faults is not None:
            faults.cancel()
        await clients.more(AFTERWARDS)
        for seat in range(READERS):
            await clients.more_reads(seat, 5)
        clients.stop()


@pytest.mark.timeout(600)
async def test_crashes_on_a_file_system(processes: Processes, tmp_path: Path) -> None:
    """The history stays consistent while writers, compactors, collectors and readers are killed,
    and stopped past the age at which their objects are collected.

    One order of commits, each whole and once, explains all replies; replicas show prefixes of it; a
    process that was overtaken ends as fenced; in the end all objects are sound.
    """
    cluster = Cluster(processes, tmp_path)
    await crash(cluster, tmp_path / "kept", IN_FOLDER, "crashes in a folder")


@pytest.mark.timeout(600)
async def test_crashes_on_s3_behind_a_faulty_proxy(
    processes: Processes, s3_server: S3Server, tmp_path: Path
) -> None:
    """The same on a real S3 server, to which requests and from which replies are late and lost."""
    async with troubled_bucket(s3_server) as bucket:
        cluster = Cluster(processes, tmp_path, bucket=bucket.url, env=bucket.env)
        await crash(cluster, tmp_path, IN_BUCKET, "crashes on S3", bucket)


@pytest.mark.soak
@pytest.mark.timeout(3_000)
async def test_crashes_for_long(processes: Processes, s3_server: S3Server, tmp_path: Path) -> None:
    """Both tests above hold with 200 kills and 50 stops."""
    for number in range(SOAK_ROUNDS):
        folder = tmp_path / str(number)
        purpose = f"crashes for long {number}"
        await crash(Cluster(processes, folder), folder / "kept", IN_FOLDER_SOAK, purpose)
        async with troubled_bucket(s3_server) as bucket:
            cluster = Cluster(processes, folder, bucket=bucket.url, env=bucket.env)
            await crash(cluster, folder / "s3", IN_BUCKET_SOAK, purpose, bucket)
