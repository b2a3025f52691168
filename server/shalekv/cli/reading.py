"""What `shalekv reader` runs."""

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
from shalekv.server.reader import Reader
from shalekv.settings import ReadSettings

_log = structlog.get_logger(__name__)


async def read_database(settings: ReadSettings, announce: Callable[[str], None]) -> None:
    """Serve reads until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be read, or the reader has failed.
    """
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links() as links,
        ):
            server = bind(settings, runtime)
            reader = None
            _log.info("opening", url=store.url)
            with stop.interrupts():
                reader = await Reader.open(store, settings=settings, runtime=runtime, links=links)
            if reader is None:
                return
            await start_serving(reader, server, announce)
            await run_role(reader, server, stop, settings.server.shutdown_grace_ms)
    _log.info("stopped")
