"""What `shalekv serve` runs: a writer, and its compactor and collector as child processes.

With an elector the same goes on behind a lease: see `cli.standing_by`.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shalekv.cli.process.lifecycle import (
    bind,
    open_database,
    open_links,
    open_runtime,
    run_role,
    start_serving,
)
from shalekv.cli.process.shutdown import StopRequest
from shalekv.cli.writing_ground import Ground, children_of, open_writer
from shalekv.settings import ServeSettings

_log = structlog.get_logger(__name__)


async def serve_database(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be opened, or the writer has failed.
    """
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links(settings.quorum) as links,
        ):
            server = bind(settings, runtime)
            ground = Ground(settings, runtime, store, links, server, announce)
            if settings.election.elect:
                from shalekv.cli.standing_by import serve_when_elected  # noqa: PLC0415 - electors

                await serve_when_elected(ground, stop)
            else:
                await _serve_at_once(ground, stop)
    _log.info("stopped")


async def _serve_at_once(ground: Ground, stop: StopRequest) -> None:
    writer = None
    with stop.interrupts():
        writer = await open_writer(ground)
    if writer is None:
        return
    grace_ms = ground.settings.server.shutdown_grace_ms
    await start_serving(writer, ground.server, ground.announce)
    children = children_of(ground, writer)
    await children.beside(run_role(writer, ground.server, stop, grace_ms))
