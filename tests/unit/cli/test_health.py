"""`shalekv health` against real servers, and without one."""

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


async def test_a_server_that_refuses_calls_is_not_ready() -> None:
    """A server that refuses calls, as when it shuts down or was fenced, is not ready."""
    async with serving() as it:
        it.server.refuse(Stopping("shutting down"))
        result = await ask(it.server.listen)
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")


async def test_a_silent_server_is_not_ready() -> None:
    """A server that does not answer within --timeout-ms, as while it opens, is not ready."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        result = await ask(f"127.0.0.1:{listening.getsockname()[1]}", "--timeout-ms", "50")
    assert result.exit_code == 1
    assert "no answer within 50 ms" in result.stderr
