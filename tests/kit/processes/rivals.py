"""The writers of one database, each with clients of its own, and the judgement over all of them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

from shalekv.cli.exit_codes import ExitCode
from tests.e2e.files import when_there
from tests.kit.processes.child import Child, Line
from tests.kit.processes.history import History
from tests.kit.processes.load import Load, read_state
from tests.kit.processes.meanwhile import ALONE, SERVE, stalled
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import (
    check_wal,
    manifest_ids,
    manifest_path,
    read_wal,
    state_of,
)

START_S = 120
FIRST_FENCE = "before create wal/ 1"


class Rivals:
    """Writers on the database in `folder`."""

    def __init__(
        self, processes: Processes, folder: Path, seed: int, tasks: asyncio.TaskGroup
    ) -> None:
        """Nothing runs yet; clients will run in `tasks`."""
        self.folder = folder
        self.history = History(seed)
        self._processes = processes
        self._tasks = tasks
        self._random = Random(seed)
        self._loads: dict[Child, Load] = {}

    def start(self, *flags: str) -> Child:
        """Start a writer, and don't wait."""
        return self._processes.start_serve(f"file://{self.folder}", *ALONE, *flags)

    async def serve(self, *flags: str) -> Child:
        """Start a writer, and wait until it serves under load."""
        writer = self.start(*flags)
        await writer.ready()
        assert await self.load(writer).acknowledged(50), writer.report()
        return writer

    async def start_and_stop_in_edit(self, *flags: str) -> Child:
        """Start a writer, and stop it while it creates the manifest with its epoch."""
        path = manifest_path(self.folder, manifest_ids(self.folder)[-1] + 1)
        writer = self.start(*flags)
        await asyncio.to_thread(when_there, path, writer.pause, within_s=START_S)
        return writer

    async def serve_and_stop_opener(self, *flags: str) -> tuple[Child, Child]:
        """A writer that serves under load, and one that stands between its epoch and its fence."""
        before = await self.serve(*flags)
        argv = (*SERVE, "--url", f"file://{self.folder}", *ALONE, *flags)
        command = ("-m", "tests.e2e.stalling", FIRST_FENCE, *argv)
        opener = self._processes.start(*command, program=sys.executable)
        await stalled(opener)
        await opener.line(is_epoch_won)
        assert all(each.epoch < epoch_of(opener) for each in read_wal(self.folder))
        return before, opener

    def load(self, writer: Child) -> Load:
        """Put load on a writer that serves."""
        load = Load(self.history, writer.listen, self._random, clients=6)
        self._loads[writer] = load
        self._tasks.create_task(load.run(), name=f"load on {writer.listen}")
        return load

    def load_of(self, writer: Child) -> Load:
        """The load on a writer."""
        return self._loads[writer]

    async def rest(self, writer: Child) -> None:
        """End the load on a writer; all of it must have been answered."""
        load = self._loads[writer]
        load.stop()
        await load.ended.wait()
        assert load.ended_by == [], writer.report()

    async def end(self, survivor: Child) -> None:
        """The survivor serves; all that clients know, it shows and the WAL holds is the same."""
        assert await self._loads[survivor].acknowledged(50), survivor.report()
        await self.rest(survivor)
        state = await read_state(survivor.listen)
        wal = read_wal(self.folder)
        check_wal(wal, self.history)
        assert state == state_of(wal), f"seed {self.history.seed}"
        self.history.check_state(state)
        assert await survivor.stop() == ExitCode.OK, survivor.report()


def is_epoch_won(line: Line) -> bool:
    """Whether this log line of a writer says that it has won its epoch."""
    return line.get("event") == "epoch won"


async def fenced_end(writer: Child) -> Line:
    """The last log line of a writer that must end, and end as fenced."""
    assert await writer.exited() == ExitCode.FENCED, writer.report()
    last = writer.lines()[-1]
    assert last["event"] == "ended by an error", writer.report()
    assert (last["reason"], last["exit_code"]) == ("FENCED", ExitCode.FENCED)
    assert "Another writer has taken over the database" in last["problem"]
    return last


def epoch_of(writer: Child) -> int:
    """The epoch that a writer has won; 0 when it was ended before."""
    won = [line["epoch"] for line in writer.lines() if is_epoch_won(line)]
    return int(won[0]) if won else 0


def lost_writes(writer: Child) -> list[Line]:
    """What a writer has logged about writes that it had accepted, and that are lost."""
    return [line for line in writer.lines() if line.get("event") == "write lost"]
