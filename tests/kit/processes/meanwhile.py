"""A database on disk around a process that is stopped, and what happens to it meanwhile.

Lives and ages are the shortest that settings allow. Compactions, collections and checks run in the
process of the test, unless that is what is tested.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shalekv.core.audit.finding import FindingKind
from shalekv.core.manifest import Manifest
from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.fsck.check import Fsck
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.roles.compactor import Compactor
from shalekv.settings import (
    CollectorSettings,
    CompactorSettings,
    CompactSettings,
    LevelSettings,
    StoreSettings,
    UrlSettings,
)
from shalekv.store.cas import CasStore
from shalekv.store.local import LocalStore
from tests.kit.patience import patience_s
from tests.kit.processes.child import Child, ChildFailed, Line
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.processes import Processes
from tests.kit.processes.stalling import MODULE
from tests.kit.processes.wal_contents import manifest_ids, manifest_path

STALL_S = 120
LIFE_S = 2  # of the snapshots of a server, the least that there is
ALONE = ("--no-with-compactor", "--no-with-collector")
# The least that is allowed, so that all limits are met all the time.
TINY = {
    "wal-trigger-bytes": 32 << 10,
    "wal-trigger-count": 64,
    "wal-trigger-age-ms": 300,
    "sst-bytes": 64 << 10,
    "block-bytes": 1 << 10,
    "base-level-bytes": 64 << 10,
    "level-multiplier-count": 2,
    "l0-trigger-count": 2,
    "tombstone-age-s": 2,
    "subcompaction-count-max": 1,
    "compactor-poll-ms": 100,
    "compactor-lease-ttl-s": 4,
    "collect-interval-ms": 300,
    "collect-age-s": 1,
    "wal-retention-s": 0,
    "foreign-age-s": 5,
    "memtable-segment-bytes": 64 << 10,
    "skip-memtable-bytes": 64 << 10,
    "block-cache-bytes": 64 << 10,
    "metadata-cache-bytes": 1 << 20,
    "scan-message-bytes": 4 << 10,
    "snapshot-ttl-s": 20,  # a server that stands still for seconds is no fault here
    "fence-poll-ms": 50,
}
NEVER_LOOKS = ("--fence-poll-ms", "3600000")  # for a successor, unless something else tells it
SERVE = ("serve", "--listen", "127.0.0.1:0", "--log-format", "json")
SHORT_LIVED = (*ALONE, *NEVER_LOOKS, "--snapshot-ttl-s", str(LIFE_S))
COMPACT_ALL = ("--wal-trigger-age-ms", "0", "--sst-bytes", "65536", "--log-format", "json")
COLLECT_ALL = (
    *("--collect-age-s", "0", "--wal-retention-s", "0"),
    *("--collect-interval-ms", "100", "--log-format", "json"),
)


class Meanwhile:
    """The database in `folder`, and what others do to it."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        self._processes = processes

    def start_stalling(self, at: str, *argv: str) -> Child:
        """Start a command that will stop itself at a request; `MODULE` tells how."""
        command = ("-m", MODULE, at, "", *argv, "--url", self.url)
        return self._processes.start(*command, program=sys.executable)

    async def serve(self, *flags: str) -> Child:
        """A server on the database, which is made if there is none."""
        return await self._processes.serve(self.url, *flags)

    async def run(self, *argv: str) -> Child:
        """Run a command on the database to its end, which must be a good one."""
        command = await self.end_of(*argv)
        assert await command.exited() == 0, command.report()
        return command

    async def end_of(self, *argv: str) -> Child:
        """Run a command on the database to its end, whatever that is."""
        return await self._processes.run(*argv, "--url", self.url)

    async def compact(self, *flags: str) -> None:
        """Compact everything that is in the log; `flags` are as those of `shalekv compactor`."""
        given: dict[str, Any] = {"sst_bytes": 65_536, "wal_trigger_age_ms": 0}
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            given[name.removeprefix("--").replace("-", "_")] = value
        levels = {name: given.pop(name) for name in LevelSettings.model_fields if name in given}
        settings = CompactSettings(
            database=UrlSettings(url=self.url),
            levels=LevelSettings.model_validate(levels),
            compactor=CompactorSettings.model_validate(given),
        )
        with real_runtime() as runtime:
            store = LocalStore(self.folder, runtime)
            hurry = asyncio.Event()
            compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
            await compactor.run(is_once=True)
            await compactor.close()

    async def collect(self) -> None:
        """Collect once, whatever has been needless for a moment."""
        await self.collect_until_gone(lambda: False)

    async def collect_until_gone(self, is_there: Callable[[], bool]) -> None:
        settings = CollectorSettings(collect_age_s=0, wal_retention_s=0)
        with real_runtime() as runtime:
            store = CasStore(LocalStore(self.folder, runtime), runtime, StoreSettings())
            collecting = Collecting(store, settings)
            async with asyncio.timeout(patience_s(STALL_S)):
                await collecting.collect()
                while is_there():
                    await runtime.clock.sleep_ms(50)  # ages and lives are times of the store
                    await collecting.collect()

    async def collect_until(self, accept: Callable[[Line], bool]) -> None:
        """Collect again and again until the log line of a collection is accepted."""
        async with self.collecting() as collector:
            await collector.line(accept)

    @asynccontextmanager
    async def collecting(self) -> AsyncIterator[Child]:
        """A collector that spares nothing, and has met no error at the end."""
        collector = self._processes.start("collector", "--url", self.url, *COLLECT_ALL)
        yield collector
        assert await collector.stop() == 0, collector.report()
        failed = [line for line in collector.lines() if line["event"] == "collection failed"]
        assert not failed, collector.report()

    async def check(self) -> None:
        """No object is damaged or missing; orphans wait for the collector."""
        with real_runtime() as runtime:
            store = CasStore(LocalStore(self.folder, runtime), runtime, StoreSettings())
            found = [finding async for finding in Fsck(store, is_deep=True).findings()]
            assert [each for each in found if each.kind is not FindingKind.ORPHAN] == []

    async def bury_next_manifest(self) -> int:
        """Let others edit the manifest twice, and collect the first edit; its id.

        Whoever was about to create the next manifest finds its name free again, and others above.
        """
        buried = manifest_ids(self.folder)[-1] + 1
        await self.run("snapshot", "create", "--name", "passing", "--ttl", "1h")
        await self.run("snapshot", "delete", "passing")
        await self.collect()
        assert not manifest_path(self.folder, buried).exists()
        assert manifest_ids(self.folder)[-1] > buried
        return buried

    async def drop_snapshots(self) -> None:
        for snapshot in self.manifest().snapshots:
            await self.run("snapshot", "delete", snapshot.id.hex())

    def manifest(self, manifest_id: int | None = None) -> Manifest:
        """One of the manifests; the current one unless an id is given."""
        if manifest_id is None:
            manifest_id = manifest_ids(self.folder)[-1]
        data = manifest_path(self.folder, manifest_id).read_bytes()
        return decode_manifest(names.manifest_name(manifest_id), data)

    def objects(self, folder: str) -> set[str]:
        """The names of all objects in one of the folders."""
        return {f"{folder}{path.name}" for path in (self.folder / folder).glob("*")}


async def stalled(process: Child) -> None:
    """Wait until a process has stopped itself, which must not end before."""

    def wait() -> bool:
        options = os.WSTOPPED | os.WEXITED | os.WNOWAIT
        found = os.waitid(os.P_PID, process.pid, options)
        return found is not None and found.si_code == os.CLD_STOPPED

    async with asyncio.timeout(STALL_S):
        is_stopped = await asyncio.to_thread(wait)
    if not is_stopped:
        raise ChildFailed(f"it ended before it stopped\n{process.report()}")
