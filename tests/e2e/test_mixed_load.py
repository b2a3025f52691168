"""Compaction and collection all the time, beside a load of every kind, snapshots and open scans."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shalekv.format import names
from tests.e2e.mixed_load import MixedLoad
from tests.e2e.snapshot_load import SnapshotLoad
from tests.judging import remains
from tests.kit.processes.child import Child, Line
from tests.kit.processes.meanwhile import ALONE, Meanwhile
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import is_fence, wal_path

LOAD_S = 20.0
SOAK_S = 150.0
PATIENCE_S = 300.0  # how long a load goes on until there was enough to do beside it
ENOUGH = 6  # compactions of levels, and collections
LEASE_S = 4
# The least that is allowed, so that all limits are met all the time.
TINY = {
    "wal-trigger-bytes": 32 << 10,
    "wal-trigger-count": 64,
    "wal-trigger-age-ms": 300,
    "sst-bytes": 64 << 10,
    "block-bytes": 1 << 10,
    "base-level-bytes": 64 << 10,
    "level-multiplier-count": 2,
    "l0-trigger-count": 2,
    "tombstone-age-s": 2,
    "subcompaction-count-max": 1,
    "compactor-poll-ms": 100,
    "compactor-lease-ttl-s": LEASE_S,
    "collect-interval-ms": 300,
    "collect-age-s": 1,
    "wal-retention-s": 0,
    "foreign-age-s": 5,
    "memtable-segment-bytes": 64 << 10,
    "skip-memtable-bytes": 64 << 10,
    "block-cache-bytes": 64 << 10,
    "metadata-cache-bytes": 1 << 20,
    "scan-message-bytes": 4 << 10,
    "snapshot-ttl-s": 20,  # a server that stands still for seconds is no fault here
    "fence-poll-ms": 50,
}
FLAGS = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]


@pytest.mark.timeout(600)
async def test_nothing_is_lost_or_comes_back_while_all_is_compacted_and_collected(
    processes: Processes, tmp_path: Path
) -> None:
    """Whatever reads, scans and snapshots are told is what was acknowledged; nothing that is read
    is ever missing, a crash loses nothing, and at the end no object is left that nobody needs.
    """
    await check_mixed_load(processes, tmp_path / "db", seed=1, duration_s=LOAD_S)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seed", range(2, 5))
async def test_the_same_for_minutes(processes: Processes, tmp_path: Path, seed: int) -> None:
    """The same with other seeds, until there are several levels."""
    await check_mixed_load(processes, tmp_path / "db", seed=seed, duration_s=SOAK_S)


async def check_mixed_load(
    processes: Processes, folder: Path, *, seed: int, duration_s: float
) -> None:
    """Load a database, crash it, and look at all that is left."""
    database = Meanwhile(processes, folder)
    server = await database.serve(*FLAGS)
    load, snapshots = MixedLoad(server.listen, seed), SnapshotLoad(database)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        stopped = tasks.create_task(_stop_after(duration_s, server, load, snapshots))
        await snapshots.run()
        await stopped
    snapshots.check(load.commits)
    load.check()
    await load.check_end(server.listen)
    check_children(server)
    await server.kill()

    again = await database.serve(*ALONE)
    await load.check_end(again.listen)
    assert await again.stop() == 0, again.report()
    await snapshots.end()
    await check_remains(database)
    views = load.views.views
    say(f"seed {seed}: {dict(load.done)}, {len(load.commits)} commits, {len(views)} views")
    say(f"{sum(view.reads for view in views)} reads of them, {snapshots.looks} of snapshots")


async def _stop_after(
    duration_s: float, server: Child, load: MixedLoad, snapshots: SnapshotLoad
) -> None:
    began_s = time.monotonic()
    while goes_on(server, began_s, duration_s):
        await snapshots.passed()
    snapshots.stop()
    await load.stop()


def goes_on(server: Child, began_s: float, duration_s: float) -> bool:
    """Whether a load is to go on: for so long, and until compactor and collector had enough to do.

    On a busy machine they come to it late.
    """
    passed_s = time.monotonic() - began_s
    if passed_s < duration_s or passed_s >= PATIENCE_S:
        return passed_s < duration_s
    lines = server.lines()
    return min(len(_merges(lines)), len(_collections(lines))) < ENOUGH


def check_children(server: Child) -> None:
    """Compactor and collector have worked all the time, and nobody met what should not be."""
    lines = server.lines()
    bad = [each for each in lines if each.get("level") in ("error", "critical")]
    assert not bad, bad[:5]
    ended = [each for each in lines if each.get("event") == "child process has ended"]
    assert not ended, ended
    compacted = [each for each in lines if each.get("event") == "compacted"]
    merges, collected = _merges(lines), _collections(lines)
    deleted = sum(each["deleted_objects"] for each in collected)
    levels = max((each["to_level"] for each in merges if not _is_system(each)), default=0)
    say(f"{len(compacted)} compactions, {len(merges)} of levels down to level {levels}")
    say(f"{len(collected)} collections that deleted {deleted} objects")
    assert len(merges) >= ENOUGH
    assert len(collected) >= ENOUGH


def _merges(lines: Sequence[Line]) -> list[Line]:
    return [each for each in lines if each.get("event") == "compacted" and "from_level" in each]


def _collections(lines: Sequence[Line]) -> list[Line]:
    return [each for each in lines if each.get("deleted_objects")]


def _is_system(line: Line) -> bool:
    return bool(line["to_level"] == 63)


async def check_remains(database: Meanwhile) -> None:
    """After compaction and collection there is what is needed, all of it sound, and no more."""
    await database.compact()
    # What the crash has left behind expires, and each edit leaves a manifest.
    was_held = True
    while was_held:
        was_held = _held(database)
        await database.collect()
    await database.collect()
    manifest = database.manifest()
    assert not manifest.pending_loads
    objects = {
        name: False
        for folder in (names.MANIFEST_FOLDER, names.LEVELS_FOLDER)
        for name in database.objects(folder)
    }
    for name in database.objects(names.WAL_FOLDER):
        slot = names.parse_wal_name(name)
        objects[name] = slot is not None and is_fence(wal_path(database.folder, slot))
    assert remains.missing([manifest], objects) == {}
    assert remains.unexplained([manifest], objects, current=manifest) == []
    audit = await database.run("fsck", "--deep")
    assert audit.stdout() == ""
    assert audit.stderr().startswith("clean"), audit.report()
    assert "orphan" not in audit.stderr(), audit.report()
    say(audit.stderr().strip())


def _held(database: Meanwhile) -> bool:
    manifest = database.manifest()
    return bool(manifest.snapshots or manifest.leases)


def say(text: str) -> None:
    """Print what happened."""
    sys.stdout.write(f"{text}\n")
