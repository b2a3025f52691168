"""The lease of a load while Spark works: when it is lost, the job is ended and the load with it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from shalekv.core.lease import without_lease
from shalekv.core.manifest import Manifest
from shalekv.engine.bulk.job import LoadJob
from shalekv.errors import LeaseLost
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import LimitSettings
from shalekv.store.cas import CasStore
from shalekv_spark.loading.load import renewed
from shalekv_spark.place import Place
from shalekv_spark.store_loop import StoreLoop
from tests.unit.spark_load.ground import LEVELS, LOAD_ID, current, database

DEADLINE_S = 30
LEASE_TTL_S = 10  # the least that there is


class Session:
    """As much of a session of Spark as a load tells it while it works."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self.tags: list[str] = []
        self.interrupted = threading.Event()

    def addTag(self, tag: str) -> None:  # noqa: N802 - Spark's names
        """What this thread starts has this tag."""
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:  # noqa: N802
        """No longer."""
        self.tags.remove(tag)

    def interruptTag(self, tag: str) -> None:  # noqa: N802
        """End what has the tag."""
        if tag in self.tags:
            self.interrupted.set()


async def drop_leases(store: CasStore) -> None:
    """As the collector does when they have expired."""

    def edit(manifest: Manifest) -> Manifest:
        for lease in manifest.leases:
            manifest = without_lease(manifest, lease.id)
        return manifest

    stored = StoredManifest(store)
    await stored.refresh()
    await stored.edit(edit, lambda manifest: not manifest.leases)


def work(place: Place, session: Session, *, is_lost: bool) -> None:
    """A load whose tasks go on until the lease was renewed, or the job is interrupted."""
    with StoreLoop(place) as loop:
        job = loop.run(
            LoadJob.begin(
                loop.store, LOAD_ID, levels=LEVELS, limits=LimitSettings(), ttl_s=LEASE_TTL_S
            )
        )
        manifest_id = loop.run(current(loop.store)).manifest_id
        with renewed(loop, job, cast("Any", session)) as check:
            check()
            if is_lost:
                loop.run(drop_leases(loop.store))
                assert session.interrupted.wait(DEADLINE_S)
            else:
                while loop.run(current(loop.store)).manifest_id == manifest_id:
                    session.interrupted.wait(0.1)
            check()


async def test_the_lease_is_renewed_while_spark_works(tmp_path: Path) -> None:
    """Nothing is interrupted then, and no tag stays."""
    async with database(tmp_path) as (place, store):
        session = Session()
        await asyncio.to_thread(work, place, session, is_lost=False)
        assert not session.interrupted.is_set()
        assert not session.tags
        (lease,) = (await current(store)).leases
        assert lease.holder == f"load {LOAD_ID}"


async def test_a_job_whose_lease_is_lost_is_ended(tmp_path: Path) -> None:
    """What it has written may be deleted, so it must not be committed."""
    async with database(tmp_path) as (place, _):
        session = Session()
        with pytest.raises(LeaseLost):
            await asyncio.to_thread(work, place, session, is_lost=True)
        assert session.interrupted.is_set()
        assert not session.tags
