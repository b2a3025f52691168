"""The endpoint of metrics of a process, as Prometheus and probes use it."""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple

from aiohttp import ClientSession, TCPConnector
from yarl import URL

from shalekv.clock import LoopClock
from tests.kit.processes.child import Child, event

WAIT_S = 60.0
POLL_MS = 100


class Fetched(NamedTuple):
    """The reply to a request over HTTP."""

    status: int
    text: str


async def fetched(
    child: Child, path: str, *, token: str = "", tls: ssl.SSLContext | None = None
) -> Fetched:
    """Ask the endpoint of a process that has `--metrics`."""
    line = await child.line(event("serving metrics"))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = URL(line["url"]).join(URL(path))
    async with (
        ClientSession(connector=TCPConnector(ssl=tls or True)) as session,
        session.get(url, headers=headers) as got,
    ):
        return Fetched(got.status, await got.text())


async def scraped(
    child: Child, *, token: str = "", tls: ssl.SSLContext | None = None
) -> dict[str, float]:
    """Return all samples, by name and labels, when the access policy is known."""
    async with asyncio.timeout(WAIT_S):
        while (found := await fetched(child, "/metrics", token=token, tls=tls)).status == 503:
            await LoopClock().sleep_ms(POLL_MS)
    assert found.status == 200, found.text
    samples = [line.rpartition(" ") for line in found.text.splitlines() if line[0] != "#"]
    return {name.removeprefix("shalekv_"): float(value) for name, _, value in samples}
