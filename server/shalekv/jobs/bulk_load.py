"""Commits a load where no writer serves: by opening the database as one, for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from shalekv.engine.bulk.committed import committed_seq
from shalekv.errors import InvalidRequest, ShaleError
from shalekv.protocol.loads import check_load_id, files_problem
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.engine import WriterEngine
from shalekv.write.ingest import Loaded
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import Links

log = structlog.get_logger()

STOP_GRACE_MS = 10_000.0  # for the record, when something else has ended the writer


async def commit_by_opening(
    store: CasStore,
    load_id: str,
    infos: Sequence[SstInfo],
    settings: WriterSettings | None = None,
    *,
    links: Links | None = None,
) -> Loaded:
    """Commit these files as a load, as a writer of the database, which is closed again.

    Whoever serves the database as its writer is fenced by that, and ends: so this is for a database
    that nobody serves, or on demand. A load that was committed before is left as it is, and then
    nobody is fenced; `Loaded.already_applied` says so. Whoever dies on the way, or gets an
    error, repeats it with the same `load_id`.

    Raises `InvalidRequest` for files that are missing or not as they are listed, `LeaseLost`,
    `LoadUnknown`, and what `open_log` raises: without `links` `DatabaseMismatch` for a database
    that has its WAL in safekeepers.
    """
    check_files_listed(load_id, infos)
    stored = StoredManifest(store)
    seq = await committed_seq(store, stored, load_id)
    if seq is not None:
        return Loaded(seq, None)
    writer = settings or WriterSettings()
    if writer.flush_interval_ms is None:  # one object is written: there is nothing to space
        writer = writer.model_copy(update={"flush_interval_ms": 0})
    opened = await open_log(store, writer, address="", links=links)
    engine = WriterEngine(opened, writer, store.runtime.clock)
    try:
        return await _ingest(engine, load_id, infos)
    finally:
        await engine.leave()


async def _ingest(engine: WriterEngine, load_id: str, infos: Sequence[SstInfo]) -> Loaded:
    """Commit the load while the engine runs, which ends then."""
    failed: list[ShaleError] = []
    outcome: list[Loaded] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_run(engine))
        try:
            outcome.append(await engine.loads.ingest(load_id, infos))
        except ShaleError as error:  # raised below, because the group would wrap it
            failed.append(error)
        finally:
            engine.close()
    if failed:
        raise failed[0]
    return outcome[0]


async def _run(engine: WriterEngine) -> None:
    try:
        await engine.run(stop_grace_ms=STOP_GRACE_MS)
    except ShaleError as error:  # the load is told the same, or stands already
        log.debug("the writer of a load has ended", error=str(error))


def check_files_listed(load_id: str, infos: Sequence[SstInfo]) -> None:
    """Raise `InvalidRequest` unless these can be the files of a load, by what the list says."""
    check_load_id(load_id)
    if not infos:
        raise InvalidRequest("ssts", "at least one is needed")
    problem = files_problem(infos)
    if problem is not None:
        raise InvalidRequest(f"ssts[{problem[0]}]", problem[1])
