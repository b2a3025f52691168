"""Ownership: when the store is polled, and which calls get the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from shalekv.errors import CorruptObject, Fenced, ShaleError, Stopping, StoreUnavailable
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, WriterManifest
from shalekv.store.memory import MemoryStore
from shalekv.write.engine import Ownership
from tests.kit.engine.running_log import OWN, quiesce, yielding_runtime
from tests.kit.store import FaultyStore, Request

NEVER_MS = 3_600_000
MANIFEST = Manifest(
    database_id=b"d" * 16,
    manifest_id=0,
    write_id=b"w" * 16,
    writer_epoch=OWN.epoch,
    writer_nonce=OWN.nonce,
)


class ManualLists(FaultyStore):
    """Answers each list when the test says so."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(lambda: 0), before=self._hold)
        self.polls: list[asyncio.Future[None]] = []
        self.is_answering = True

    async def _hold(self, request: Request) -> None:
        if request.operation == "list" and not self.is_answering:
            self.polls.append(asyncio.get_running_loop().create_future())
            await self.polls[-1]

    def answer(self, error: Exception | None = None) -> None:
        if error is None:
            self.polls[-1].set_result(None)
        else:
            self.polls[-1].set_exception(error)

    async def put_manifest(self, manifest: Manifest) -> None:
        await self.create(names.manifest_name(manifest.manifest_id), encode_manifest(manifest))


class Watch:
    """A running `Ownership` on a store that answers on demand."""

    def __init__(
        self, store: ManualLists, ownership: Ownership, task: asyncio.Task[ShaleError]
    ) -> None:
        self.store = store
        self.ownership = ownership
        self.task = task

    async def confirm(self) -> asyncio.Task[None]:
        confirming = asyncio.create_task(self.ownership.confirm())
        await quiesce()
        return confirming


@asynccontextmanager
async def watching(*, poll_ms: int = NEVER_MS, attempts: int = 1) -> AsyncIterator[Watch]:
    """Watch a database that is ours; cancelled at the end."""
    store = ManualLists()
    await store.put_manifest(MANIFEST)
    cas = CasStore(store, yielding_runtime(), StoreSettings(read_attempts=attempts))
    stored = StoredManifest(cas)
    await stored.refresh()
    store.is_answering = False
    ownership = Ownership(WriterManifest(stored, OWN), poll_ms=lambda: poll_ms)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(ownership.run())
        await quiesce()
        yield Watch(store, ownership, task)
        task.cancel()


async def test_request_during_a_poll_waits_for_the_next() -> None:
    """A poll that was sent before a read arrived does not confirm that read."""
    async with watching() as watch:
        first = await watch.confirm()
        second = await watch.confirm()
        assert len(watch.store.polls) == 1
        watch.store.answer()
        await first
        await quiesce()
        assert not second.done()
        assert len(watch.store.polls) == 2
        watch.store.answer()
        await second


async def test_takeover_fails_waiting_and_later_calls() -> None:
    """A newer epoch in the manifest raises `Fenced` in all waiting and later calls."""
    async with watching() as watch:
        polling = await watch.confirm()
        next_in_line = await watch.confirm()
        newer = WriterId(OWN.epoch + 1, b"n" * 16)
        manifest = replace(MANIFEST, manifest_id=1, writer_epoch=6, writer_nonce=newer.nonce)
        await watch.store.put_manifest(manifest)
        watch.store.answer()
        assert isinstance(await watch.task, Fenced)
        for confirming in (polling, next_in_line, watch.ownership.confirm()):
            with pytest.raises(Fenced):
                await confirming


async def test_damaged_manifest_ends_the_watch() -> None:
    """A manifest that cannot be trusted ends the watch."""
    async with watching() as watch:
        confirming = await watch.confirm()
        await watch.store.create(names.manifest_name(1), b"rubbish")
        watch.store.answer()
        assert isinstance(await watch.task, CorruptObject)
        with pytest.raises(CorruptObject):
            await confirming


@pytest.mark.parametrize("error", [None, StoreUnavailable("memory://", "list", "manifest/", "")])
async def test_cancelled_read_affects_no_other(error: Exception | None) -> None:
    """A read that is cancelled before or during its poll affects no poll and no other read."""
    async with watching() as watch:
        polling, polling_too = [asyncio.create_task(watch.ownership.confirm()) for _ in range(2)]
        await quiesce()
        waiting, waiting_too = await watch.confirm(), await watch.confirm()
        polling.cancel()
        waiting.cancel()
        watch.store.answer(error)
        await quiesce()
        watch.store.answer()
        results = await asyncio.gather(
            polling, polling_too, waiting, waiting_too, return_exceptions=True
        )
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            type(error),
            asyncio.CancelledError,
            type(None),
        ]


async def test_end_of_the_watch_fails_calls_in_a_poll() -> None:
    """Cancelling the watch in the middle of a poll fails all waiting calls."""
    async with watching() as watch:
        polling = await watch.confirm()
        next_in_line = await watch.confirm()
        watch.task.cancel()
        for confirming in (polling, next_in_line):
            with pytest.raises(Stopping, match="shutting down"):
                await confirming
        with pytest.raises(Stopping, match="shutting down"):
            await watch.ownership.confirm()
