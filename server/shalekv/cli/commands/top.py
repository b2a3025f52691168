"""`shalekv top`: servers as they are now, again and again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

import click
from rich.console import Console
from rich.live import Live

from shalekv.cli.console.connection import (
    ClientExit,
    Target,
    exit_codes_of_calls,
    target_options,
    told,
)
from shalekv.cli.console.output import printing
from shalekv.cli.console.units import duration
from shalekv.cli.top_servers import Seen
from shalekv.cli.top_view import picture
from shalekv_client import Client, RetryPolicy, ShaleKVError, Status

INTERVAL_MS_MIN = 100
FILE_COLUMNS = 160  # the width where there is no terminal
ONCE = RetryPolicy(attempts_max=1)  # the next picture is the repetition

_HELP = """Show what servers do, again and again, until Ctrl-C.

A line for each --addr: role, epoch, how far it has come, how far it is behind the furthest of them,
how old its state may be, calls per second and how long they took. Below it the first one that
answers: writes or how it follows, levels, snapshots and what each of them pins, calls, caches,
requests to the object store, watches. Rates are those since the picture before.

A server that does not answer is told, and asked again. With --once, or where standard output is no
terminal, one picture is printed after one interval; without any server that answers, it ends with
exit code 9.

\b
Examples:
  shalekv top
  shalekv top --addr 10.0.0.5:7654 --addr 10.0.0.6:7654,10.0.0.7:7654
  shalekv top --interval 5s
  shalekv top --once | head -3
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls(until_interrupted=True))
@click.option(
    "--interval",
    "interval_ms",
    callback=duration,
    default="1s",
    show_default=True,
    metavar="TIME",
    help="The time between two pictures, such as 500ms or 5s.",
)
@click.option("--once", is_flag=True, help="Print one picture, and end.")
@target_options
def top(*, interval_ms: int, once: bool, target: Target) -> None:
    """Show pictures, or print one."""
    if interval_ms < INTERVAL_MS_MIN:
        raise click.BadParameter(f"at least {INTERVAL_MS_MIN}ms", param_hint="--interval")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if once or not sys.stdout.isatty():
        with printing():
            is_answered = asyncio.run(_print_once(target, interval_ms))
        if not is_answered:
            raise SystemExit(ClientExit.UNREACHABLE)
        return
    try:
        asyncio.run(_show(target, interval_ms))
    except KeyboardInterrupt:
        return  # this is how it ends


async def _print_once(target: Target, interval_ms: int) -> bool:
    """Print what one interval has shown; whether any server has answered."""
    is_file = not sys.stdout.isatty()
    console = Console(width=FILE_COLUMNS if is_file and "COLUMNS" not in os.environ else None)
    async with _Servers(target) as servers:
        await servers.look()
        await asyncio.sleep(interval_ms / 1000.0)
        seen = await servers.look()
    console.print(picture(seen))
    return any(each.after is not None for each in seen)


async def _show(target: Target, interval_ms: int) -> None:
    console = Console()
    async with _Servers(target) as servers:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(await servers.look()), refresh=True)
                await asyncio.sleep(interval_ms / 1000.0)


class _Servers:
    """A client for each address, and what its server has told last."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._clients: dict[str, Client] = {}
        self._last: dict[str, Status] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for address in self._target.addresses:
            client = Client(address, timeout_ms=self._target.timeout_ms, retry=ONCE, coalesce=False)
            self._clients[address] = await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def look(self) -> Sequence[Seen]:
        """Ask all of them at once."""
        return await asyncio.gather(*map(self._look_at, self._clients))

    async def _look_at(self, address: str) -> Seen:
        before = self._last.pop(address, None)
        try:
            status = self._last[address] = await self._clients[address].status()
        except ShaleKVError as error:
            return Seen(address, before, None, told(error).removeprefix(f"{address}: "))
        return Seen(address, before, status)
