"""`shalekv`, with probes of its event loop and of the garbage collector: for `serve` and `reader`.

    probed.py FILE SECONDS ARGUMENTS...

After each so many seconds a line of JSON goes to FILE: how late timers were, what collections took,
and how many files and folders were synced. A timer is late by the turn of the loop that it falls
into. What the process waited for a processor meanwhile is not counted, since other processes have
it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from shalekv.cli.main import main

TICK_S = 0.002


class Probe:
    """Measures from the event loop of a server, and from its garbage collector."""

    def __init__(self, path: Path, line_s: float) -> None:
        self._file = path.open("a")
        self._line_s = line_s
        self._loop = asyncio.get_running_loop()
        schedule = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._schedule = os.open(schedule, os.O_RDONLY)
        self._late_ms: list[float] = []
        self._waits_ms: list[float] = []
        self._pauses: list[tuple[int, float]] = []
        self._collection_began_s = 0.0
        self._due_s = self._told_s = time.perf_counter()
        self._delay_s = self._delayed_s()
        self._syncs = 0
        self._syncs_lock = threading.Lock()  # workers sync side by side

    def start(self) -> None:
        gc.callbacks.append(self._collecting)
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._counted(getattr(os, name)))
        self._plan()

    def tell(self) -> None:
        """Write a line, and begin the next one."""
        with self._syncs_lock:
            syncs, self._syncs = self._syncs, 0
        line = {
            "at_s": time.time(),
            "late_ms": [round(late, 2) for late in self._late_ms],
            "waits_ms": round(max(self._waits_ms, default=0.0), 2),
            "syncs": syncs,
            "pauses_ms": [[kind, round(took, 3)] for kind, took in self._pauses],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._late_ms, self._waits_ms, self._pauses = [], [], []
        self._told_s = time.perf_counter()

    def _plan(self) -> None:
        self._due_s = time.perf_counter() + TICK_S
        self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now_s, delay_s = time.perf_counter(), self._delayed_s()
        late_s, waited_s = now_s - self._due_s, delay_s - self._delay_s
        self._late_ms.append(max(0.0, late_s - waited_s) * 1_000)
        self._waits_ms.append(waited_s * 1_000)
        self._delay_s = delay_s
        if now_s - self._told_s >= self._line_s:
            self.tell()
        self._plan()

    def _counted(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(file: Any) -> None:
            with self._syncs_lock:
                self._syncs += 1
            sync(file)

        return counted

    def _delayed_s(self) -> float:
        """Return how long the thread has waited for a processor."""
        return int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9

    def _collecting(self, phase: str, known: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_s = time.thread_time()  # it computes, and waits for nothing
        else:
            took_ms = (time.thread_time() - self._collection_began_s) * 1_000
            self._pauses.append((known["generation"], took_ms))


def probe_loops(path: Path, line_s: float) -> None:
    """Probe the loops that `uvloop.run` starts from now on."""
    run = uvloop.run

    async def probed(given: Coroutine[Any, Any, Any]) -> Any:
        probe = Probe(path, line_s)
        probe.start()
        try:
            return await given
        finally:
            probe.tell()

    def run_probed(given: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return run(probed(given), **options)

    setattr(uvloop, "run", run_probed)  # noqa: B010 - a type checker would refuse the assignment


if __name__ == "__main__":
    probe_loops(Path(sys.argv[1]), float(sys.argv[2]))
    sys.argv = ["shalekv", *sys.argv[3:]]
    main()
