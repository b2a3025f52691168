"""`shalekv compactor` as a process, and the processes that it starts."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom
from subprocess import PIPE, Popen

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.clock import LoopClock
from shalekv.format.names import wal_name
from shalekv.protocol.compaction.jobs import WalJob
from shalekv.protocol.manifest import Manifest, Version
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from shalekv.store.manifests import StoredManifest
from tests.kit.engine.compaction import CompactedDatabase, put, small_settings
from tests.kit.engine.naive_merge import NaiveLevels, answers
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.child import EXIT_S, Child, Line
from tests.kit.processes.processes import SHALEKV, Processes, environment
from tests.kit.processes.scraping import scraped

KEYS = [b"key%04d" % n for n in range(400)]
METRICS = ("--metrics", "127.0.0.1:0")
SMALL = (
    *("--sst-bytes", "65536", "--subcompaction-memory-bytes", "8388608"),
    *("--wal-trigger-age-ms", "0", "--l0-trigger-count", "1", "--compactor-idle-poll-ms", "10"),
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


async def saved(path: Path, slots: int = 3) -> CompactedDatabase:
    """A small database in the folder, nothing of it compacted."""
    database = await CompactedDatabase.begun()
    for slot in range(slots):
        await database.write([put(KEYS[slot], b"v" * 100)])
    await database.save(path)
    return database


async def check(database: CompactedDatabase, path: Path) -> Manifest:
    """The levels hold what was written to the slots up to c."""
    runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
    store = LocalStore(path, runtime)
    manifest = await StoredManifest(CasStore(store, runtime, StoreSettings())).refresh()
    naive = await NaiveLevels.read(store, manifest)
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
    """The processes of parts that it has logged up to now."""
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
    assert not Version.of(manifest).l0
    assert not any(f" {following.pid} " in lease.holder for lease in manifest.leases)
    assert len(parts(following)) >= 2
    assert all(map(has_ended, parts(following)))


async def test_a_part_that_is_killed_is_run_again(
    processes: Processes, tmp_path: Path, database: CompactedDatabase
) -> None:
    """The merge is given up with all its processes, nothing is published, and it begins again; in
    the middle of that SIGTERM ends it with 0, its processes with it.
    """
    child = start(processes, tmp_path, *SLOW)
    pids = await part_pids(child, 2)
    os.kill(pids[0], signal.SIGKILL)
    line = await child.line(lambda line: line.get("event") == "compaction failed")
    assert "ended with -9" in line["problem"]
    assert all(map(has_ended, pids[:2]))
    assert Version.of(await check(database, tmp_path)).l0
    await child.line(lambda _: len(parts(child)) > len(pids))
    os.kill(child.pid, signal.SIGTERM)
    assert await child.exited() == 0, child.report()
    assert all(map(has_ended, parts(child)))
    manifest = await check(database, tmp_path)
    assert Version.of(manifest).l0
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
    lazy = ("--wal-trigger-age-ms", "3600000")
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


async def test_a_pattern_without_a_database_is_reported(
    processes: Processes, tmp_path: Path
) -> None:
    """At a URL without a database it ends with the exit code for that."""
    child = start(processes, tmp_path / "nothing")
    assert await child.exited() == 3, child.report()


def urls(*paths: Path) -> list[str]:
    return [part for path in paths for part in ("--url", path.as_uri())]


def is_reported(event: str, path: Path) -> Callable[[Line], bool]:
    return lambda line: line.get("event") == event and line["url"] == path.as_uri()


async def test_what_fails_for_one_database_does_not_end_the_others(
    processes: Processes, tmp_path: Path
) -> None:
    """One is compacted, one is damaged, one is created later, one is taken over: every line names
    its database, metrics have all of them; SIGTERM ends it with 0, and its lease with it.
    """
    good, damaged, later, taken = (tmp_path / name for name in ("good", "bad", "later", "taken"))
    compacted = await saved(good)
    await saved(damaged)
    (damaged / wal_name(1)).write_bytes(b"no object of ours")
    await saved(taken)
    child = processes.start("compactor", *urls(good, damaged, later, taken), *SMALL, *METRICS)
    await child.line(is_reported("compacted", good))
    failed = await child.line(is_reported("compactor ended by an error", damaged))
    assert failed["reason"] == "TRUNCATED"
    failed = await child.line(is_reported("compactor ended by an error", later))
    assert failed["reason"] == "DATABASE_NOT_FOUND"
    created = await saved(tmp_path / "made")
    (tmp_path / "made").rename(later)  # in one step: it is looked for all the time
    await child.line(is_reported("compacted", later))
    newer = start(processes, taken)
    await newer.line(is_reported("compacting", taken))
    given_up = await child.line(is_reported("database given up", taken))
    assert given_up["reason"] == "SUPERSEDED"
    samples = await scraped(child)
    assert samples['compactions_total{kind="wal"}'] > 1
    assert samples['store_billed_requests_total{kind="list",process="compactor"}'] > 0
    assert await child.stop() == ExitCode.OK, child.report()
    about = [line for line in child.lines() if line["event"] not in {"asked to stop", "stopped"}]
    assert all("url" in line for line in about), child.report()
    for database, path in ((compacted, good), (created, later)):
        manifest = await check(database, path)
        assert manifest.first_uncompacted_wal_id == len(database.written)
        assert not manifest.leases
    assert newer.running


async def test_taken_over_everywhere_it_ends(processes: Processes, tmp_path: Path) -> None:
    """Once the last of its databases has another compactor, with the exit code of one database."""
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        await saved(path)
    older = processes.start("compactor", *urls(*paths), *SMALL)
    for path in paths:
        await older.line(is_reported("compacting", path))
    newer = processes.start("compactor", *urls(*paths), *SMALL)
    assert await older.exited() == ExitCode.FENCED, older.report()
    assert newer.running


async def test_once_compacts_every_database(processes: Processes, tmp_path: Path) -> None:
    """It ends with the code of the first that failed; the others are compacted all the same."""
    paths = [tmp_path / name for name in ("one", "none", "two")]
    databases = {path: await saved(path) for path in (paths[0], paths[2])}
    failing = await processes.run(
        "compactor", *urls(*paths), "--once", *SMALL, code=ExitCode.DATABASE_NOT_FOUND
    )
    assert any(map(is_reported("compactor ended by an error", paths[1]), failing.lines()))
    for path, database in databases.items():
        manifest = await check(database, path)
        assert manifest.first_uncompacted_wal_id == len(database.written)
    await processes.run("compactor", *urls(*databases), "--once", *SMALL, code=ExitCode.OK)
