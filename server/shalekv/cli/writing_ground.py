"""What a process needs in order to be the writer, as often as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shalekv.cli.process.supervisor import Children, child_commands
from shalekv.errors import DatabaseExists
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime
from shalekv.server.database import (
    Quorum,
    check_wal_mode,
    complete_creation,
    create_database,
    writer_epoch,
)
from shalekv.server.writer import Writer
from shalekv.settings import ServeSettings, WalChoice
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.retry import RefusalPolicy
from shalekv.write.quorum.links import Links

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts of a process that stay when a writer goes."""

    settings: ServeSettings
    runtime: Runtime
    store: ObjectStore
    links: Links  # to safekeepers, if the database has some
    server: Server
    announce: Callable[[str], None]  # told HOST:PORT when it serves

    @property
    def address(self) -> str:
        """HOST:PORT under which clients reach this process."""
        return self.settings.server.advertise or self.server.listen


async def open_writer(ground: Ground) -> Writer:
    """Open the database as its writer; create it first, if the settings want that."""
    refusals = RefusalPolicy(ground.store.sent, ground.runtime)
    _log.info("opening", url=ground.store.url)
    with refusals.opening(ground.settings.writer.open_timeout_ms):
        return await _open(ground)


async def _open(ground: Ground) -> Writer:
    settings, runtime, store = ground.settings, ground.runtime, ground.store
    since_epoch = None
    if settings.writer.open_once:  # others may create the database, and open it, before we do
        since_epoch = await writer_epoch(store, runtime, settings.store)
    if settings.database.create:
        await _create(ground)
    await check_wal_mode(store, runtime, settings.store, settings.database)
    return await Writer.open(
        store,
        settings=settings,
        runtime=runtime,
        advertise=ground.address,
        since_epoch=since_epoch,
        links=ground.links,
    )


async def _create(ground: Ground) -> None:
    settings, store = ground.settings, ground.store
    quorum = None
    if settings.database.wal is WalChoice.QUORUM:
        quorum = Quorum(ground.links, settings.database.safekeeper_addresses)
    try:
        await create_database(
            store,
            ground.runtime,
            settings.store,
            quorum,
            clock_jump_max_s=settings.writer.clock_jump_max_s,
        )
        _log.info("database created", url=store.url)
    except DatabaseExists:
        _log.debug("database exists", url=store.url)
        if quorum is not None:
            cas = CasStore(store, ground.runtime, settings.store)
            await complete_creation(cas, ground.links)


def children_of(ground: Ground, writer: Writer) -> Children:
    """The child processes beside this writer; none runs yet."""
    children = Children(
        child_commands(ground.settings),
        ground.settings.children,
        ground.runtime,
        is_pressed=lambda: writer.engine.is_pressed,
    )
    writer.admin.store_use.measure(children.reports.processes)
    return children
