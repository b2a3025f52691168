"""Compaction by tasks of Spark: of all keys and of some, beside servers, and with failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from shalekv.errors import (
    DatabaseNotFound,
    InvalidRequest,
    InvalidSetting,
    LeaseLost,
    ManifestConflict,
    PartFailed,
    StoreUnavailable,
)
from shalekv.jobs.compact.parts import MergePart
from shalekv.jobs.compact.range_job import CompactionReport, PartLimits, RangeRequest, run_range
from shalekv.protocol.compaction.jobs import WalJob
from shalekv.protocol.compaction.policy import LAST_LEVEL
from shalekv.protocol.compaction.publish import reservations
from shalekv.protocol.lease import without_lease
from shalekv.protocol.manifest import SYSTEM_LEVEL, Manifest
from shalekv.settings import LevelSettings
from shalekv.store.manifests import StoredManifest
from shalekv_client import Client
from shalekv_spark.compaction.compact import compact
from shalekv_spark.compaction.tasks import SparkParts, TaskOutcome, run_task
from shalekv_spark.place import Place
from tests.kit import timeouts
from tests.kit.engine.compaction import CompactedDatabase, delete, delete_range, put, small_settings
from tests.kit.engine.naive_merge import NaiveLevels, answers
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase

KEYS = [b"key%04d" % n for n in range(400)]
LEVELS = {"sst_bytes": 65_536, "block_bytes": 4_096}
COMPACTOR = {"subcompaction_memory_bytes": 8 * 1024 * 1024, "expired_value_kept_s": 0}
SMALL = (
    *("--sst-bytes", "65536", "--subcompaction-memory-bytes", "8388608", "--block-bytes", "4096"),
    *("--wal-trigger-age-ms", "0", "--l0-trigger-count", "2", "--base-level-bytes", "65536"),
    *("--compactor-idle-poll-ms", "10"),
)
compact_small = partial(compact, levels=LEVELS, compactor=COMPACTOR, partition_bytes=100_000)


@pytest.fixture
async def database(tmp_path: Path) -> CompactedDatabase:
    """A database in `tmp_path`: several versions in L0, with deletes of keys and of a range."""
    random = Random(3)
    database = await CompactedDatabase.begun(small_settings(sst_bytes=65_536, block_bytes=4_096))
    for slot in range(3):
        await database.write(*([put(key, random.randbytes(300))] for key in KEYS[slot * 50 :]))
    await database.write([delete(key) for key in KEYS[::7]], [delete_range(KEYS[300], KEYS[320])])
    await database.write([put(b"expires", b"soon", database.logical_time_ms + 5)])
    await database.write([put(b"later")], time_ms=10)
    await database.save(tmp_path)
    return database


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def place_of(trial_path: Path) -> Place:
    return Place.of(trial_path.as_uri())


async def manifest_of(place: Place) -> Manifest:
    async with place.open() as store:
        return await StoredManifest(store).refresh()


async def check(database: CompactedDatabase, path: Path) -> tuple[Manifest, NaiveLevels]:
    """Check that the levels hold what was written, without any of the code that merges."""
    async with place_of(path).open() as store:
        manifest = await StoredManifest(store).refresh()
        naive = await NaiveLevels.read(store, manifest)
    now_ms = manifest.logical_time_ms
    keys = [*KEYS, b"expires", b"later"]
    assert naive.answers(keys, now_ms) == answers(database.compacted(manifest), keys, now_ms)
    return manifest, naive


async def test_all_keys_then_a_plan_then_some_keys(
    spark: SparkSession, database: CompactedDatabase, tmp_path: Path
) -> None:
    """Without a server, WAL included: tombstones, older versions and expired values are gone.

    A dry run touches nothing, and a key range leaves the SSTs of other keys where they are.
    """
    report = await asyncio.to_thread(compact_small, spark, tmp_path.as_uri(), include_wal=True)
    manifest, naive = await check(database, tmp_path)
    assert manifest.first_uncompacted_wal_id == len(database.written)
    assert {info.level for info in manifest.leveled_ssts} == {LAST_LEVEL}
    alive = {*KEYS} - {*KEYS[::7]} - {*KEYS[300:320]} | {b"later"}
    assert sorted(entry.key for entry in naive.entries()) == sorted(alive)
    assert manifest.leases == ()
    assert report.parts > 1
    assert report.dropped_rows == report.input_rows - len(alive)
    assert report.dropped_tombstones == sum(level.tombstones for level in report.inputs) > 0
    assert report.output_ssts == len([*manifest.leveled_ssts])
    assert str(report).count("\n") == 2, str(report)

    before = paths(tmp_path)
    plan = await asyncio.to_thread(
        compact_small, spark, tmp_path.as_uri(), dry_run=True, force=True
    )
    assert (plan.is_dry_run, plan.is_done, plan.output_ssts) == (True, False, 0)
    assert [level.level for level in plan.inputs] == [LAST_LEVEL]
    assert plan.parts > 1
    assert paths(tmp_path) == before
    again = await asyncio.to_thread(compact_small, spark, tmp_path.as_uri())
    assert not again.is_done

    known = {info.id for info in manifest.leveled_ssts}
    report = await asyncio.to_thread(
        compact_small, spark, tmp_path.as_uri(), ("key0100", "key0110"), force=True
    )
    manifest, _ = await check(database, tmp_path)
    kept = [info for info in manifest.leveled_ssts if info.id in known]
    assert report.input_ssts == len(known) - len(kept)
    assert 0 < report.input_ssts < len(known)
    assert all(info.last_key < b"key0100" or info.first_key >= b"key0110" for info in kept)


def request() -> RangeRequest:
    levels = LevelSettings.model_validate(LEVELS)
    return RangeRequest(
        limits=PartLimits(
            part_bytes=200_000, memory_bytes=8 * 1024 * 1024, parallel_count=2, levels=levels
        )
    )


async def compacted(place: Place, parts: SparkParts) -> CompactionReport:
    async with place.open() as store:
        return await run_range(store, request(), parts)


def fails_twice(place: Place, part: MergePart) -> TaskOutcome:
    """The first two attempts at one part write all that they have to, and fail then."""
    outcome = run_task(place, part)
    context = TaskContext.get()
    assert context is not None
    if not part.keys.start and context.attemptNumber() < 2:
        raise StoreUnavailable(place.url, "create", "levels/", "as the test wants it")
    return outcome


def always_fails(place: Place, part: MergePart) -> TaskOutcome:
    outcome = run_task(place, part)
    if not part.keys.start:
        raise ZeroDivisionError("as the test wants it")
    return outcome


async def test_tasks_that_fail(
    spark: SparkSession, database: CompactedDatabase, tmp_path: Path, processes: Processes
) -> None:
    """One that always fails publishes nothing and reserves nothing; one that fails twice is tried
    again, and what its other attempts wrote is collected; damage ends the job with its name.
    """
    place = place_of(tmp_path)
    for slot in range(len(database.written)):
        await database.run(WalJob(range(slot, slot + 1), "all"))
    await database.save(tmp_path)
    before = await manifest_of(place)
    with pytest.raises(PartFailed, match="as the test wants it"):
        await compacted(place, SparkParts(spark, place, always_fails))
    after, _ = await check(database, tmp_path)
    assert (after.leveled_ssts, after.leases) == (before.leveled_ssts, before.leases)

    await lose_the_lease(spark, place)
    after, _ = await check(database, tmp_path)
    assert after.leveled_ssts == before.leveled_ssts

    report = await compacted(place, SparkParts(spark, place, fails_twice))
    manifest, _ = await check(database, tmp_path)
    assert len([*manifest.leveled_ssts]) == report.output_ssts
    assert report.parts > 1
    stored = [*(tmp_path / "levels").iterdir()]
    assert len(stored) >= report.input_ssts + report.output_ssts + 2
    await processes.run(
        *("collector", "--url", tmp_path.as_uri(), "--once", "--collect-age-s", "0"), code=0
    )
    left = {path.stem.replace("-", ""): path for path in (tmp_path / "levels").iterdir()}
    assert left.keys() == {info.id.hex() for info in manifest.leveled_ssts}
    await check(database, tmp_path)

    info = max(manifest.leveled_ssts, key=lambda each: each.size_bytes)
    path = left[info.id.hex()]
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(PartFailed, match=f"BAD_CHECKSUM.*{path.name}"):
        await asyncio.to_thread(compact_small, spark, tmp_path.as_uri(), force=True)
    assert not reservations(await manifest_of(place), 0)


async def lose_the_lease(spark: SparkSession, place: Place) -> None:
    """It is found out by the next renewal; the tasks are cancelled, and the job ends with that."""
    slow = COMPACTOR | {"compactor_lease_ttl_s": 2, "compaction_rate_bytes": 2_000}
    job = asyncio.create_task(
        asyncio.to_thread(
            compact, spark, place.url, levels=LEVELS, compactor=slow, partition_bytes=60_000
        )
    )
    (lease_id,) = reserved(await until(place, reserved))
    async with place.open() as store:
        await StoredManifest(store).edit(
            lambda current: without_lease(current, lease_id), lambda _: True
        )
    async with asyncio.timeout(60):  # its reads would take minutes
        with pytest.raises(LeaseLost):
            await job
    # Spark lists a job as active until some time after it has raised the error.
    tracker = spark.sparkContext.statusTracker()
    await timeouts.until(lambda: not tracker.getActiveJobsIds(), "the end of the job of Spark")


async def until(
    place: Place, condition: Callable[[Manifest], object], *, within_s: float = 90
) -> Manifest:
    """Return the first manifest for which the condition holds."""
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        manifest = await manifest_of(place)
        if condition(manifest):
            return manifest
        await asyncio.to_thread(threading.Event().wait, 0.02)
    raise AssertionError("what the test waits for does not happen")


def reserved(manifest: Manifest) -> list[bytes]:
    return [lease.id for lease in reservations(manifest, 0)]


def levels_are_filled(manifest: Manifest) -> bool:
    return sum(info.entry_count for info in manifest.leveled_ssts) >= len(KEYS)


def test_bad_input_is_refused_before_anything_is_done(
    spark: SparkSession, folder: SparkDatabase
) -> None:
    """Errors name what is wrong; where nothing is, nothing is made."""
    url = folder.url
    with pytest.raises(DatabaseNotFound):
        compact(spark, url)
    with pytest.raises(DatabaseNotFound):
        compact(spark, url, dry_run=True)
    with pytest.raises(InvalidRequest, match="no key is from"):
        compact(spark, url, ("b", "a"))
    with pytest.raises(InvalidRequest, match="expected a pair of keys"):
        compact(spark, url, "abc")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="sst_bytez"):
        compact(spark, url, levels={"sst_bytez": 1})
    with pytest.raises(InvalidSetting, match="expired_value_kept_s"):
        compact(spark, url, compactor={"expired_value_kept_s": -1})
    with pytest.raises(InvalidSetting, match="partition_bytes"):
        compact(spark, url, partition_bytes=0)


@asynccontextmanager
async def writing(client: Client, keys: list[bytes]) -> AsyncIterator[dict[bytes, bytes | None]]:
    """Update and delete these keys continuously; yield what was acknowledged last."""
    acknowledged: dict[bytes, bytes | None] = {}
    stopping = asyncio.Event()
    random = Random(11)

    async def write() -> None:
        while not stopping.is_set():
            key = random.choice(keys)
            if random.random() < 0.2:
                await client.delete(key)
                acknowledged[key] = None
            else:
                value = random.randbytes(300)
                await client.put(key, value)
                acknowledged[key] = value
            await asyncio.to_thread(threading.Event().wait, 0.01)  # the job needs the cores, too

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        try:
            yield acknowledged
        finally:
            stopping.set()


async def test_a_server_goes_on_beside_it(
    spark: SparkSession, bucket: SparkDatabase, processes: Processes
) -> None:
    """The last update of a key counts, be it from before, during or after the job, also at a reader
    and after a restart. The server's own compactor merges the WAL meanwhile, never ends, and leaves
    the job alone; a second job is refused.
    """
    server = await processes.serve(bucket.url, *SMALL, env=bucket.env)
    place = Place.of(bucket.url, bucket.store)
    expected: dict[bytes, bytes | None] = {}
    random = Random(5)
    async with Client(server.listen) as client:
        expected |= {key: random.randbytes(300) for key in KEYS}
        await asyncio.gather(*(client.put(key, value or b"") for key, value in expected.items()))
        await until(place, levels_are_filled)
        async with writing(client, KEYS) as acknowledged:
            slow = COMPACTOR | {"compaction_rate_bytes": 30_000}
            job = asyncio.create_task(
                asyncio.to_thread(
                    compact,
                    spark,
                    bucket.url,
                    force=True,
                    partition_bytes=40_000,
                    levels=LEVELS,
                    compactor=slow,
                    store=bucket.store,
                )
            )
            began = await until(place, reserved)
            with pytest.raises(ManifestConflict, match="merges the levels already"):
                await asyncio.to_thread(compact_small, spark, bucket.url, store=bucket.store)
            report = await job
            ended = await manifest_of(place)
        expected |= acknowledged
        found = {pair.key: pair.value async for pair in client.scan()}
        assert found == {key: value for key, value in expected.items() if value is not None}
    assert report.is_done
    assert ended.first_uncompacted_wal_id > began.first_uncompacted_wal_id + 3
    merged = [info for info in ended.leveled_ssts if info.max_seq <= report.seq]
    assert {info.level for info in merged} - {SYSTEM_LEVEL} == {LAST_LEVEL}
    assert ended.compactor_epoch == began.compactor_epoch == report.epoch
    assert not [
        line
        for line in server.lines()
        if "child process" in str(line.get("event")) and "started" not in str(line.get("event"))
    ], server.report()
    assert await server.stop() == 0
    reader = await processes.read(bucket.url, env=bucket.env)
    async with Client(reader.listen) as client:
        again = {pair.key: pair.value async for pair in client.scan()}
    assert again == found
