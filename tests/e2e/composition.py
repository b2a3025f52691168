"""Runs what docker/compose.yaml says as plain processes, without containers.

Each has the arguments and the environment of the file, where names of hosts have become addresses
of this machine, and nothing of the environment of the test but PATH. Servers of others, such as the
S3 server, run already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.compose_file import DOCKER, PORT, Service
from tests.kit.processes.child import EXIT_S, Child
from tests.servers.process import free_port

HEALTHY_S = 120.0
SCRIPTS = "/opt/shalekv/scripts"  # where the Dockerfile puts those of docker/
PROGRAMS = (Path(sys.executable).parent, DOCKER.parent / ".cache" / "bin")


class Composition:
    """The services of ours, each a process."""

    def __init__(
        self,
        services: Mapping[str, Service],
        hosts: Mapping[str, str],
        home: Path,
        settings: Mapping[str, str],
    ) -> None:
        """`hosts` says where HOST:PORT of the file is here; `settings` are beside those there."""
        self._services = services
        self._hosts = dict(hosts)
        path = os.pathsep.join([*map(str, PROGRAMS), os.environ["PATH"]])
        self._environment = {"PATH": path, "HOME": str(home)}
        self._settings = settings
        self._running: dict[str, Child] = {}
        self._all: list[Child] = []
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._all:
            child.close()

    def __getitem__(self, name: str) -> Child:
        """The process that was started last as the service `name`."""
        return self._running[name]

    def address(self, name: str) -> str:
        if name not in self._addresses:
            self._addresses[name] = f"127.0.0.1:{free_port()}"
        return self._addresses[name]

    async def up(self, names: Sequence[str]) -> None:
        """Start these and what they depend on, each once what it waits for has come about."""
        for name in names:
            if name in self._running or not self._services[name].is_ours:
                continue
            waits_for = self._services[name].depends_on
            await self.up(list(waits_for))
            for other, condition in waits_for.items():
                await self._come_to(other, condition)
            self.start(name)

    def start(self, name: str, *, address: str | None = None) -> Child:
        """Start a service, once more if it runs already, and don't wait."""
        service = self._services[name]
        where = address or self.address(name)
        child = self.run(*service.argv, env=dict(service.environment), at=where)
        self._running[name] = child
        return child

    def run(self, *argv: str, env: Mapping[str, str] | None = None, at: str = "") -> Child:
        """Start a process as those of the services; `at` is where it serves, or whom it asks."""
        assert not set(env or {}) & set(self._settings)
        settings = self._settings if env else {}
        environment = {k: self._here(v, at) for k, v in (env or {}).items()}
        child = Child(
            [self._here(argument, at) for argument in argv],
            env=self._environment | environment | dict(settings),
            stdin=None,
        )
        self._all.append(child)
        return child

    async def is_healthy(self, name: str) -> bool:
        check = self.run(*self._services[name].health, at=self.address(name))
        return await check.exited() == 0

    async def healthy(self, name: str) -> None:
        """Wait until its health check says that it is well."""
        async with asyncio.timeout(HEALTHY_S):
            while not await self.is_healthy(name):
                assert self[name].running, self[name].report()

    async def stop(self, name: str) -> int:
        """What `docker stop` does: SIGTERM to the first process of the container alone."""
        child = self[name]
        os.kill(child.pid, signal.SIGTERM)
        return await child.exited(within_s=EXIT_S)

    async def _come_to(self, name: str, condition: str) -> None:
        if not self._services[name].is_ours:
            return  # it was started before, and answers
        match condition:
            case "service_healthy":
                await self.healthy(name)
            case "service_completed_successfully":
                assert await self[name].exited(within_s=EXIT_S) == 0, self[name].report()
            case other:
                raise ValueError(other)

    def _here(self, text: str, address: str) -> str:
        places = self._hosts | {SCRIPTS: str(DOCKER)}
        if address:
            names = [*self._services, "0.0.0.0", "127.0.0.1"]  # noqa: S104 - a word of the file
            places |= {f"{name}:{PORT}": address for name in names}
        for there, here in places.items():
            text = text.replace(there, here)
        return text
