"""Archivers of safekeepers on real stores: several at once, taking over, and a contradiction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from shalekv.errors import IllegalState
from shalekv.format import names
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from tests.contract.opening import OpenStore
from tests.kit.processes.in_process import real_runtime
from tests.kit.quorum.held_log import (
    A,
    B,
    C,
    HeldLog,
    Written,
    archiver_of,
    manifest_of,
    put_manifest,
    running,
)

OBJECTS = 6
pytestmark = pytest.mark.parametrize("kind", ["file", "s3", "sqlite"])


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Real time, and threads."""
    with real_runtime() as runtime:
        yield runtime


@pytest.fixture
async def store(open_store: OpenStore) -> AsyncIterator[ObjectStore]:
    """One with a manifest that names three members."""
    async with opened(open_store) as (store,):
        await put_manifest(store, manifest_of(0, A, B, C))
        yield store


@asynccontextmanager
async def opened(open_store: OpenStore, count: int = 1) -> AsyncIterator[list[ObjectStore]]:
    stores = [open_store() for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def test_archivers_that_race_agree(
    store: ObjectStore, open_store: OpenStore, runtime: Runtime
) -> None:
    """Three that archive at once make each object once, as the log says, and trim it (CE16)."""
    written = Written()
    records = written.write("".join(f"{n}{n}-{n}." for n in range(OBJECTS)))
    logs = [HeldLog(each, appointed=each) for each in (A, B, C)]
    for log in logs:
        log.append(records, committed_lsn=len(records))
    async with opened(open_store, 3) as stores:
        archivers = [
            archiver_of(log, each, runtime) for log, each in zip(logs, stores, strict=True)
        ]
        async with running(*archivers):
            for log in logs:
                await log.reached(archived=OBJECTS - 1, trimmed_lsn=len(records))
    assert [each.alarm for each in archivers] == [None] * 3
    for wal_id in range(OBJECTS):
        assert (await store.get(names.wal_name(wal_id))).data == written.object(wal_id)


async def test_another_goes_on_where_one_has_ended(
    store: ObjectStore, open_store: OpenStore, runtime: Runtime
) -> None:
    """A member takes over from one that is gone, and trims what that one has archived."""
    written = Written()
    one, other = HeldLog(A, appointed=A), HeldLog(B, appointed=A)
    first, more = written.write("00.1."), written.write("22.3.4")
    for log in (one, other):
        log.append(first, committed_lsn=3)
    async with opened(open_store, 2) as stores:
        async with running(archiver_of(one, stores[0], runtime)):
            await one.reached(archived=1, trimmed_lsn=3)
        other.append(more, committed_lsn=7)
        async with running(archiver_of(other, stores[1], runtime)):
            await other.reached(archived=3, trimmed_lsn=6)
    assert (await store.get(names.wal_name(3))).data == written.object(3)


async def test_other_bytes_are_an_alarm(store: ObjectStore, runtime: Runtime) -> None:
    """An object of another history is left as it is, and so is the log."""
    foreign, written = Written(epoch=2), Written()
    foreign.write("0.")
    await store.create(names.wal_name(0), foreign.object(0))
    log = HeldLog(A, appointed=A)
    log.append(written.write("0.1."), committed_lsn=2)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        await log.archiving.told(problem=True)
    assert isinstance(archiver.alarm, IllegalState)
    assert log.trims == []
    assert (await store.get(names.wal_name(0))).data == foreign.object(0)
