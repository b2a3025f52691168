"""`shalekv health` against real servers, and against none."""

from __future__ import annotations

import asyncio
import socket

from click.testing import CliRunner, Result

from shalekv.cli.main import shalekv
from shalekv.errors import Stopping
from tests.kit.serving.rpc import serving


async def ask(address: str, *flags: str) -> Result:
    """Run the command in a thread: the server is in the loop of the test."""
    return await asyncio.to_thread(
        CliRunner().invoke, shalekv, ["health", "--addr", address, *flags]
    )


async def test_a_server_that_turns_calls_away_is_not() -> None:
    """As one that shuts down, or whose writer was fenced."""
    async with serving() as it:
        await it.server.refuse(Stopping("shutting down"))
        result = await ask(it.server.listen)
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")


async def test_a_server_that_is_silent_is_not_well() -> None:
    """The answer comes within --timeout-ms or is none, as while a writer opens its database."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        result = await ask(f"127.0.0.1:{listening.getsockname()[1]}", "--timeout-ms", "50")
    assert result.exit_code == 1
    assert "no answer within 50 ms" in result.stderr
