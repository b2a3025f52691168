"""What a terminal shows when a server is ready: three ways to try it."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

KEY = "greeting"
VALUE = "hello"


def welcome(listen: str, *, program: str, python: str) -> str:
    """The commands, ready to be pasted into a shell."""
    commands = commands_to_try(listen, program=program, python=python)
    return "\n\n".join(["\nTry it from another terminal:", *commands, "Stop with Ctrl-C.\n"])


def commands_to_try(listen: str, *, program: str, python: str) -> list[str]:
    """Put a value with `program` (shalekv), get it with grpcurl and with the client of `python`."""
    key = base64.b64encode(KEY.encode()).decode()
    script = f"""
import asyncio, shalekv_client
async def main():
    async with shalekv_client.Client("{listen}") as client:
        print(await client.get(b"{KEY}"))
asyncio.run(main())"""
    return [
        f"{_near(program)} put --addr {listen} {KEY} {VALUE}",
        f"""grpcurl -plaintext -d '{{"key": "{key}"}}' {listen} shalekv.v1.KV/Get""",
        f"{_near(python)} -c '{script}'",
    ]


def _near(path: str) -> str:
    """A path as a shell takes it, from the current folder when it is below it."""
    absolute = Path(path).absolute()
    here = Path.cwd()
    below = absolute.is_relative_to(here)
    return shlex.quote(str(absolute.relative_to(here)) if below else path)
