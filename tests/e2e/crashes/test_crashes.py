"""Whatever is killed, stands still and goes on: what clients were told stays true."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.crashes.crashing import Crashing, Done
from tests.e2e.crashes.fleet import Role
from tests.e2e.crashes.places import InFolder, in_bucket
from tests.e2e.crashes.troubles import Kind, Plan
from tests.kit.processes.processes import Processes
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

WRITER, COMPACTOR, COLLECTOR, READER = Role
KILL, STOP, TAKE_OVER = Kind
# Together 20 kills and 5 stops.
IN_FOLDER: Plan = {
    WRITER: {KILL: 5, STOP: 1, TAKE_OVER: 1},
    COMPACTOR: {KILL: 3, STOP: 1},
    COLLECTOR: {KILL: 2, STOP: 1},
    READER: {KILL: 2},
}
IN_BUCKET: Plan = {
    WRITER: {KILL: 3, STOP: 1, TAKE_OVER: 1},
    COMPACTOR: {KILL: 2},
    COLLECTOR: {KILL: 1},
    READER: {KILL: 2, STOP: 1},
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
ACKNOWLEDGED_MIN = 200  # in each run


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """An S3 server whose conditions hold."""
    with versitygw() as running:
        yield running


async def crash_in_folder(processes: Processes, folder: Path, plan: Plan, seed: int) -> Done:
    """One run on `file://`."""
    return await Crashing(processes, InFolder(folder / "db"), folder / "kept", seed).run(plan)


async def crash_in_bucket(
    processes: Processes,
    s3: S3Server,
    kept: Path,
    plan: Plan,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Done:
    """One run on S3, behind a proxy that makes faults."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    async with in_bucket(s3, seed) as place:
        done = await Crashing(processes, place, kept, seed).run(plan)
        assert place.proxy.cuts
        return done


def check_counts(done: Done, plan: Plan) -> None:
    """All that was planned has happened, and much was acknowledged meanwhile."""
    planned = Counter(
        {(role, kind): n for role, kinds in plan.items() for kind, n in kinds.items()}
    )
    assert done.made == planned
    assert done.acknowledged >= ACKNOWLEDGED_MIN


@pytest.mark.timeout(900)
async def test_crashes_on_a_file_system(processes: Processes, tmp_path: Path) -> None:
    """While writers, compactors, collectors and readers are killed 12 times, and stopped 3 times
    past the age at which their objects are collected, all that clients are told is explained by
    one order of commits that each are there whole and once, replicas show prefixes of it, who was
    overtaken ends as fenced, and in the end all objects are sound.
    """
    check_counts(await crash_in_folder(processes, tmp_path, IN_FOLDER, 1), IN_FOLDER)


@pytest.mark.timeout(900)
async def test_crashes_on_s3_behind_a_faulty_proxy(
    processes: Processes, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above with 8 kills and 2 stops, on a real S3 server to which connections are cut, and by
    way to which requests and replies are delayed and lost.
    """
    done = await crash_in_bucket(processes, s3, tmp_path, IN_BUCKET, 2, monkeypatch)
    check_counts(done, IN_BUCKET)


@pytest.mark.soak
@pytest.mark.timeout(3_000)
async def test_crashes_for_long(
    processes: Processes, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As both above, with 200 kills and 50 stops."""
    made: Counter[Kind] = Counter()
    for number in range(SOAK_ROUNDS):
        seed = 100 + 2 * number
        folder = tmp_path / str(seed)
        done = await crash_in_folder(processes, folder, IN_FOLDER_SOAK, seed)
        check_counts(done, IN_FOLDER_SOAK)
        made += done.kinds
        folder = tmp_path / str(seed + 1)
        done = await crash_in_bucket(processes, s3, folder, IN_BUCKET_SOAK, seed + 1, monkeypatch)
        check_counts(done, IN_BUCKET_SOAK)
        made += done.kinds
    sys.stdout.write(f"{made}\n")
    assert (made[KILL], made[STOP]) == (200, 50)
