"""What a process that has just begun fetches to answer: a few requests, and few bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.engine.levels.read_counters import ReadCounters
from shalekv.roles.reader import Reader
from shalekv.roles.writer import Writer
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import (
    MIB,
    CacheSettings,
    DatabaseSettings,
    DiskCacheSettings,
    LevelSettings,
    ReadSettings,
    ServeSettings,
    UrlSettings,
)
from shalekv.store.counting import Count, CountingStore, Operation
from shalekv.store.local import LocalStore
from shalekv.v1 import kv_pb2
from tests.kit.serving.cold_database import (
    CALL,
    PARTS,
    ColdDatabase,
    key_of,
    missing_key,
    write_cold_database,
)

SSTS = 32  # of the lowest level, whatever the size: as in 1 GiB at default settings
OPEN_REQUESTS_MAX = 16  # to the folder of manifests, those of its snapshot included
POLLS_MAX = 5  # for the object after the last one of the log
GETS = 1_000
ROLES = ("writer", "reader")


@dataclass(frozen=True, slots=True)
class Ground:
    """A database on disk, and what processes need."""

    path: Path
    runtime: Runtime
    database: ColdDatabase

    def store(self) -> CountingStore:
        """A store that has counted nothing."""
        return CountingStore(LocalStore(self.path / "db", self.runtime))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """Threads and real time."""
    workers = ThreadWorkers(4)
    yield Runtime(LoopClock(), Random(1), workers)
    workers.close()


def made(path: Path, runtime: Runtime, *, total_bytes: int, value_bytes: int) -> Ground:
    """A new database."""

    async def make() -> ColdDatabase:
        settings = ServeSettings(
            database=DatabaseSettings(url=f"file://{path}/db"),
            levels=LevelSettings(sst_bytes=total_bytes // SSTS),
        )
        store = LocalStore(path / "db", runtime)
        return await write_cold_database(
            store, runtime, settings, total_bytes=total_bytes, value_bytes=value_bytes
        )

    return Ground(path, runtime, asyncio.run(make()))


@pytest.fixture(scope="module", params=[100, 1_000])
def ground(
    request: pytest.FixtureRequest, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Ground:
    """64 MiB of small values, or of larger ones."""
    path = tmp_path_factory.mktemp("cold")
    return made(path, runtime, total_bytes=64 * MIB, value_bytes=request.param)


Process = Writer | Reader


@asynccontextmanager
async def process(
    ground: Ground, role: str, store: CountingStore, *, disk: str = "", block_cache_bytes: int = 0
) -> AsyncIterator[Process]:
    """A writer or a reader that has just begun."""
    cache = CacheSettings(block_cache_bytes=block_cache_bytes)
    disk_cache = DiskCacheSettings(disk_cache_path=disk)
    opened: Process
    if role == "writer":
        database = DatabaseSettings(url="file:///cold")
        serve = ServeSettings(database=database, cache=cache, disk_cache=disk_cache)
        opened = await Writer.open(store, settings=serve, runtime=ground.runtime)
    else:
        url = UrlSettings(url="file:///cold")
        read = ReadSettings(database=url, cache=cache, disk_cache=disk_cache)
        opened = await Reader.open(store, settings=read, runtime=ground.runtime)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(opened.run())
        try:
            yield opened
        finally:
            opened.close()
            await running
    await opened.leave()


async def get(process: Process, key: bytes) -> kv_pb2.GetReply:
    """The reply to a get."""
    answer = process.kv.get(kv_pb2.GetRequest(key=key), CALL)
    return answer if isinstance(answer, kv_pb2.GetReply) else await answer


async def get_right(process: Process, database: ColdDatabase, number: int) -> None:
    """Get a key that is there."""
    reply = await get(process, key_of(number))
    assert reply.found
    assert len(reply.value) == database.value_bytes
    assert reply.value.startswith(b"%d" % database.newest_seq(number))


def counters(process: Process) -> ReadCounters:
    """What reading the levels came to."""
    return process.engine.levels.ssts.counters


def requests(store: CountingStore, folder: str, *operations: Operation) -> int:
    """How many were sent."""
    counts = store.counts_by_folder
    return sum(counts.get((operation, folder), Count()).requests for operation in operations)


def fetched_bytes(store: CountingStore) -> int:
    """All that was read."""
    return sum(
        store.counts[each].transferred_bytes for each in (Operation.GET, Operation.GET_RANGE)
    )


async def check_first_read(ground: Ground, role: str) -> str:
    """A new process answers its first get right; see the tests."""
    database, store = ground.database, ground.store()
    number = 2 * (database.keys // 4) + 1  # only in the lowest level
    async with process(ground, role, store) as opened:
        assert requests(store, "levels", *Operation) == 0
        await get_right(opened, database, number)
        found = counters(opened)
        open_requests = requests(store, "manifest", *Operation)
        wal_gets = requests(store, "wal", Operation.GET, Operation.GET_RANGE)
        read_bytes = fetched_bytes(store)
        tail = await get(opened, b"tail0")
        tail_objects = [info async for info in store.list("wal/")]
    assert tail.value == b"0"
    touched = database.sources_of(key_of(number))
    assert len(touched) == len(PARTS)
    assert found.metadata_requests == len(touched)
    assert found.block_requests == found.blocks_fetched <= len({info.level for info in touched})
    assert open_requests <= OPEN_REQUESTS_MAX
    assert wal_gets <= len(tail_objects) + POLLS_MAX
    assert requests(store, "levels", Operation.GET, Operation.LIST, Operation.HEAD) == 0
    share = read_bytes / database.level_bytes
    figures = (
        f"{role}, {database.level_bytes / MIB:.0f} MiB, values of {database.value_bytes}: "
        f"{open_requests} requests for manifests, {wal_gets} gets of the log, "
        f"{found.metadata_requests} of metadata, {found.block_requests} of blocks; "
        f"{read_bytes:,} bytes, {share:.3%}; metadata of an SST at most "
        f"{max(info.size_bytes - info.filter_offset for info in touched):,}"
    )
    assert share < 0.01, figures
    return figures


@pytest.mark.parametrize("role", ROLES)
async def test_first_read_of_a_new_process(ground: Ground, role: str) -> None:
    """Manifest, tail of the log, one metadata for each SST over the key, one block: below 1%."""
    print(await check_first_read(ground, role))  # noqa: T201 - figures


async def data_gets(process: Process, keys: Iterable[bytes]) -> list[int]:
    """How many blocks were fetched for each of these keys."""
    found, before = [], counters(process).block_requests
    for key in keys:
        await get(process, key)
        after = counters(process).block_requests
        found.append(after - before)
        before = after
    return found


async def check_point_reads(ground: Ground, role: str, gets: int) -> str:
    """Cold gets of keys that are there, that are not, and that are out of all ranges."""
    database, store, random = ground.database, ground.store(), Random(7)
    numbers = [random.randrange(database.keys) for _ in range(gets)]
    async with process(ground, role, store) as opened:
        present = await data_gets(opened, map(key_of, numbers))
        absent = await data_gets(opened, map(missing_key, numbers))
        metadata = counters(opened).metadata_requests
        beyond = await data_gets(opened, (b"~%d" % number for number in numbers))
        assert counters(opened).metadata_requests == metadata
    assert metadata <= len(database.infos)
    assert beyond == [0] * gets
    assert min(present) == 1
    one, none = present.count(1) / gets, absent.count(0) / gets
    figures = (
        f"{role}, {database.level_bytes / MIB:.0f} MiB, values of {database.value_bytes}, "
        f"{len(PARTS)} SSTs over each key: there, one get of data for {one:.2%} of {gets:,}; "
        f"not there, none for {none:.2%}"
    )
    assert min(one, none) >= 0.99, figures
    return figures


@pytest.mark.parametrize("role", ROLES)
async def test_cold_point_reads(ground: Ground, role: str) -> None:
    """With no block cached a get fetches one block for a key that is there, none for others."""
    print(await check_point_reads(ground, role, GETS))  # noqa: T201 - figures


@pytest.mark.parametrize("role", ROLES)
async def test_restart_with_a_cache_on_disk(ground: Ground, role: str, tmp_path: Path) -> None:
    """What a process has read, the next one on this host reads without asking the store."""
    database, disk = ground.database, str(tmp_path / "cache")
    numbers = [Random(3).randrange(database.keys) for _ in range(20)]
    store = ground.store()
    async with process(ground, role, store, disk=disk) as opened:
        for number in numbers:
            await get_right(opened, database, number)
        cache = opened.engine.levels.ssts.disk
        assert cache is not None
        await cache.flush()
    assert requests(store, "levels", Operation.GET_RANGE) > len(PARTS)
    store = ground.store()
    async with process(ground, role, store, disk=disk) as opened:
        for number in numbers:
            await get_right(opened, database, number)
        assert counters(opened).disk == opened.engine.levels.ssts.counters.disk
    assert requests(store, "levels", *Operation) == 0
