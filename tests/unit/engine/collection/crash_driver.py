"""Kills collectors, one after the other, at every call that they make of the file system.

    python -m tests.unit.engine.collection.crash_driver TEMPLATE FOLDER

Each works on a copy of the database in TEMPLATE, below FOLDER: `0` is the copy whose collector was
killed before its first call, and so on; the last copy is that of the collector that was not
killed. A process of its own, because it forks: nothing but Python runs in it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from random import SystemRandom

from shalekv.clock import LoopClock
from shalekv.engine.collection.collecting import Collecting
from shalekv.errors import ShaleError
from shalekv.roles.collector import Collector
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.filesystem import FileStatus, FileSystem, FolderEntry
from shalekv.store.local import LocalStore

AT_ONCE = CollectorSettings(collect_age_s=0, foreign_age_s=0, wal_retention_s=0)


class KillingFileSystem(FileSystem):
    """Ends this process at a call of a file system, before it has any effect."""

    def __init__(self, at: int) -> None:
        self._left = at

    def _call(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def create(self, path: Path) -> int:
        self._call()
        return super().create(path)

    def open(self, path: Path) -> int:
        self._call()
        return super().open(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._call()
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._call()
        super().fsync(descriptor)

    def link(self, existing: Path, new: Path) -> None:
        self._call()
        super().link(existing, new)

    def unlink(self, path: Path) -> None:
        self._call()
        super().unlink(path)

    def touch(self, path: Path) -> FileStatus:
        self._call()
        return super().touch(path)

    def list_folder(self, path: Path) -> list[FolderEntry]:
        self._call()
        return super().list_folder(path)


async def collect(root: Path, filesystem: FileSystem) -> None:
    """Run the role once."""
    workers = ThreadWorkers(1)
    runtime = Runtime(LoopClock(), SystemRandom(), workers)
    store = LocalStore(root, runtime, filesystem=filesystem)
    collecting = Collecting(CasStore(store, runtime, StoreSettings()), AT_ONCE)
    (outcome,) = await Collector([collecting], runtime.clock, interval_ms=1).run_once()
    workers.close()
    if isinstance(outcome, ShaleError):
        raise outcome


def main(template: Path, folder: Path) -> None:
    """Kill at the first call, the second, and so on until there is none."""
    at = 0
    while True:
        root = folder / str(at)
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            asyncio.run(collect(root, KillingFileSystem(at)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
        at += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
