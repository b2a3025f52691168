"""Runs the services of the compose files of docker/ as plain processes, without containers.

Each has the arguments and the environment of the file, with host names replaced by addresses of
this machine and mount points by folders; nothing of the environment of the test except PATH.
Third-party servers run already, unless their image is built here.

A volume is a folder with the owner and the mode that Docker gives a new one: those of its mount
point in the image, and root's where the image has none. Processes run as the user of their image,
who may write what is theirs and read everything: Python may be in a folder of root's. Both need
root; without it everything belongs to the user of the tests, and root's folders are read-only.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.compose_file import DOCKER, PORT, SAFEKEEPER_PORT, Service
from tests.kit.dockerfile import Folder, Image, read_dockerfile
from tests.kit.processes.child import EXIT_S, Child
from tests.servers.obtain import SERVERS
from tests.servers.process import free_port

HEALTHY_S = 120.0
SCRIPTS = "/opt/shalekv/scripts"  # where the Dockerfile puts those of docker/
CACHE = DOCKER.parent / ".cache"
PROGRAMS = (Path(sys.executable).parent, CACHE / "bin", SERVERS / "minio" / "bin")
IS_ROOT = os.geteuid() == 0
OF_ROOT = Folder(0, 0, 0o755)

_ADDRESS = re.compile(rf"([\w.-]*)([:/])(?:{PORT}|{SAFEKEEPER_PORT}|9000)\b")
_SELF = ("", "0.0.0.0", "127.0.0.1")  # noqa: S104 - words of the files


class Composition:
    """The services whose images are built here, each a process."""

    def __init__(
        self,
        services: Mapping[str, Service],
        hosts: Mapping[str, str],
        home: Path,
        settings: Mapping[str, str],
    ) -> None:
        """`hosts` maps each HOST:PORT of the file to an address here; `settings` are added to the
        file's.

        `home` has the volumes; every user must be able to enter it.
        """
        self._services = services
        self._hosts = dict(hosts)
        path = os.pathsep.join([*map(str, PROGRAMS), os.environ["PATH"]])
        self._environment = {"PATH": path, "HOME": str(home)}
        self._home = home
        self._settings = settings
        self._running: dict[str, Child] = {}
        self._all: list[Child] = []
        self._addresses: dict[str, str] = {}
        self._places: dict[str, dict[str, str]] = {}  # of mount points, for each service

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
            if name in self._running or not self._services[name].dockerfile:
                continue
            waits_for = self._services[name].depends_on
            await self.up(list(waits_for))
            for other, condition in waits_for.items():
                await self._come_to(other, condition)
            self.start(name)

    def start(
        self, name: str, *, address: str | None = None, mount_point: str | None = None
    ) -> Child:
        """Start a service, also one that runs already, and don't wait.

        `mount_point` replaces that of its one volume.
        """
        service = self._services[name]
        image = read_dockerfile(Path(service.dockerfile).name)
        argv = service.argv if "entrypoint" in service.text else [*image.entrypoint, *service.argv]
        self._places[name] = {
            point: str(self._volume(volume, image, mount_point or point))
            for point, volume in service.volumes.items()
        }
        self._addresses[name] = address or self.address(name)
        child = self._child(name, [*as_user(image.user), *argv])
        self._running[name] = child
        return child

    def run(self, *argv: str, name: str = "", env: Mapping[str, str] | None = None) -> Child:
        """Start a process beside the services, or what `docker exec` starts in one of them."""
        return self._child(name, argv, env)

    def run_as(self, name: str, *command: str) -> Child:
        """Start what `docker compose run NAME` does, with another command than that of the file."""
        service = self._services[name]
        image = read_dockerfile(Path(service.dockerfile).name)
        return self._child(name, [*as_user(image.user), *service.text["entrypoint"], *command])

    def _child(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        environment = self._environment | dict(env or {})
        if name:
            service = self._services[name]
            for variable, value in service.environment.items():
                environment[variable] = self._here(value, name)
            if service.is_ours:
                assert not set(service.environment) & set(self._settings)
                environment |= self._settings
        words = [self._here(word, name) for word in argv]
        self._all.append(Child(words, env=environment, stdin=None))
        return self._all[-1]

    async def is_healthy(self, name: str) -> bool:
        check = self.run(*self._services[name].health, name=name)
        return await check.exited() == 0

    async def healthy(self, name: str) -> None:
        """Wait until its health check succeeds."""
        async with asyncio.timeout(HEALTHY_S):
            while not await self.is_healthy(name):
                assert self[name].running, self[name].report()

    async def stop(self, name: str) -> int:
        """Stop it like `docker stop`: SIGTERM to the first process of the container alone."""
        child = self[name]
        os.kill(child.pid, signal.SIGTERM)
        return await child.exited(within_s=EXIT_S)

    async def _come_to(self, name: str, condition: str) -> None:
        if not self._services[name].dockerfile:
            return  # it was started before, and answers
        match condition:
            case "service_healthy":
                await self.healthy(name)
            case "service_completed_successfully":
                assert await self[name].exited(within_s=EXIT_S) == 0, self[name].report()
            case other:
                raise ValueError(other)

    def _volume(self, name: str, image: Image, point: str) -> Path:
        path = self._home / name
        if path.exists():
            return path
        path.mkdir()
        folder = image.folders.get(point, OF_ROOT)
        if IS_ROOT:
            os.chown(path, folder.uid, folder.gid)
            path.chmod(folder.mode)
        else:
            path.chmod(folder.mode if (folder.uid, folder.gid) == image.user else 0o555)
        return path

    def _here(self, text: str, name: str) -> str:
        """A word of the file, or of an argument, as it is for the process of the service `name`."""

        def address(found: re.Match[str]) -> str:
            host, between = found.groups()
            if host in _SELF and name:
                host = name
            return self.address(host).replace(":", between) if host in self._services else found[0]

        places = self._places.get(name, {})
        for there, here in {**self._hosts, SCRIPTS: str(DOCKER), **places}.items():
            text = text.replace(there, here)
        return _ADDRESS.sub(address, text)


@cache
def as_user(user: tuple[int, int]) -> list[str]:
    """Command that starts a program as this user of an image; empty if the tests may not."""
    if not IS_ROOT:
        return []
    change = ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", "--clear-groups"]
    reading = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    tried = []
    for argv in ([*change, *reading], change):  # some containers lack the right to read everything
        probe = [*argv, sys.executable, "-c", "import shalekv"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return argv
        tried.append(done.stderr)
    raise AssertionError(f"Python cannot run as another user than root: {tried}")
