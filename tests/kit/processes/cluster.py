"""The processes of one database: servers, readers, commands, and safekeepers if there are any.

    cluster = await Cluster.started(processes, tmp_path, count=3)
    writer = await cluster.serve()

The bucket is a folder, unless another one is named. Each safekeeper has a data folder and a port
that it keeps over its lives. Compactions, collections and checks of a folder run in the process of
the test, unless that is what is tested; ages and lives are the shortest that settings allow.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from shalekv.clock import LoopClock
from shalekv.format.names import level_name
from shalekv.jobs.collect import CollectJob
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.audit import FindingKind
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.quorum_records import LogHealth
from shalekv.protocol.sst_table import SstInfo
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.settings import (
    CollectorSettings,
    CompactorConfig,
    CompactorSettings,
    LevelSettings,
    StoreSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.write.quorum.links import LinkBroken, MemberStatus
from tests.kit.engine.loading import encoded_file
from tests.kit.processes.child import READY_S, Child, Line
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.processes import Processes
from tests.kit.processes.stalling import STALL_S
from tests.kit.processes.wal_contents import current_manifest, read_manifest
from tests.kit.timeouts import scaled_timeout_s
from tests.servers.process import free_ports

POLL_MS = 50
LIFE_S = 2  # shortest permitted life of a server's snapshots
ALONE = ("--no-with-compactor", "--no-with-collector")
# For writers whose writes must not fail: slow members are waited for.
LENIENT = ("--quorum-timeout-ms", "60000")
COMPACT_ALL = ("--wal-trigger-age-ms", "0", "--sst-bytes", "65536", "--log-format", "json")
COLLECT_ALL = (
    *("--collect-age-s", "0", "--wal-retention-s", "0"),
    *("--collect-interval-ms", "100", "--log-format", "json"),
)
Row = dict[str, Any]
# Small values, so that these limits are met all the time.
TINY = {
    "wal-trigger-bytes": 32 << 10,
    "wal-trigger-age-ms": 300,
    "sst-bytes": 64 << 10,
    "block-bytes": 1 << 10,
    "base-level-bytes": 64 << 10,
    "l0-trigger-count": 2,
    "subcompaction-count-max": 1,
    "compactor-idle-poll-ms": 100,
    "compactor-lease-ttl-s": 4,
    "collect-interval-ms": 300,
    "collect-age-s": 1,
    "wal-retention-s": 0,
    "foreign-file-age-s": 5,
    "direct-ingest-bytes": 64 << 10,
    "block-cache-bytes": 64 << 10,
    "metadata-cache-bytes": 1 << 20,
    "scan-message-bytes": 4 << 10,
    "snapshot-ttl-s": 20,  # a server that is paused for seconds is no fault here
    "fence-poll-ms": 50,
}


def is_sound(held: MemberStatus | None) -> bool:
    return held is not None and held.health is LogHealth.SOUND


class Cluster:
    """The processes of one database, and what happens to its objects beside them."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        *,
        count: int = 0,
        bucket: str | None = None,
        name: str = "db",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing runs yet; everything is written below `folder`, or to another `bucket`.

        There will be `count` safekeepers. `env` is what each process needs to reach the bucket.
        """
        self.processes = processes
        self.env = dict(env or {})
        self.bucket = bucket or f"file://{folder}/bucket"
        self.url = f"{self.bucket}/{name}"
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.nodes: list[Child | None] = [None] * count
        self._below = folder
        self._flags: tuple[str, ...] = ()

    @classmethod
    async def started(cls, processes: Processes, folder: Path, *flags: str, count: int = 3) -> Self:
        """One whose safekeepers run, with these flags."""
        cluster = cls(processes, folder, count=count)
        await cluster.start(*flags)
        return cluster

    @property
    def folder(self) -> Path:
        """Folder of the database, where the bucket is a folder."""
        return Path(self.url.removeprefix("file://"))

    # Servers and commands.

    def start_serve(
        self, *flags: str, create: bool = True, env: Mapping[str, str] | None = None
    ) -> Child:
        if create and self.nodes:
            flags = ("--wal", "quorum", *self.safekeepers, *flags)
        env = self.env | dict(env or {})
        return self.processes.start_serve(self.url, *flags, create=create, env=env)

    async def serve(
        self, *flags: str, create: bool = True, env: Mapping[str, str] | None = None
    ) -> Child:
        """A writer that serves; it creates the database if there is none yet."""
        writer = self.start_serve(*flags, create=create, env=env)
        await writer.ready()
        return writer

    async def read(self, *flags: str) -> Child:
        return await self.processes.read(self.url, *flags, env=self.env)

    async def run(self, *argv: str, code: int = 0) -> Child:
        """Run a command on the database to its end, which must be with this exit code."""
        return await self.processes.run(*argv, "--url", self.url, env=self.env, code=code)

    # Events that concern the objects.

    @asynccontextmanager
    async def store(self) -> AsyncIterator[CasStore]:
        """The objects, for this process, which has the credentials of the bucket in its own."""
        async with self._opened() as (store, runtime):
            yield CasStore(store, runtime, self._settings)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[ObjectStore, Runtime]]:
        with real_runtime() as runtime:
            store = open_store(self.url, runtime, self._settings)
            try:
                yield store, runtime
            finally:
                await store.close()

    @property
    def _settings(self) -> StoreSettings:
        names = {name: f"SHALEKV_STORE__{name.upper()}" for name in StoreSettings.model_fields}
        given = {name: self.env[each] for name, each in names.items() if each in self.env}
        return StoreSettings.model_validate(given)

    async def compact(self, *flags: str) -> None:
        """Compact everything that is in the log; `flags` are as those of `shalekv compactor`."""
        given: dict[str, Any] = {"sst_bytes": 65_536, "wal_trigger_age_ms": 0}
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            given[name.removeprefix("--").replace("-", "_")] = value
        levels = {name: given.pop(name) for name in LevelSettings.model_fields if name in given}
        settings = CompactorConfig(
            levels=LevelSettings.model_validate(levels),
            compactor=CompactorSettings.model_validate(given),
            store=self._settings,
        )
        async with self._opened() as (store, runtime):
            hurry = asyncio.Event()
            compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
            await compactor.run(is_once=True)
            await compactor.close()

    async def collect(self, is_there: Callable[[], bool] = lambda: False) -> None:
        """Collect objects that have been garbage for a moment; repeat while any is left."""
        settings = CollectorSettings(collect_age_s=0, wal_retention_s=0)
        async with self.store() as store, asyncio.timeout(scaled_timeout_s(STALL_S)):
            collecting = CollectJob(store, settings)
            await collecting.collect()
            while is_there():
                await LoopClock().sleep_ms(50)  # ages and lives are times of the store
                await collecting.collect()

    async def collect_until(self, accept: Callable[[Line], bool]) -> None:
        """Run a collector that spares nothing, until a log line is accepted; it meets no error."""
        collector = self.processes.start("collector", "--url", self.url, *COLLECT_ALL)
        await collector.line(accept)
        assert await collector.stop() == 0, collector.report()
        failed = [line for line in collector.lines() if line["event"] == "collection failed"]
        assert not failed, collector.report()

    async def check(self) -> None:
        """No object is damaged or missing; orphans wait for the collector."""
        async with self.store() as store:
            found = [finding async for finding in Fsck(store, is_deep=True).findings()]
        assert [each for each in found if each.kind is not FindingKind.ORPHAN] == []

    async def drop_snapshots(self) -> None:
        for snapshot in self.manifest().snapshots:
            await self.run("snapshot", "delete", snapshot.id.hex())

    def manifest(self, manifest_id: int | None = None) -> Manifest:
        """One of the manifests; the current one unless an id is given."""
        if manifest_id is None:
            return current_manifest(self.folder)
        return read_manifest(self.folder, manifest_id)

    def objects(self, folder: str) -> set[str]:
        """The names of all objects in one of the folders."""
        return {f"{folder}{path.name}" for path in (self.folder / folder).glob("*")}

    def add_file(self, sst_id: bytes, entries: Sequence[Entry], *, block_bytes: int) -> SstInfo:
        """Put a file to be loaded into the folder of the levels, as a tool does."""
        database_id = self.manifest().database_id
        info, data = encoded_file(database_id, sst_id, entries, block_bytes=block_bytes)
        path = self.folder / level_name(sst_id)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return info

    # Safekeepers.

    async def start(self, *flags: str) -> None:
        """Start every safekeeper, with these flags, now and whenever it is started again."""
        self._flags = flags
        await asyncio.gather(*(self.start_node(index) for index in range(len(self.nodes))))

    async def start_node(self, index: int, *flags: str) -> Child:
        """Start one, on what it has on disk; `flags` are for this life of it."""
        argv = ["safekeeper", "--data", str(self.data(index)), "--url", self.bucket]
        argv += ["--listen", self.addresses[index], "--log-format", "json", *self._flags, *flags]
        node = self.processes.start(*argv, env=self.env)
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
        return self._below / f"sk{index}"

    def log_folder(self, index: int) -> Path:
        (folder,) = (
            each for each in self.data(index).iterdir() if each.is_dir() and not each.suffix
        )
        return folder

    @property
    def safekeepers(self) -> tuple[str, str]:
        """The flag that names all of them."""
        return "--safekeepers", ",".join(self.addresses)

    async def status(self) -> dict[str, Row]:
        status = await self.run("safekeeper", "status", "--format", "json")
        rows = [json.loads(line) for line in status.stdout().splitlines()]
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
        """Ask one safekeeper for its member; None if it has none, or does not answer."""
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
