"""What observability costs: processor time of the server for a call, beside a server without it.

Servers with and without run at the same time, each on its own folder, and answer in turns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial

from aiohttp import ClientSession, web

from shalekv.clock import LoopClock
from tests.bench import requests
from tests.bench.measures.python_client import python_client
from tests.bench.plan import Found, Goal, Measure
from tests.bench.requests import KV
from tests.bench.stage import ALONE, Load, Stage, Target, Way
from tests.servers.process import free_port

PLAIN, SCRAPED, TRACED, BEFORE = "without", "metrics", "1 % traced", "the commit before"
KINDS = ("get", "put", "get in a session", "put in a session")
TINY_KINDS = ("put",)
ROUNDS = 20
UNARY_S = 1.25
SCRAPE_EACH_MS = 1_000
RATIO = "0.01"
AS_PROMETHEUS = {"Accept": "application/openmetrics-text;version=1.0.0"}
CALLS_OF_SESSIONS = 20_000
FLAGS = (*ALONE, "--memory-bytes", "2147483648")  # the memtable holds what all turns write

Beside = Callable[[], AbstractAsyncContextManager[None]]


async def telemetry(stage: Stage, found: Found) -> None:
    """Gets and durable puts, each a call of its own or an operation of a session."""
    metrics = f"127.0.0.1:{free_port()}"
    keys = requests.keys(stage.sized(requests.KEYS, 100))
    async with _collector() as (endpoint, received):
        traces = ("--otlp-endpoint", endpoint, "--trace-ratio", stage.sized(RATIO, "1"))
        if stage.is_tiny:  # a single one, to save time
            server = await _serve(stage, "--metrics", metrics, *traces)
            servers = dict.fromkeys((PLAIN, SCRAPED, TRACED), server)
        else:
            servers = {
                PLAIN: await _serve(stage),
                SCRAPED: await _serve(stage, "--metrics", metrics),
                TRACED: await _serve(stage, *traces),
            }
        if stage.base is not None:
            url = f"file://{stage.new_folder('before')}/db"
            servers[BEFORE] = await stage.serve_base(url, *FLAGS)
        beside: dict[str, Beside] = {
            side: partial(_scraped, f"http://{metrics}/metrics") if side == SCRAPED else nullcontext
            for side in servers
        }
        filling = Load(f"{KV}/Write", stage.requests(requests.writes(keys)), in_flight=4)
        for server in servers.values():
            await stage.put_under_load(server, filling, count=len(requests.writes(keys)))
        kinds = stage.sized(KINDS, TINY_KINDS)
        for kind in kinds:
            ways: dict[str, Way] = {
                f"{kind}, {side}": _way(stage, server, kind, keys, beside[side])
                for side, server in servers.items()
            }
            await stage.in_turns(found, ways, stage.sized(ROUNDS, 1))
        for server in {each.address: each for each in servers.values()}.values():
            await server.stop()
    assert received, "no spans were sent"
    goals = {"metrics": (SCRAPED, PLAIN), "traces": (TRACED, PLAIN), "before": (PLAIN, BEFORE)}
    for kind in kinds:
        for name, (side, other) in goals.items():
            if other in servers:
                key = _key(name, kind)
                found.ratio(key, "server CPU us", f"{kind}, {side}", f"{kind}, {other}")


async def _serve(stage: Stage, *flags: str) -> Target:
    return await stage.serve(f"file://{stage.new_folder('database')}/db", *FLAGS, *flags)


def _key(name: str, kind: str) -> str:
    return f"{name} {kind}".replace(" ", "_")


def _way(stage: Stage, server: Target, kind: str, keys: list[bytes], beside: Beside) -> Way:
    name = kind.split(maxsplit=1)[0]
    if kind.endswith("session"):
        calls = stage.sized(CALLS_OF_SESSIONS, 100)
        way_of = {"get": "session-get", "put": "session"}
        call: Way = partial(python_client, sys.executable, server, way_of[name], calls)
    else:
        messages = {"get": requests.gets, "put": requests.puts}[name](keys)
        load = Load(f"{KV}/{name.title()}", stage.requests(messages))
        call = partial(stage.put_under_load, server, load, seconds=UNARY_S)

    async def way() -> Mapping[str, float]:
        async with beside():
            return await call()

    return way


@asynccontextmanager
async def _scraped(url: str) -> AsyncIterator[None]:
    """Get the metrics at the middle of each second."""

    async def scrape() -> None:
        clock = LoopClock()
        async with ClientSession() as session:
            while True:
                await clock.sleep_ms(SCRAPE_EACH_MS / 2)
                async with session.get(url, headers=AS_PROMETHEUS) as reply:
                    assert (await reply.read()).endswith(b"# EOF\n")
                await clock.sleep_ms(SCRAPE_EACH_MS / 2)

    scraping = asyncio.create_task(scrape())
    try:
        yield
    finally:
        scraping.cancel()
        with suppress(asyncio.CancelledError):
            await scraping


@asynccontextmanager
async def _collector() -> AsyncIterator[tuple[str, list[int]]]:
    """Take what servers export, and note how many bytes it was."""
    received: list[int] = []

    async def take(request: web.Request) -> web.Response:
        received.append(len(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    application = web.Application(client_max_size=64 * 1024 * 1024)
    application.router.add_post("/v1/traces", take)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        await runner.cleanup()


MEASURE = Measure(
    "telemetry",
    "what metrics and traces cost the server, 20 pairs in turns",
    (
        *(
            Goal(
                _key("metrics", kind),
                f"CPU of a {kind}, scraped each second, without = 1",
                at_most=1.02,
            )
            for kind in KINDS
        ),
        *(
            Goal(
                _key("traces", kind),
                f"CPU of a {kind}, 1 % of them traced, without = 1",
                at_most=1.05,
            )
            for kind in KINDS
        ),
        *(
            Goal(_key("before", kind), f"CPU of a {kind} without both, the commit before = 1")
            for kind in KINDS
        ),
    ),
    telemetry,
)
