"""`shalekv health` against real servers, and without one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

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


async def test_a_server_that_starts_is_waited_for(tmp_path: Path) -> None:
    """With --wait, a check that fails is repeated until the server is ready."""
    path = tmp_path / "socket"
    asked = asyncio.Event()

    def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        asked.set()

    starting = await asyncio.start_unix_server(hang_up, path)
    waiting = asyncio.create_task(ask(f"unix:{path}", "--wait", "1m"))
    await asked.wait()
    starting.close()
    path.unlink()
    async with serving(listen=f"unix:{path}"):
        result = await waiting
    assert (result.exit_code, result.stdout) == (0, "SERVING\n")


async def test_a_wait_has_an_end(tmp_path: Path) -> None:
    """After --wait, the exit code and the message are those of the last check."""
    result = await ask(f"unix:{tmp_path}/nobody", "--wait", "1ms")
    assert result.exit_code == 1
    assert "nobody" in result.stderr
    async with serving() as it:
        it.server.refuse(Stopping("shutting down"))
        result = await ask(it.server.listen, "--wait", "1ms")
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
