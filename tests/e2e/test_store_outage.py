"""A store that is full, away, silent, or refuses: what users and orchestrators see of it."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shalekv.cli.console.connection import ClientExit
from shalekv.cli.console.exit_codes import ExitCode
from tests.kit.processes.bucket_troubles import TroubledBucket, troubled_bucket
from tests.kit.processes.child import READY_S, Child, event
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.servers.proxy import ACCESS_DENIED
from tests.servers.s3 import S3Server

SOON = ("--fence-poll-ms", "500", "--read-attempts", "2")
GRACE_MS, ENDS_WITHIN_S = 1_000, 40.0  # less than the time for opening
ASKED_MAX = 20
UNREACHABLE_S = 5  # an outage that is reported
READ, WRITE = "shalekv.read", "shalekv.write"


@pytest.fixture
async def bucket(s3_server: S3Server) -> AsyncIterator[TroubledBucket]:
    async with troubled_bucket(s3_server) as it:
        yield it


async def health(processes: Processes, server: Child) -> list[str]:
    """Return the health of the whole server, of reads, and of writes."""
    answers = []
    for flags in ((), ("--service", READ), ("--service", WRITE)):
        asked = await processes.run("health", "--addr", server.listen, *flags)
        code = await asked.exited()
        assert code == (asked.stdout() != "SERVING\n"), asked.report()
        answers.append(asked.stdout().strip())
    return answers


async def until_healthy(processes: Processes, server: Child, *expected: str) -> None:
    """Ask until the health is that; lines of the log may tell of a moment before."""
    async with asyncio.timeout(READY_S):
        while await health(processes, server) != list(expected):
            pass


async def printed(processes: Processes, server: Child, *argv: str) -> str:
    run = await processes.run(*argv, "--addr", server.listen, code=0)
    return run.stdout()


async def answered(processes: Processes, server: Child, says: str, *argv: str) -> Child:
    """Run a command with a deadline that passes, to the end that its server has explained.

    The server does that just before the deadline: if it comes too late for the client, ask again.
    """
    said = ""
    for _ in range(ASKED_MAX):
        late = await processes.run(*argv, "--addr", server.listen, "--timeout-ms", "2000")
        code = await late.exited()
        assert code in {ClientExit.NOT_APPLIED, ClientExit.UNKNOWN}, late.report()
        said = late.stderr()
        if re.search(says, said):
            return late
    raise AssertionError(f"not explained in time, {ASKED_MAX} times; the last time: {said}")


def limit_files(server: Child, size_bytes: int) -> None:
    """Let a process write no file that is larger, as a full disk does."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size_bytes, limits[1]))


async def test_a_disk_that_is_full(processes: Processes, tmp_path: Path) -> None:
    """A write ends with the reason. After some seconds health, status and top have it as well,
    while reads continue; all is well again when there is space, and the write was applied.
    """
    server = await Cluster(processes, tmp_path).serve(*ALONE)
    await printed(processes, server, "put", "a", "1")
    assert await health(processes, server) == ["SERVING"] * 3
    limit_files(server, 0)
    unreachable = r"store unreachable for (\d+) (?:ms|s): File too large"
    late = await answered(processes, server, unreachable, "put", "b", "2")
    assert await late.exited() == ClientExit.UNKNOWN, late.report()
    assert "It may be applied or not" in late.stderr()
    reported = await server.line(event("not ready"))
    assert (reported["calls"], reported["level"]) == ("writes", "error")
    since = re.fullmatch(unreachable, reported["problem"])
    assert since is not None, reported
    assert int(since[1]) >= UNREACHABLE_S
    assert await health(processes, server) == ["NOT_SERVING", "SERVING", "NOT_SERVING"]
    status = await printed(processes, server, "status", "--format", "table")
    assert "writes fail: store unreachable for " in status
    assert "File too large" in status
    top = await printed(processes, server, "top", "--once")
    assert "writes fail: store unreachable for " in top
    assert await printed(processes, server, "get", "a") == "1\n"
    limit_files(server, resource.RLIM_INFINITY)
    await server.line(event("ready again"))
    assert await health(processes, server) == ["SERVING"] * 3
    assert await printed(processes, server, "get", "b") == "2\n"
    assert await server.stop() == 0


async def test_a_store_that_is_away(processes: Processes, bucket: TroubledBucket) -> None:
    """Writer and reader report it for reads, and serve again when it is back."""
    url, env = bucket.url, bucket.env
    writer = await processes.serve(url, *ALONE, *SOON, env=env)
    reader = await processes.read(url, "--read-attempts", "2", env=env)
    await bucket.vanish()
    for server in (writer, reader):
        reported = await server.line(event("not ready"))
        assert reported["calls"] == "reads"
        assert (
            "Connect call failed" in reported["problem"] or "cannot connect" in reported["problem"]
        )
    assert await health(processes, writer) == ["NOT_SERVING"] * 3
    assert await health(processes, reader) == ["NOT_SERVING"] * 3
    status = await printed(processes, reader, "status", "--format", "table")
    assert "reads fail: store unreachable for " in status
    await bucket.appear()
    await asyncio.gather(*(server.line(event("ready again")) for server in (writer, reader)))
    assert await health(processes, writer) == ["SERVING"] * 3
    assert await health(processes, reader) == ["SERVING", "SERVING", "NOT_SERVING"]


@pytest.mark.parametrize("is_silent", [False, True])
async def test_calls_that_need_the_levels_report_the_reason(
    processes: Processes, bucket: TroubledBucket, *, is_silent: bool
) -> None:
    """At a writer with empty caches a get, and a put whose key of idempotency may be in the levels,
    end in time with what keeps the store.
    """
    url, env = bucket.url, bucket.env
    first = await processes.serve(url, *ALONE, env=env)
    await printed(processes, first, "put", "a", "1")
    once = ("--once", "--wal-trigger-age-ms", "0")
    await processes.run("compactor", "--url", url, *once, env=env, code=0)
    assert await first.stop() == 0
    writer = await processes.serve(url, *ALONE, create=False, env=env)
    if is_silent:
        bucket.proxy.delay(600)
    else:
        await bucket.vanish()
    says = "cannot connect to|store unreachable for|object store has not answered yet"
    for argv in (("get", "a"), ("put", "b", "2")):
        await answered(processes, writer, says, *argv)
    if is_silent:
        bucket.proxy.heal()
    else:
        await bucket.appear()
    await writer.kill()


async def test_shutdown_while_the_store_is_silent(
    processes: Processes, bucket: TroubledBucket
) -> None:
    """An idle writer and a reader end within their grace, not within the time for opening (60 s),
    and report what they have left behind.
    """
    flags = ("--shutdown-grace-ms", str(GRACE_MS))
    servers = (
        await processes.serve(bucket.url, *ALONE, *flags, env=bucket.env),
        await processes.read(bucket.url, *flags, env=bucket.env),
    )
    bucket.proxy.delay(600)
    for server in servers:
        assert await server.stop(within_s=ENDS_WITHIN_S) == 0, server.report()
        (left,) = filter(event("snapshots are left to expire"), server.lines())
        assert left["problem"].startswith("the object store did not take the edit within 1")


@pytest.mark.parametrize("folder", ["/proc/shalekv", "/dev/null/db"])
async def test_folders_that_hold_no_database(processes: Processes, folder: str) -> None:
    """Creating one there fails at once, with the reason."""
    failed = processes.start_serve(f"file://{folder}", *ALONE)
    assert await failed.exited(within_s=ENDS_WITHIN_S) == ExitCode.STORE, failed.report()
    last = failed.lines()[-1]
    assert last["reason"] == "STORE_REFUSED"
    assert "choose another folder" in last["problem"] or "there is a file" in last["problem"]


async def test_one_refusal(processes: Processes, bucket: TroubledBucket) -> None:
    """A single 403 ends neither a writer nor a reader that opens, if others were answered; of wrong
    credentials the first one does.
    """
    manifests = r"^GET /[^?]*/manifest/"
    first = await processes.serve(bucket.url, *ALONE, env=bucket.env)
    assert await first.stop() == 0
    for when in (manifests, r"^PUT .*/manifest/", r"^PUT .*/wal/"):
        refused = bucket.proxy.answer(ACCESS_DENIED, when=when, times=1)
        writer = await processes.serve(bucket.url, *ALONE, create=False, env=bucket.env)
        assert refused.spent == 1
        assert await writer.stop() == 0
    refused = bucket.proxy.answer(ACCESS_DENIED, when=manifests, times=1)
    await processes.read(bucket.url, env=bucket.env)
    assert refused.spent == 1
    bucket.proxy.answer(ACCESS_DENIED)
    ended = processes.start_serve(bucket.url, *ALONE, create=False, env=bucket.env)
    assert await ended.exited(within_s=ENDS_WITHIN_S) == ExitCode.STORE


async def test_too_few_safekeepers(processes: Processes, tmp_path: Path) -> None:
    """Without a majority writes are refused and reads continue: health, errors and status agree."""
    cluster = await Cluster.started(processes, tmp_path)
    writer = await cluster.serve(*ALONE, "--quorum-timeout-ms", "1000")
    await printed(processes, writer, "put", "a", "1")
    await cluster.kill([0, 1])
    await writer.line(event("not ready"))
    await until_healthy(processes, writer, "NOT_SERVING", "SERVING", "NOT_SERVING")
    refused = await processes.run("put", "b", "2", "--addr", writer.listen)
    assert "no majority of the safekeepers has answered" in refused.stderr()
    assert "Nothing was changed" in refused.stderr()
    status = await printed(processes, writer, "status", "--format", "table")
    assert "writes fail: no quorum for " in status
    assert await printed(processes, writer, "get", "a") == "1\n"
    await cluster.start_node(0)
    await writer.line(event("ready again"))
    await until_healthy(processes, writer, *["SERVING"] * 3)
    await printed(processes, writer, "put", "b", "2")
