"""`shalekv collector` as a process: its log lines, its end, and databases that fail."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from shalekv.cli.console.exit_codes import ExitCode
from tests.kit.engine.collection import CollectedDatabase, load, save
from tests.kit.processes.child import EXIT_S, Line
from tests.kit.processes.processes import SHALEKV, Processes, environment
from tests.kit.processes.scraping import fetched, scraped

METRICS = ("--metrics", "127.0.0.1:0")
FAST = ("--collect-interval-ms", "10", "--log-format", "json")


async def with_garbage(root: Path) -> CollectedDatabase:
    """Files of a database with garbage, all long ago."""
    database = await CollectedDatabase.created()
    await database.wal(4)
    await database.compact(2)
    await database.merge()
    save(database, root)
    return database


def is_idle(url: str, line: Line) -> bool:
    is_collection = line.get("event") == "collected" and line["url"] == url
    return is_collection and not line["deleted_objects"]


async def test_databases_are_collected_until_the_process_is_stopped(
    processes: Processes, tmp_path: Path
) -> None:
    """A line for each collection; one that fails is logged each time, and stops no other. Metrics
    count them; the process is ready, but as no server.
    """
    databases = [await with_garbage(tmp_path / name) for name in ("one", "two")]
    urls = [f"file://{tmp_path}/{name}" for name in ("one", "none", "two")]
    child = processes.start(
        "collector", *(part for url in urls for part in ("--url", url)), *FAST, *METRICS
    )
    for url in (urls[0], urls[2]):
        line = await child.line(partial(is_idle, url))
        assert line["role"] == "collector"
        assert line["kept_objects"]["not yet merged into the levels"] == 1
    failed = await child.line(lambda line: line.get("event") == "collection failed")
    assert (failed["url"], failed["reason"]) == (urls[1], "DATABASE_NOT_FOUND")
    samples = await scraped(child)
    assert samples['collections_total{outcome="failed"}'] > 0
    assert samples['collections_total{outcome="ok"}'] > 1
    assert samples['store_billed_requests_total{kind="list",process="collector"}'] > 0
    assert "event_loop_lag_seconds" in samples
    probes = [await fetched(child, path) for path in ("/livez", "/readyz", "/readyz?role=writer")]
    assert [probe.status for probe in probes] == [200, 200, 503]
    assert await child.stop() == ExitCode.OK
    collected = [line for line in child.lines() if line.get("deleted_objects")]
    assert sorted(line["url"] for line in collected) == sorted((urls[0], urls[2]))
    for database, name in zip(databases, ("one", "two"), strict=True):
        left = load(tmp_path / name, database)
        assert left.names() == await left.needed()


async def test_once_ends_with_the_code_of_what_failed(processes: Processes, tmp_path: Path) -> None:
    """All databases are collected, whichever fails."""
    database = await with_garbage(tmp_path / "one")
    urls = ("--url", f"file://{tmp_path}/none", "--url", f"file://{tmp_path}/one")
    await processes.run("collector", *urls, "--once", *FAST, code=ExitCode.DATABASE_NOT_FOUND)
    left = load(tmp_path / "one", database)
    assert left.names() == await left.needed()
    await processes.run("collector", *urls[2:], "--once", *FAST, code=ExitCode.OK)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """With --parent-pipe the end of standard input is the end; no pipe is a usage error."""
    argv = [SHALEKV, "collector", "--url", f"file://{tmp_path}/none", "--parent-pipe", *FAST]
    env = environment()
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert child.stderr is not None
    assert b"collecting" in child.stderr.readline()
    child.communicate(timeout=EXIT_S)
    assert child.returncode == ExitCode.OK
    alone = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXIT_S, check=False, env=env
    )
    assert alone.returncode == ExitCode.USAGE
    assert b"--parent-pipe" in alone.stderr
