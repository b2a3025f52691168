"""A database on disk around a process that stands still, and what happens to it meanwhile.

What takes days in earnest, here takes seconds: lives and ages are settings. Everything is done by
the commands of the user, each a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from shalekv.core.manifest import Manifest
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from tests.kit.processes.child import Child, ChildFailed, Line
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import manifest_ids, manifest_path

STALL_S = 120
LIFE_S = 2  # of the snapshots of a server, the least that there is
ALONE = ("--no-with-compactor", "--no-with-collector")
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
        """There need not be one yet."""
        self.folder = folder
        self.url = f"file://{folder}"
        self._processes = processes

    def start_stalling(self, at: str, *argv: str) -> Child:
        """Start a command that will stop itself at a request, as in `tests.e2e.stalling`."""
        command = ("-m", "tests.e2e.stalling", at, *argv, "--url", self.url)
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
        """Compact everything that is in the log."""
        await self.run("compactor", "--once", *COMPACT_ALL, *flags)

    async def collect(self) -> None:
        """Collect once, whatever has been needless for a moment."""
        await self.run("collector", "--once", *COLLECT_ALL)

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
        """Every object is as it has to be."""
        await self.run("fsck", "--deep")

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
        """Take all snapshots away, as their expiry would."""
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
    """Wait until a process stands still, which must not end before."""

    def wait() -> bool:
        options = os.WSTOPPED | os.WEXITED | os.WNOWAIT
        found = os.waitid(os.P_PID, process.pid, options)
        return found is not None and found.si_code == os.CLD_STOPPED

    async with asyncio.timeout(STALL_S):
        is_stopped = await asyncio.to_thread(wait)
    if not is_stopped:
        raise ChildFailed(f"it ended before it stood still\n{process.report()}")
