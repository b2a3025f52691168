"""Requests and bytes that a new process needs for its first reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.runtime import Runtime, Workers
from shalekv.server.reader import Reader
from shalekv.server.service import Answer
from shalekv.server.writer import Writer
from shalekv.settings import (
    MIB,
    CacheSettings,
    DiskCacheSettings,
    LevelSettings,
    ReaderConfig,
    ReaderSettings,
    UrlSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.local import LocalStore
from shalekv.v1 import kv_pb2
from tests.kit.disks.warm import WarmFileSystem
from tests.kit.processes.in_process import real_runtime, serve_settings
from tests.kit.seeds import random_of
from tests.kit.serving.answers import answered, message_of
from tests.kit.serving.cold_database import (
    CALL,
    PARTS,
    ColdDatabase,
    key_of,
    write_cold_database,
)
from tests.kit.store import FaultyStore

TOTAL_BYTES = 16 * MIB
VALUE_BYTES = 1_000
SSTS = 32  # of the lowest level, whatever the size: as in 1 GiB at default settings
OPEN_REQUESTS_MAX = 16  # to the folder of manifests, those of its snapshot included
POLLS_MAX = 5  # for the object after the last one of the log
# More of them would come while a busy disk does not answer.
NO_POLLS_LATER = {"poll_interval_ms": 3_600_000, "poll_interval_idle_ms": 3_600_000}

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Process = Writer | Reader
EACH_ROLE = pytest.mark.parametrize("role", ["writer", "reader"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the database."""
    return tmp_path_factory.mktemp("cold") / "db"


@pytest.fixture(scope="module")
def database(folder: Path) -> ColdDatabase:
    """A database on disk, in several levels."""
    settings = serve_settings(levels=LevelSettings(sst_bytes=TOTAL_BYTES // SSTS).model_dump())
    with real_runtime() as runtime:
        store = LocalStore(folder, runtime)
        making = write_cold_database(
            store, runtime, settings, total_bytes=TOTAL_BYTES, value_bytes=VALUE_BYTES
        )
        return asyncio.run(making)


@asynccontextmanager
async def process(
    role: str, folder: Path, *, disk: str = "", cache_bytes: int = 0
) -> AsyncIterator[tuple[Process, FaultyStore]]:
    """A writer or a reader that has just begun, with a cache of blocks or none, and its store."""
    cache = CacheSettings(block_cache_bytes=cache_bytes)
    disk_cache = DiskCacheSettings(disk_cache_path=disk)
    with real_runtime() as runtime:
        store = FaultyStore(LocalStore(folder, runtime))
        opened = await _opened(role, store, runtime, cache, disk_cache)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(opened.run())
            try:
                yield opened, store
            finally:
                opened.close()
        await opened.release()


async def _opened(
    role: str,
    store: ObjectStore,
    runtime: Runtime,
    cache: CacheSettings,
    disk_cache: DiskCacheSettings,
) -> Process:
    if role == "writer":
        caches = {"cache": cache.model_dump(), "disk_cache": disk_cache.model_dump()}
        return await Writer.open(store, settings=serve_settings(**caches), runtime=runtime)
    url = UrlSettings(url="file:///cold")
    reader = ReaderSettings.model_validate(NO_POLLS_LATER)
    settings = ReaderConfig(database=url, cache=cache, disk_cache=disk_cache, reader=reader)
    return await Reader.open(store, settings=settings, runtime=runtime)


async def get(process: Process, key: bytes) -> kv_pb2.GetReply:
    answer = process.kv.get(kv_pb2.GetRequest(key=key), CALL)
    return await answered(kv_pb2.GetReply, answer)


async def get_right(process: Process, database: ColdDatabase, number: int) -> None:
    reply = await get(process, key_of(number))
    assert len(reply.value) == VALUE_BYTES
    assert reply.value.startswith(b"%d" % database.newest_seq(number))


def requests(store: FaultyStore, folder: str, *operations: str) -> int:
    """Count the requests to a folder, of these operations or of all."""
    asked = [each for each in store.requests if each.name.startswith(f"{folder}/")]
    return sum(not operations or each.operation in operations for each in asked)


@EACH_ROLE
async def test_first_read_of_a_new_process(database: ColdDatabase, folder: Path, role: str) -> None:
    """The first read fetches the manifest, the end of the log, the metadata of each SST over the
    key, and one block.
    """
    number = 2 * (database.keys // 4) + 1  # only in the lowest level
    async with process(role, folder) as (opened, store):
        assert requests(store, "levels") == 0
        await get_right(opened, database, number)
        found = opened.engine.levels.ssts.counters
        assert requests(store, "manifest") <= OPEN_REQUESTS_MAX
        wal_gets = requests(store, "wal", "get", "get_range")
        read_bytes = store.read_bytes
        assert (await get(opened, b"tail0")).value == b"0"
        assert wal_gets <= len([info async for info in store.list("wal/")]) + POLLS_MAX
    touched = database.sources_of(key_of(number))
    assert len(touched) == len(PARTS)
    assert found.metadata_requests == len(touched)
    assert found.block_requests == found.blocks_fetched <= len({info.level for info in touched})
    assert requests(store, "levels", "get", "list", "head") == 0
    assert read_bytes < 0.03 * database.level_bytes


@EACH_ROLE
async def test_what_is_cached_is_read_at_once(
    database: ColdDatabase, folder: Path, role: str
) -> None:
    """When memory has all that a read needs, its reply is there without a task or a request, for
    keys that exist and for others.
    """
    random = random_of("cached")
    keys = [key_of(random.randrange(database.keys)) for _ in range(50)]
    keys += [key + b"!" for key in keys]
    many = kv_pb2.BatchGetRequest(keys=keys)
    async with process(role, folder, cache_bytes=64 * MIB) as (opened, store):
        first = [await get(opened, key) for key in keys]
        before, tasks = requests(store, "levels"), asyncio.all_tasks()
        answers = [opened.kv.get(kv_pb2.GetRequest(key=key), CALL) for key in keys]
        together = message_of(kv_pb2.BatchGetReply, at_once(opened.kv.batch_get(many, CALL)))
        assert requests(store, "levels") == before
        assert asyncio.all_tasks() == tasks
    again = [message_of(kv_pb2.GetReply, at_once(answer)) for answer in answers]
    assert [(reply.found, reply.value, reply.seq) for reply in again] == [
        (reply.found, reply.value, reply.seq) for reply in first
    ]
    assert [(result.found, result.value, result.seq) for result in together.results] == [
        (reply.found, reply.value, reply.seq) for reply in first
    ]
    assert [reply.found for reply in first] == [True] * 50 + [False] * 50


@EACH_ROLE
async def test_large_batches_are_read_in_slices(
    database: ColdDatabase, folder: Path, role: str
) -> None:
    """Thousands of keys are read as they are one by one, whatever is cached, and more than once; a
    slice of them at a time.
    """
    random = random_of("large")
    numbers = [random.randrange(database.keys) for _ in range(2_500)]
    keys = [key_of(number) for number in numbers]
    request = kv_pb2.BatchGetRequest(keys=[*keys, *keys[:500]])
    async with process(role, folder, cache_bytes=64 * MIB) as (opened, _):
        for _ in range(2):
            answer = opened.kv.batch_get(request, CALL)
            assert not isinstance(answer, bytes)
            reply = await answered(kv_pb2.BatchGetReply, answer)
            newest = [database.newest_seq(number) for number in [*numbers, *numbers[:500]]]
            assert [result.seq for result in reply.results] == newest


class CountedWorkers:
    """Workers that are threads, and a count of what they were given."""

    def __init__(self, inner: Workers) -> None:
        self.inner = inner
        self.runs = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self.runs += 1
        return await self.inner.run(function, *args)


async def test_what_the_page_cache_has_is_read_at_once(
    database: ColdDatabase, folder: Path
) -> None:
    """A block of a local file that is not cached is read without a task and a thread, if the system
    has it in memory: each SST is opened once.
    """
    random = random_of("page cache")
    keys = [key_of(random.randrange(database.keys)) for _ in range(30)]
    many = kv_pb2.BatchGetRequest(keys=keys)
    with real_runtime() as runtime:
        workers = CountedWorkers(runtime.workers)
        counting = replace(runtime, workers=workers)
        store = LocalStore(folder, counting, filesystem=WarmFileSystem())
        cache = CacheSettings(block_cache_bytes=0)
        reader = await _opened("reader", store, counting, cache, DiskCacheSettings())
        first = [await get(reader, key) for key in keys]
        before, runs = reader.engine.levels.ssts.counters, workers.runs
        again = [at_once(reader.kv.get(kv_pb2.GetRequest(key=key), CALL)) for key in keys]
        after = reader.engine.levels.ssts.counters
        together = at_once(reader.kv.batch_get(many, CALL))
        assert workers.runs == runs
        reader.close()
        await reader.release()
        await store.close()
    assert [message_of(kv_pb2.GetReply, reply).value for reply in again] == [
        reply.value for reply in first
    ]
    found = message_of(kv_pb2.BatchGetReply, together).results
    assert [result.value for result in found] == [reply.value for reply in first]
    blocks = after.blocks_fetched - before.blocks_fetched
    assert blocks == after.block_requests - before.block_requests
    assert blocks == len(keys) + after.filter_false_positives - before.filter_false_positives


def at_once(answer: Answer[bytes]) -> bytes:
    assert isinstance(answer, bytes)
    return answer


@EACH_ROLE
async def test_restart_with_a_cache_on_disk(
    database: ColdDatabase, folder: Path, role: str, tmp_path: Path
) -> None:
    """Blocks that a process has read, the next one on this host reads without requests to the
    store.
    """
    random = random_of("restart")
    numbers = [random.randrange(database.keys) for _ in range(20)]
    level_requests = []
    for _ in range(2):
        async with process(role, folder, disk=str(tmp_path / "cache")) as (opened, store):
            for number in numbers:
                await get_right(opened, database, number)
            cache = opened.engine.levels.ssts.disk
            assert cache is not None
            await cache.flush()
            level_requests.append(requests(store, "levels", "get_range"))
    assert level_requests[0] > len(PARTS)
    assert level_requests[1] == 0
