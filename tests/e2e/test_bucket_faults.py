"""A database in a bucket while the store loses replies, throttles, refuses, or is away.

What was acknowledged stays, nothing is applied twice, and all goes on by itself when the trouble is
over. With compare-and-swap in two phases as well, where that makes a difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode
from tests.kit.processes.bucket_troubles import (
    Household,
    event,
    is_collection,
    troubled_bucket,
)
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import fenced_end
from tests.servers.proxy import ACCESS_DENIED, INTERNAL_ERROR, SLOW_DOWN
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

DEADLINE_S = 280
WAL_PUT = "^PUT /[^?]*/wal/"
MANIFEST_PUT = "^PUT /[^?]*/manifest/"
BOTH_MODES = pytest.mark.parametrize("is_two_phase", [False, True], ids=["native", "two-phase"])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """An S3 server whose conditions hold."""
    with versitygw() as running:
        yield running


@asynccontextmanager
async def household(
    processes: Processes, s3: S3Server, records: Path | None = None
) -> AsyncIterator[Household]:
    """A new database in a bucket, which nobody serves yet."""
    async with (
        asyncio.timeout(DEADLINE_S),
        troubled_bucket(s3, records) as bucket,
        asyncio.TaskGroup() as tasks,
    ):
        yield Household(processes, bucket, tasks)


@BOTH_MODES
async def test_replies_are_lost(
    processes: Processes, s3: S3Server, tmp_path: Path, *, is_two_phase: bool
) -> None:
    """The server finds out by itself that what was not answered is its own: no client notices."""
    records = tmp_path / "records.db" if is_two_phase else None
    async with household(processes, s3, records) as home:
        server = await home.serve()
        load = home.load(server)
        home.count_and_read(server.listen)
        rules = []
        for _ in range(10):
            rules.append(home.bucket.proxy.lose_reply(WAL_PUT))
            rules.append(home.bucket.proxy.lose_reply(MANIFEST_PUT))
            assert await load.acknowledged(30), load.ended_by
        await server.line(event("compacted"))
        await server.line(is_collection)
        await home.rest(load)
        assert sum(rule.spent for rule in rules if rule.when.pattern == WAL_PUT) == 10
        assert sum(rule.spent for rule in rules if rule.when.pattern == MANIFEST_PUT) >= 2
        assert home.reads
        await home.end(server)


async def test_the_store_throttles_and_stumbles(processes: Processes, s3: S3Server) -> None:
    """Bursts of 503 SlowDown and of 500 are waited out: no client notices."""
    async with household(processes, s3) as home:
        server = await home.serve()
        load = home.load(server)
        home.count_and_read(server.listen)
        for _ in range(4):
            slow = home.bucket.proxy.answer(SLOW_DOWN, times=6)
            broken = home.bucket.proxy.answer(INTERNAL_ERROR, when="^PUT ", times=3)
            assert await load.acknowledged(40), load.ended_by
            assert (slow.spent, broken.spent) == (6, 3)
        await server.line(event("compacted"))
        await server.line(is_collection)
        await home.rest(load)
        await home.end(server)


async def test_the_permission_goes_and_comes_back(processes: Processes, s3: S3Server) -> None:
    """While the store refuses everything, writes wait, and those with a deadline end at it as
    unknown; when it answers again, the server goes on by itself and serves.
    """
    async with household(processes, s3) as home:
        server = await home.serve()
        load = home.load(server)
        home.count_and_read(server.listen)
        await server.line(event("compacted"))
        home.bucket.proxy.answer(ACCESS_DENIED)
        await home.times_out(server)
        assert await home.is_healthy(server), server.report()
        await home.times_out(server)
        home.bucket.proxy.heal()
        assert await load.acknowledged(50), (load.ended_by, server.report())
        assert await home.is_healthy(server)
        await server.line(is_collection)
        await home.rest(load)
        await home.end(server)


async def test_a_server_ends_while_the_store_refuses(processes: Processes, s3: S3Server) -> None:
    """Asked to stop, it ends when its grace is over; what it had accepted is unknown, not lost
    in silence, and the next server shows all that was acknowledged.
    """
    async with household(processes, s3) as home:
        server = await home.serve("--shutdown-grace-ms", "1000")
        load = home.load(server)
        assert await load.acknowledged(50)
        home.bucket.proxy.answer(ACCESS_DENIED)
        await home.times_out(server)
        assert await server.stop() == ExitCode.STORE, server.report()
        assert server.lines()[-1]["event"] == "ended by an error", server.report()
        assert "Traceback" not in server.stderr()
        await load.ended.wait()
        home.bucket.proxy.heal()
        await home.check()
        await home.end(await home.serve())


@BOTH_MODES
async def test_a_server_is_killed(
    processes: Processes, s3: S3Server, tmp_path: Path, *, is_two_phase: bool
) -> None:
    """Killed while replies are lost: the next server has all that was acknowledged, once."""
    records = tmp_path / "records.db" if is_two_phase else None
    async with household(processes, s3, records) as home:
        server = await home.serve()
        home.count_and_read(server.listen)
        for _ in range(2):
            load = home.load(server)
            home.bucket.proxy.lose_reply(WAL_PUT, times=5)
            home.bucket.proxy.lose_reply(MANIFEST_PUT, times=2)
            assert await load.acknowledged(60), load.ended_by
            await server.kill()
            await load.ended.wait()
            server = await home.serve(listen=server.listen)
        load = home.load(server)
        assert await load.acknowledged(30), load.ended_by
        await home.rest(load)
        await home.end(server)


async def test_the_store_is_away(processes: Processes, s3: S3Server) -> None:
    """While nobody answers at the store's address, writes wait, and go on when it is back."""
    async with household(processes, s3) as home:
        server = await home.serve()
        load = home.load(server)
        home.count_and_read(server.listen)
        await server.line(event("compacted"))
        await home.bucket.vanish()
        await home.times_out(server)
        assert await home.is_healthy(server), server.report()
        await home.times_out(server)
        await home.bucket.appear()
        assert await load.acknowledged(50), (load.ended_by, server.report())
        await server.line(is_collection)
        await home.rest(load)
        await home.end(server)


async def test_a_second_writer_takes_over(processes: Processes, s3: S3Server) -> None:
    """While replies are lost as well: the first ends as fenced, and nothing is lost of either."""
    async with household(processes, s3) as home:
        first = await home.serve()
        before = home.load(first)
        assert await before.acknowledged(50), before.ended_by
        home.bucket.proxy.lose_reply(WAL_PUT, times=8)
        home.bucket.proxy.lose_reply(MANIFEST_PUT, times=3)
        second = await home.serve()
        load = home.load(second)
        await fenced_end(first)
        await before.ended.wait()
        assert await load.acknowledged(50), load.ended_by
        await home.rest(load)
        await home.end(second)
