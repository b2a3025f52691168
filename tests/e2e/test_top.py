"""`shalekv top` and the status that it shows, with real servers."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from pathlib import Path

from tests.kit.processes.child import EXIT_S
from tests.kit.processes.processes import SHALEKV, Processes
from tests.servers.process import free_port


async def test_the_live_view_goes_on_without_its_server_and_ends_with_ctrl_c(
    processes: Processes, tmp_path: Path
) -> None:
    """On a terminal: the server is shown as gone, found again when it is back, and 0 at the end."""
    url, address = f"file://{tmp_path}/db", f"127.0.0.1:{free_port()}"
    server = await processes.serve(url, "--listen", address)
    screen, terminal = pty.openpty()
    top = await asyncio.create_subprocess_exec(
        *(SHALEKV, "top", "--addr", address, "--interval", "100ms"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"COLUMNS": "150", "LINES": "50", "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        async with asyncio.timeout(EXIT_S):
            await asyncio.to_thread(_read_until, screen, b"writes")
            await server.kill()
            await asyncio.to_thread(_read_until, screen, b"trying again")
            await processes.serve(url, "--listen", address, create=False)
            await asyncio.to_thread(_read_until, screen, b"writes")
            top.send_signal(signal.SIGINT)
            reading = asyncio.create_task(asyncio.to_thread(_read_until, screen, b"\x1b[?1049l"))
            assert await top.wait() == 0
            await reading
    finally:
        if top.returncode is None:
            top.kill()
            await top.wait()
        os.close(screen)


def _read_until(screen: int, wanted: bytes) -> None:
    """Read what the terminal is sent until it contains `wanted`."""
    seen = b""
    while wanted not in seen:
        try:
            part = os.read(screen, 65_536)
        except OSError:  # the process has ended
            part = b""
        assert part, f"{wanted!r} is not in {seen!r}"
        seen = seen[-10_000:] + part
