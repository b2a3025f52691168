"""Google Cloud Storage, as its XML API is spoken by obstore's GCSStore, on top of versitygw.

No emulator that a registry has honours x-goog-if-generation-match in the XML API, or even takes its
PUT. That API is that of S3 by other names, so `gcs_bridge.py` translates the names, and versitygw
keeps the promises: a condition holds here because it holds there. Credentials are not checked.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from tests.servers.gcs_bridge import Bridge
from tests.servers.s3 import S3Server
from tests.servers.serving import serving
from tests.servers.versitygw import versitygw

START_S = 10.0


@dataclass(frozen=True, slots=True)
class GcsServer:
    """Where it listens, and the server that keeps its objects."""

    endpoint: str
    behind: S3Server

    @property
    def service_account_key(self) -> str:
        """What obstore takes as `service_account_key`; it needs `allow_http` besides."""
        keyless = {"client_email": "", "private_key": "", "private_key_id": ""}
        return json.dumps({"gcs_base_url": self.endpoint, "disable_oauth": True, **keyless})

    def create_bucket(self, name: str) -> None:
        """It must not exist yet."""
        self.behind.create_bucket(name)


@contextmanager
def gcs() -> Iterator[GcsServer]:
    """The server, with no bucket in it; it translates in a thread."""
    with versitygw() as s3:
        started: Future[tuple[str, Callable[[], object]]] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(_serve(Bridge(s3), started)))
        thread.start()
        endpoint, stop = started.result(START_S)
        try:
            yield GcsServer(endpoint, s3)
        finally:
            stop()
            thread.join()


async def _serve(bridge: Bridge, started: Future[tuple[str, Callable[[], object]]]) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    async with serving(bridge.reply) as endpoint:
        started.set_result((endpoint, lambda: loop.call_soon_threadsafe(stopped.set)))
        await stopped.wait()
