"""Starts the processes of a test, and ends all of them with it.

    async def test_x(processes: Processes, tmp_path: Path) -> None:
        server = await processes.serve(f"file://{tmp_path}/db")
        ... server.listen is HOST:PORT ...
        assert await server.stop() == 0

Each child is a session of its own, so a signal reaches it and its children and no other process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.processes.child import EXIT_S, READY_S, Child

SHALEKV = str(Path(sys.executable).with_name("shalekv"))
SERVE = ("serve", "--listen", "127.0.0.1:0", "--log-format", "json")


def environment() -> dict[str, str]:
    """Environment of the test without any SHALEKV_*, each of which would be a setting."""
    return {k: v for k, v in os.environ.items() if not k.startswith("SHALEKV_")}


class Processes:
    """Starts processes, and ends all of them when it is left."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as closing:
            for child in self._children:
                closing.callback(child.close)

    def start(
        self,
        *argv: str,
        program: str = SHALEKV,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> Child:
        """Start `program` (the `shalekv` of this environment) with `argv`, and don't wait.

        `env` is added to the environment of the test, from which every SHALEKV_* is taken away.
        """
        child = Child([program, *argv], env=environment() | dict(env or {}), stdin=stdin)
        self._children.append(child)
        return child

    def start_serve(
        self, url: str, *flags: str, create: bool = True, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `shalekv serve` on a free port, logging JSON, and don't wait."""
        created = ["--create"] if create else []
        return self.start(*SERVE, "--url", url, *created, *flags, env=env)

    async def serve(
        self,
        url: str,
        *flags: str,
        create: bool = True,
        env: Mapping[str, str] | None = None,
        within_s: float = READY_S,
    ) -> Child:
        """Start `shalekv serve` and wait until it serves; `listen` is then known."""
        child = self.start_serve(url, *flags, create=create, env=env)
        await child.ready(within_s=within_s)
        return child

    async def read(
        self, url: str, *flags: str, env: Mapping[str, str] | None = None, within_s: float = READY_S
    ) -> Child:
        """Start `shalekv reader` on a free port and wait until it serves."""
        argv = ["reader", "--url", url, "--listen", "127.0.0.1:0", "--log-format", "json"]
        child = self.start(*argv, *flags, env=env)
        await child.ready(within_s=within_s)
        return child

    async def run(
        self,
        *argv: str,
        program: str = SHALEKV,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        within_s: float = EXIT_S,
        code: int | None = None,
    ) -> Child:
        """Run a command to its end, which must be with this exit code, if one is given."""
        child = self.start(*argv, program=program, env=env, stdin=stdin)
        ended = await child.exited(within_s=within_s)
        assert code in (None, ended), child.report()
        return child
