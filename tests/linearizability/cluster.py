"""The servers of one database, one after another, and the ways in which the next one comes."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from shalekv.cli.exit_codes import ExitCode
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import fenced_end
from tests.linearizability.caller import Board
from tests.servers.process import HOST, free_ports


class Disruption(enum.Enum):
    """What happens to the server."""

    KILL = "kill -9, and a start at the same address"
    TAKE_OVER = "a second server on the same database"
    STALL = "a second server while the first stands still, and then goes on"
    IDLE_STALL = "the same, but nobody writes when it begins, so that the first meets no fence"


class Clients(Protocol):
    """What a disruption asks of the clients."""

    def held(self) -> AbstractContextManager[None]: ...

    async def quiet(self) -> None:
        """Wait until no write is under way; while they are held."""
        ...

    async def moved_on(self) -> None:
        """Wait until much has changed at the next server, and somebody still asks the old one."""
        ...


class Cluster:
    """Starts servers on one database in turn, and tells the clients where."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        board: Board,
        *,
        clients: Clients,
        flags: tuple[str, ...],
    ) -> None:
        """Nothing serves yet; `flags` are for every server."""
        self.done: list[Disruption] = []
        self._processes = processes
        self._url = f"file://{folder}"
        self._board = board
        self._clients = clients
        self._flags = flags
        self._addresses = [f"{HOST}:{port}" for port in free_ports(2)]
        self._server: Child | None = None

    async def start(self) -> None:
        self._server = await self._serve()

    async def stop(self) -> None:
        assert self._server is not None
        assert await self._server.stop() == ExitCode.OK, self._server.report()

    async def disrupt(self, disruption: Disruption) -> None:
        """Let this happen; returns when the next server serves and the one before has ended."""
        before = self._server
        assert before is not None
        match disruption:
            case Disruption.KILL:
                await before.kill()
                self._server = await self._serve()
            case Disruption.TAKE_OVER:
                self._addresses.reverse()
                self._server = await self._serve()
                await fenced_end(before)
            case Disruption.STALL | Disruption.IDLE_STALL:
                await self._stall(before, idle=disruption is Disruption.IDLE_STALL)
        self.done.append(disruption)

    async def _stall(self, before: Child, *, idle: bool) -> None:
        """The next server comes, and is used, before the one that stands still goes on.

        Nobody sends one write after another to a server that does not answer: with too many of
        unknown outcome a history takes too long to judge.
        """
        with self._clients.held():
            if idle:
                await self._clients.quiet()
            before.pause()
            self._addresses.reverse()
            self._server = await self._serve()
        await self._clients.moved_on()
        before.resume()
        await fenced_end(before)

    async def _serve(self) -> Child:
        address = self._addresses[0]
        server = await self._processes.serve(self._url, "--listen", address, *self._flags)
        assert server.listen == address, server.report()
        await self._board.post(address)
        return server
