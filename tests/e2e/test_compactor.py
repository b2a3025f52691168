"""`shalekv compactor` as a process, and the processes that it starts."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from random import Random, SystemRandom
from subprocess import PIPE, Popen

import pytest

from shalekv.clock import LoopClock
from shalekv.core.compaction.jobs import WalJob
from shalekv.core.manifest import Manifest
from shalekv.core.tree import Tree
from shalekv.manifest.stored import StoredManifest
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from tests.kit.engine.compaction import CompactedDatabase, put, small_settings
from tests.kit.engine.naive_merge import NaiveTree, answers
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.child import EXIT_S, Child, Line
from tests.kit.processes.processes import SHALEKV, Processes, environment

KEYS = [b"key%04d" % n for n in range(400)]
SMALL = (
    *("--sst-bytes", "65536", "--subcompaction-memory-bytes", "8388608"),
    *("--wal-trigger-count", "1", "--l0-trigger-count", "1", "--compactor-poll-ms", "10"),
    *("--log-format", "json", "--log-level", "debug"),
)
# So slow that what runs is met while it runs; divided, each part takes half of it.
SLOW = ("--compaction-rate-bytes", "8192", "--subcompaction-count-max", "3")


@pytest.fixture
async def database(tmp_path: Path) -> CompactedDatabase:
    """A database in `tmp_path`: L0 and WAL have the same keys, and do not compress."""
    random = Random(3)
    database = await CompactedDatabase.begun(small_settings(sst_bytes=65_536, block_bytes=4_096))
    for slot in range(2):
        await database.write(*([put(key, random.randbytes(300))] for key in KEYS))
        if slot == 0:
            await database.run(WalJob(range(1), "the first"))
    await database.save(tmp_path)
    return database


async def check(database: CompactedDatabase, path: Path) -> Manifest:
    """The levels hold what was written to the slots up to c."""
    runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
    store = LocalStore(path, runtime)
    manifest = await StoredManifest(CasStore(store, runtime, StoreSettings())).refresh()
    naive = await NaiveTree.read(store, manifest)
    now_ms = manifest.logical_time_ms
    assert naive.answers(KEYS, now_ms) == answers(database.compacted(manifest), KEYS, now_ms)
    return manifest


def start(processes: Processes, path: Path, *flags: str) -> Child:
    return processes.start("compactor", "--url", path.as_uri(), *SMALL, *flags)


async def part_pids(child: Child, count: int) -> list[int]:
    """The processes of the first parts that it has started."""

    def accept(_line: Line) -> bool:
        return len(parts(child)) >= count

    await child.line(accept)
    return parts(child)


def parts(child: Child) -> list[int]:
    """The processes of parts that it has told of so far."""
    return [line["pid"] for line in child.lines() if line.get("event") == "part started"]


def has_ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], EXIT_S)[0])
    finally:
        os.close(descriptor)


async def test_killed_it_leaves_no_process_behind(
    processes: Processes, tmp_path: Path, database: CompactedDatabase
) -> None:
    """After kill -9 its processes end by themselves. The next compactor, with --once, merges WAL
    and L0 in processes of their own, gives up its lease, and ends with 0.
    """
    child = start(processes, tmp_path, *SLOW)
    pids = await part_pids(child, 2)
    os.kill(child.pid, signal.SIGKILL)
    assert all(map(has_ended, pids))
    await check(database, tmp_path)
    following = start(processes, tmp_path, "--once")
    assert await following.exited() == 0, following.report()
    manifest = await check(database, tmp_path)
    assert manifest.first_uncompacted_wal_id == len(database.written)
    assert not Tree.of(manifest).l0
    assert not any(f" {following.pid} " in lease.holder for lease in manifest.leases)
    assert len(parts(following)) >= 2
    assert all(map(has_ended, parts(following)))


async def test_a_part_that_is_killed_is_run_again(
    processes: Processes, tmp_path: Path, database: CompactedDatabase
) -> None:
    """The merge is given up with all its processes, nothing is published, and it begins anew; in
    the middle of that SIGTERM ends it with 0, its processes with it.
    """
    child = start(processes, tmp_path, *SLOW)
    pids = await part_pids(child, 2)
    os.kill(pids[0], signal.SIGKILL)
    line = await child.line(lambda line: line.get("event") == "compaction failed")
    assert "ended with -9" in line["problem"]
    assert all(map(has_ended, pids[:2]))
    assert Tree.of(await check(database, tmp_path)).l0
    await child.line(lambda _: len(parts(child)) > len(pids))
    os.kill(child.pid, signal.SIGTERM)
    assert await child.exited() == 0, child.report()
    assert all(map(has_ended, parts(child)))
    manifest = await check(database, tmp_path)
    assert Tree.of(manifest).l0
    assert [lease.holder for lease in manifest.leases] == ["test"]


async def test_a_second_compactor_takes_over(
    processes: Processes, tmp_path: Path, database: CompactedDatabase
) -> None:
    """The older one ends with the exit code of a fenced process."""
    older = start(processes, tmp_path)
    await older.line(lambda line: line.get("event") == "compacting")
    newer = start(processes, tmp_path)
    assert await older.exited() == 4, older.report()
    await newer.line(lambda line: line.get("event") == "compacting")
    assert await newer.stop() == 0
    await check(database, tmp_path)


def hurried(path: Path) -> tuple[bool, int]:
    """Start one that would wait for an hour, hurry it, and close its pipe when it has begun."""
    argv = [SHALEKV, "compactor", "--url", path.as_uri(), "--parent-pipe"]
    lazy = ("--wal-trigger-count", "1000", "--compactor-poll-ms", "3600000")
    with Popen([*argv, *lazy], stdin=PIPE, stderr=PIPE, text=True, env=environment()) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write("hurry\n")
        child.stdin.flush()
        has_begun = any("first_slot" in line for line in child.stderr)
        child.stdin.close()
        child.stderr.read()
        return has_begun, child.wait(EXIT_S)


async def test_it_ends_with_the_pipe_of_its_parent(
    tmp_path: Path, database: CompactedDatabase
) -> None:
    """A line of its standard input hurries it, and at the end of that it ends with 0."""
    assert await asyncio.to_thread(hurried, tmp_path) == (True, 0)
    manifest = await check(database, tmp_path)
    assert manifest.first_uncompacted_wal_id == len(database.written)


async def test_no_database_is_told(processes: Processes, tmp_path: Path) -> None:
    """At a URL without a database it ends with the exit code that says so."""
    child = start(processes, tmp_path / "nothing")
    assert await child.exited() == 3, child.report()
