"""Fencing, recovery, compaction and collection by the shipped roles, on real stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from shalekv.errors import DatabaseNotFound, Fenced, ManifestVersionExists, OutcomeUnknown
from shalekv.jobs.drop import DropJob
from shalekv.server.writer import Writer
from shalekv.settings import StoreSettings
from shalekv.store.api import Repaired
from shalekv.store.cas import CasStore
from tests.contract import conftest as contract
from tests.contract.opening import OpenStore, names_in
from tests.kit.constants import set_constants
from tests.kit.in_process_cluster import InProcessCluster, everything, running, write_all
from tests.kit.processes.in_process import put_at, real_runtime
from tests.kit.store import FaultyStore, Request

OPENERS = 4
KEYS = 400
VALUE_BYTES = 200
ROUNDS = 4
HTTP_TICK_MS = 2_000  # HTTP has whole seconds

open_store = contract.open_store  # a fixture

on_minio = pytest.param("minio", marks=pytest.mark.soak)
one_of_each = pytest.mark.parametrize("kind", ["file", "s3", "sqlite", on_minio])


@pytest.fixture
async def it(kind: str, open_store: OpenStore) -> AsyncIterator[InProcessCluster]:
    """The cluster of this existing database."""
    with real_runtime() as runtime:
        roles = InProcessCluster(open_store, runtime, 10 if kind == "file" else HTTP_TICK_MS)
        try:
            await roles.create()
            yield roles
        finally:
            await roles.close()


def wal_names(*wal_ids: int) -> list[str]:
    return [f"wal/{wal_id:020d}.sst" for wal_id in wal_ids]


@one_of_each
async def test_an_older_writer_loses_its_slot(it: InProcessCluster) -> None:
    """Writers fill slot after slot; a new one's fence takes one, and the old one is refused."""
    old = await it.open_writer()
    async with running(old) as ended:
        await put_at(old, b"key", b"old 1")
        await put_at(old, b"key", b"old 2")
        assert await names_in(it.store(), "wal/") == wal_names(0, 1, 2)
        async with it.writing() as new:
            assert new.epoch == old.epoch + 1
            with pytest.raises(Fenced):
                await put_at(old, b"key", b"too late")
            with pytest.raises(Fenced):
                await ended
            await put_at(new, b"other", b"new")
            assert await everything(new) == {b"key": b"old 2", b"other": b"new"}
            # A fence and two writes of the old one, then the same of the new one.
            assert await names_in(it.store(), "wal/") == wal_names(*range(5))


@one_of_each
async def test_a_writer_is_fenced_with_many_uploads_in_flight(it: InProcessCluster) -> None:
    """With three uploads in flight, what was acknowledged is what the newer writer finds."""
    old = await it.open_writer(max_parallel_writes=3)
    acknowledged: set[bytes] = set()

    async def try_to_put(key: bytes) -> None:
        try:
            await put_at(old, key, b"old")
        except Fenced:
            return
        acknowledged.add(key)

    async with running(old), asyncio.TaskGroup() as tasks:
        for number in range(60):
            tasks.create_task(try_to_put(b"%03d" % number))
            await asyncio.sleep(0)
        async with it.writing() as new:
            found = await everything(new)
            await put_at(new, b"new", b"1")
    assert acknowledged <= found.keys()


@one_of_each
async def test_one_of_several_concurrent_openers_serves(it: InProcessCluster) -> None:
    """Of writers that open at the same time, the last one serves, and the others cannot."""
    outcomes = await asyncio.gather(
        *(it.open_writer(open_once=True) for _ in range(OPENERS)), return_exceptions=True
    )
    writers = [each for each in outcomes if isinstance(each, Writer)]
    refused = [each for each in outcomes if isinstance(each, BaseException)]
    assert all(isinstance(each, ManifestVersionExists | Fenced) for each in refused)
    assert writers
    assert len({writer.epoch for writer in writers}) == len(writers)
    done = []
    for writer in writers:
        async with running(writer):
            try:
                await put_at(writer, b"key", b"%d" % writer.epoch)
            except Fenced:
                continue
            done.append(writer.epoch)
            writer.close()
    assert done == [max(writer.epoch for writer in writers)]


@pytest.mark.parametrize("kind", ["file", "s3", "google", "sqlite", on_minio])
async def test_a_stalled_writer_stays_fenced_after_collection(it: InProcessCluster) -> None:
    """Rule F1: a collection makes no slot free for a write that would never be read."""
    stalled = await it.open_writer()
    async with it.writing() as new:
        for number in range(5):
            await put_at(new, b"key", b"%d" % number)
        await it.compact()
        await put_at(new, b"key", b"last")
        assert (await it.collect()).deleted_objects > 0
        async with running(stalled):
            with pytest.raises((Fenced, OutcomeUnknown)):
                await put_at(stalled, b"key", b"from the past")
        assert await everything(new) == {b"key": b"last"}
    async with it.writing() as later:
        assert await everything(later) == {b"key": b"last"}


@one_of_each
async def test_a_dropped_database_leaves_nothing(
    it: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer is refused before anything is deleted; neither objects nor records are left."""
    set_constants(monkeypatch, {"shalekv.jobs.drop:NOTICE_MS": 10})
    writer = await it.open_writer()
    refused: list[object] = []

    async def after(request: Request) -> None:
        if request.operation == "delete" and not refused:
            with pytest.raises((Fenced, OutcomeUnknown)) as error:
                await put_at(writer, b"key", b"too late")
            refused.append(error)

    store = it.store()
    async with running(writer):
        await put_at(writer, b"key", b"1")
        job = DropJob(CasStore(FaultyStore(store, after=after), it.runtime, StoreSettings()))
        await job.run(await job.plan(), is_forced=True)
    assert refused
    for folder in ("manifest/", "wal/", "levels/", "access/"):
        assert await names_in(store, folder) == []
    assert await store.repair(lambda _name: True) == Repaired()
    with pytest.raises(DatabaseNotFound):
        await it.open_writer()


@one_of_each
async def test_what_was_acknowledged_survives_a_crash(it: InProcessCluster) -> None:
    """Each writer ends in the middle of it all, and the next one has every acknowledged put."""
    expected: dict[bytes, bytes] = {}
    for life in range(3):
        writer = await it.open_writer()
        async with running(writer):
            assert await everything(writer) == expected
            for number in range(8):
                key, value = b"%d" % (number % 5), b"%d/%d" % (life, number)
                await put_at(writer, key, value)
                expected[key] = value
    async with it.writing() as writer:
        assert await everything(writer) == expected
    await it.check()


@one_of_each
async def test_compaction_and_collection_change_no_answer(it: InProcessCluster) -> None:
    """While levels are built and garbage goes, every scan gives what was written last."""
    random = Random(7)
    expected: dict[bytes, bytes] = {}
    async with it.writing() as writer:
        for _ in range(ROUNDS):
            keys = random.sample(range(2 * KEYS), KEYS)
            changes = {b"key %05d" % key: random.randbytes(VALUE_BYTES) for key in keys}
            await write_all(writer, changes)
            expected |= changes
            await it.compact()
            assert await everything(writer) == expected
        before = await names_in(it.store(), "levels/")
        assert (await it.collect()).deleted_objects > 0
        assert await everything(writer) == expected
    async with it.writing() as writer:
        await it.collect()
        left = await names_in(it.store(), "levels/")
        assert 0 < len(left) < len(before)
        assert await everything(writer) == expected
    await it.check()
