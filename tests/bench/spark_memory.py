"""The most memory that the processes of a Spark session take while something runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.processes.process_memory import resident_bytes

_EVERY_S = 0.02


@dataclass(slots=True)
class Peaks:
    """Resident bytes, the most at any look."""

    driver: int = 0  # this process
    java: int = 0  # the driver's and, in local mode, the executor's machine
    task: int = 0  # the largest of the Python processes in which tasks run
    tasks: int = 0  # all of them at one moment

    def look(self) -> None:
        """Compare with what is taken now."""
        sizes = _sizes()
        own = os.getpid()
        workers = [size for pid, (name, size) in sizes.items() if pid != own and name != "java"]
        machines = [size for name, size in sizes.values() if name == "java"]
        self.driver = max(self.driver, sizes[own][1])
        self.java = max([self.java, *machines])
        self.task = max([self.task, *workers])
        self.tasks = max(self.tasks, sum(workers))


@contextmanager
def peaks() -> Iterator[Peaks]:
    """Looks again and again until the block ends."""
    found, ended = Peaks(), threading.Event()
    found.look()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            found.look()

    thread = threading.Thread(target=watch, name="peaks")
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _sizes() -> Mapping[int, tuple[str, int]]:
    """Name and resident bytes of this process and of all below it."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                name, _, rest = (folder / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended
            parents[int(folder.name)] = int(rest.split()[1])
            names[int(folder.name)] = name.partition("(")[2]
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours, grown = ours | more, bool(more)
    return {pid: (names[pid], size) for pid in ours if (size := _resident(pid))}


def _resident(pid: int) -> int:
    try:
        return resident_bytes(pid)
    except (OSError, StopIteration):  # it has ended, or is about to
        return 0
