"""Loads whose driver is killed at the worst of moments, and which are run again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.deaf_proxy import deaf_proxy
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase
from tests.spark.loading import KEYS, load, loaded, pairs, state

DEADLINE_S = 90
LOAD_ID = "monday"
ROOT = Path(__file__).parents[2]


def start(processes: Processes, folder: Path, *loads: str) -> Child:
    """Start a driver that loads into two databases, and never ends; both by URL and writer."""
    folder.mkdir()
    argv = ["-m", "tests.spark.loading_driver", str(folder), LOAD_ID, *loads]
    env = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    return processes.start(*argv, program=sys.executable, env=dict(os.environ) | env)


async def until(reached: Callable[[], bool], driver: Child) -> None:
    """Wait until the driver, which continues, has reached a state."""
    ended = asyncio.create_task(driver.exited(within_s=DEADLINE_S))
    try:
        while not reached():
            assert not ended.done(), driver.report()
            await asyncio.wait([ended], timeout=0.1)
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def test_a_load_whose_driver_was_killed_is_run_again(
    spark: SparkSession, processes: Processes, tmp_path: Path
) -> None:
    """Killed while tasks write, nothing of it is seen, and the load is done by the next run; killed
    when the commit has landed and the driver does not know, the next run finds the load done.
    Unused files are collected, and nothing else.
    """
    before = Cluster(processes, tmp_path / "before")
    during = Cluster(processes, tmp_path / "during")
    server, other = await before.serve(*ALONE), await during.serve(*ALONE)
    wal_count = len(during.objects("wal/"))
    async with deaf_proxy(other.listen) as proxy:
        proxy.go_deaf_at(LOAD_ID.encode())
        loads = (during.url, proxy.listen, before.url, server.listen)
        driver = start(processes, tmp_path / "spark", *loads)
        await until(
            lambda: len(before.objects("levels/")) > 1 and len(during.objects("wal/")) > wal_count,
            driver,
        )
        assert await state(server) == {}
        await driver.kill()
    in_vain = before.objects("levels/")
    assert await state(server) == {}
    result = await load(pairs(spark), SparkDatabase(before.url), LOAD_ID)
    assert (result.rows, result.already_applied) == (KEYS, False)
    again = await load(pairs(spark), SparkDatabase(during.url), LOAD_ID)
    assert (again.rows, again.already_applied) == (0, True)
    for running, database in ((server, before), (other, during)):
        assert await state(running) == loaded()
        await database.collect_until(
            lambda _, base=database: not (in_vain & base.objects("levels/"))  # type: ignore[misc]
        )
        (pending,) = database.manifest().pending_loads
        assert len(database.objects("levels/")) == len(pending.ssts)
        assert await state(running) == loaded()
        assert await running.stop() == 0, running.report()
        await database.check()
