"""Safekeepers as processes, and the writers and readers of one database over them.

    cluster = Cluster(processes, tmp_path, count=3)
    await cluster.start()
    writer = await cluster.serve()

The bucket is a folder, unless another one is named. Each safekeeper has a data folder and a port
that it keeps over its lives.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shalekv.clock import LoopClock
from shalekv.core.quorum.messages import Health
from shalekv.engine.quorum.links import LinkBroken, MemberStatus
from shalekv.rpc.safekeeper_links import GrpcLinks
from tests.kit.processes.child import READY_S, Child
from tests.kit.processes.processes import Processes
from tests.servers.process import free_ports

POLL_MS = 50
# For a writer no write of which may fail: members that wait for their turn are there all the same.
LENIENT = ("--quorum-timeout-ms", "60000")
Row = dict[str, Any]


def is_sound(held: MemberStatus | None) -> bool:
    return held is not None and held.health is Health.SOUND


class Cluster:
    """The processes of one quorum database."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        *,
        count: int = 3,
        bucket: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing runs yet; everything is written below `folder`, or to another `bucket`.

        `env` is what each process needs to reach that bucket.
        """
        self._processes = processes
        self._folder = folder
        self._env = dict(env or {})
        self._flags: tuple[str, ...] = ()
        self.bucket = bucket or f"file://{folder}/bucket"
        self.url = f"{self.bucket}/db"
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.nodes: list[Child | None] = [None] * count

    async def start(self, *flags: str) -> None:
        """Start every safekeeper, with these flags, now and whenever it is started again."""
        self._flags = flags
        await asyncio.gather(*(self.start_node(index) for index in range(len(self.nodes))))

    async def start_node(self, index: int, *flags: str) -> Child:
        """Start one, on what it has on disk; `flags` are for this life of it."""
        argv = ["safekeeper", "--data", str(self.data(index)), "--url", self.bucket]
        argv += ["--listen", self.addresses[index], "--log-format", "json", *self._flags, *flags]
        node = self._processes.start(*argv, env=self._env)
        await node.ready(within_s=READY_S)
        self.nodes[index] = node
        return node

    def add_node(self) -> int:
        """One more, which is not started yet; its index."""
        self.addresses += [f"127.0.0.1:{port}" for port in free_ports(1)]
        self.nodes.append(None)
        return len(self.nodes) - 1

    def node(self, index: int) -> Child:
        node = self.nodes[index]
        assert node is not None, f"safekeeper {index} does not run"
        return node

    async def kill(self, indices: Iterable[int]) -> None:
        """End these on the spot, as a power cut does but for what the kernel holds."""
        for index in indices:
            await self.node(index).kill()
            self.nodes[index] = None

    def wipe(self, index: int) -> None:
        """Lose the disk of one that does not run."""
        assert self.nodes[index] is None, f"safekeeper {index} runs"
        shutil.rmtree(self.data(index))

    def data(self, index: int) -> Path:
        return self._folder / f"sk{index}"

    def log_folder(self, index: int) -> Path:
        (folder,) = (
            each for each in self.data(index).iterdir() if each.is_dir() and not each.suffix
        )
        return folder

    @property
    def files(self) -> Path:
        """The folder of the database, where the bucket is one."""
        return Path(self.url.removeprefix("file://"))

    def writer_flags(self, members: Iterable[int] | None = None) -> tuple[str, ...]:
        indices = range(len(self.addresses)) if members is None else members
        addresses = ",".join(self.addresses[index] for index in indices)
        return "--wal", "quorum", "--safekeepers", addresses

    def start_serve(
        self, *flags: str, create: bool = True, env: Mapping[str, str] | None = None
    ) -> Child:
        argv = ["serve", "--url", self.url, "--listen", "127.0.0.1:0", "--log-format", "json"]
        argv += ["--create", *self.writer_flags()] if create else []
        return self._processes.start(*argv, *flags, env=self._env | dict(env or {}))

    async def serve(
        self, *flags: str, create: bool = True, env: Mapping[str, str] | None = None
    ) -> Child:
        """A writer that serves; it creates the database if there is none yet."""
        writer = self.start_serve(*flags, create=create, env=env)
        await writer.ready()
        return writer

    async def read(self, *flags: str) -> Child:
        return await self._processes.read(self.url, *flags, env=self._env)

    async def run(self, *argv: str) -> Child:
        return await self._processes.run(*argv, "--url", self.url, env=self._env)

    async def status(self) -> dict[str, Row]:
        told = await self.run("safekeeper", "status", "--format", "json")
        assert await told.exited() == 0, told.report()
        rows = [json.loads(line) for line in told.stdout().splitlines()]
        return {row["address"]: row for row in rows}

    async def status_of(self, index: int) -> Row:
        return (await self.status())[self.addresses[index]]

    async def until(
        self, index: int, accept: Callable[[MemberStatus], bool], *, within_s: float
    ) -> None:
        """Ask one safekeeper, over gRPC, until what it holds is as it should be."""
        seen: MemberStatus | None = None
        try:
            async with asyncio.timeout(within_s):
                while seen is None or not accept(seen):
                    seen = await self.held_by(index)
                    await LoopClock().sleep_ms(POLL_MS)
        except TimeoutError:
            raise AssertionError(f"after {within_s} s: {seen}\n{self.reports()}") from None

    async def held_by(self, index: int) -> MemberStatus | None:
        """What one safekeeper says that it holds; None: it is no member, or does not answer."""
        links = GrpcLinks()
        try:
            members = (await links.status(self.addresses[index])).members
        except LinkBroken:
            return None
        finally:
            await links.close()
        return members[0] if members else None

    def reports(self) -> str:
        return "\n".join(node.report() for node in self.nodes if node is not None)
