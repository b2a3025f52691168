"""What `shalekv serve` runs: a writer, and its compactor and collector as child processes."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shalekv.cli.children import Children, child_commands
from shalekv.cli.role_life import bind, open_database, open_runtime, run_role, start_serving
from shalekv.cli.stopping import StopRequest
from shalekv.errors import DatabaseExists
from shalekv.roles.database import create_database
from shalekv.roles.writer import Writer
from shalekv.runtime import Runtime
from shalekv.settings import ServeSettings
from shalekv.store.api import ObjectStore

_log = structlog.get_logger(__name__)


async def serve_database(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be opened, or the writer has failed.
    """
    with StopRequest() as stop:
        async with open_runtime(settings) as runtime, open_database(settings, runtime) as store:
            server = bind(settings, runtime)
            writer = None
            with stop.interrupts():
                writer = await _open(store, settings, runtime, server.listen)
            if writer is None:
                return
            await start_serving(writer, server, announce)
            children = _children(settings, runtime, writer)
            writer.admin.store_use.measure(children.reports.processes)
            await children.beside(run_role(writer, server, stop, settings.server.shutdown_grace_ms))
    _log.info("stopped")


async def _open(
    store: ObjectStore, settings: ServeSettings, runtime: Runtime, listen: str
) -> Writer:
    if settings.database.create:
        try:
            await create_database(store, runtime, settings.store)
            _log.info("database created", url=store.url)
        except DatabaseExists:
            _log.debug("database exists", url=store.url)
    advertise = settings.server.advertise or listen
    return await Writer.open(store, settings=settings, runtime=runtime, advertise=advertise)


def _children(settings: ServeSettings, runtime: Runtime, writer: Writer) -> Children:
    return Children(
        child_commands(settings),
        settings.children,
        runtime,
        is_pressed=lambda: writer.engine.is_pressed,
    )
