"""The disk of a simulated machine, and the workers of a process that may die in the middle of it.

What is between a write and its sync is one function in a worker, which takes no virtual time; so
the power is cut at a call to the file system, whichever comes up when a crash is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from typing import TypeVar, TypeVarTuple

from tests.kit.disks.crashing import CrashingDisk, File, Folder
from tests.sim.errors import SimulationError
from tests.sim.loop import SimLoop
from tests.sim.nodes import Node
from tests.sim.simulation import SimWorkers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FREE_BYTES = 1 << 40
WRITE_BYTES_MAX = 700  # more than the disk below takes at once: a control file has many hundreds
_CHANGES = frozenset(
    ("create", "pwrite", "fsync", "sync_data", "allocate", "unlink", "rename", "rmdir", "mkdir")
)
SEGMENT_MAGIC = b"SKS1"
SYNC_OF_LOG = "sync of a log"  # noted before the sync, beside the note of every sync


class PowerCut(BaseException):
    """Nothing below this call happens any more; no code may catch it."""


class MachineDisk(CrashingDisk):
    """A disk that outlives the processes of its machine."""

    def __init__(self, before_call: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(before_call)
        self.on_synced: Callable[[], None] = lambda: None

    def fsync(self, descriptor: int) -> None:
        """Make it durable, and notify the observer."""
        super().fsync(descriptor)
        self.on_synced()

    def sync_data(self, descriptor: int) -> None:
        """Make it durable, and notify the observer."""
        if self._file(descriptor).data.startswith(SEGMENT_MAGIC):
            self.before_call(SYNC_OF_LOG)
        super().sync_data(descriptor)
        self.on_synced()

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.before_call("pwrite")
        written = data[:WRITE_BYTES_MAX]
        file = self._file(descriptor)
        file.data.extend(bytes(max(0, offset - len(file.data))))
        file.data[offset : offset + len(written)] = written
        return len(written)

    def free_bytes(self, path: Path) -> int:
        del path
        return FREE_BYTES

    def durable_files(self, folder: Path) -> dict[str, bytes] | None:
        """Return the files of a folder that survive a power cut in any case; None: not even its
        name.
        """
        node: File | Folder = self._root
        for name in folder.parts[1:]:
            if not isinstance(node, Folder) or name not in node.synced:
                return None
            node = node.synced[name]
        assert isinstance(node, Folder)
        return {name: file.synced for name, file in node.synced.items() if isinstance(file, File)}

    def durable_folders(self, folder: Path) -> list[str]:
        """The names of folders that a power cut leaves in any case."""
        node: File | Folder = self._root
        for name in folder.parts[1:]:
            if not isinstance(node, Folder) or name not in node.synced:
                return []
            node = node.synced[name]
        assert isinstance(node, Folder)
        return [name for name, each in node.synced.items() if isinstance(each, Folder)]


class Fuse:
    """Ends a process at a call to its file system."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._counted: Collection[str] = ()
        self._is_blown = False

    def light(self, calls: int, *, only_syncs: bool) -> None:
        """Arm it: after this many changes of the disk, or syncs of logs, the process ends."""
        self._left = calls
        self._counted = (SYNC_OF_LOG,) if only_syncs else _CHANGES

    def put_out(self) -> None:
        self._left = None

    def before_call(self, operation: str) -> None:
        if self._is_blown:
            raise PowerCut
        if self._left is None or operation not in self._counted:
            return
        self._left -= 1
        if self._left < 0:
            self._is_blown = True
            raise PowerCut


class DiskWorkers(SimWorkers):
    """Workers of a process whose functions may be cut short: `on_cut` ends the process then."""

    def __init__(
        self,
        loop: SimLoop,
        node: Node,
        random: Random,
        *,
        threads: int,
        on_cut: Callable[[], None],
    ) -> None:
        super().__init__(loop, node, random, threads=threads)
        self._on_cut = on_cut

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``; what it raises is raised here."""

        def guarded() -> T:
            try:
                return function(*args)
            except PowerCut:
                self._on_cut()
                raise SimulationError("nobody is there any more to hear of this") from None

        return await super().run(guarded)
