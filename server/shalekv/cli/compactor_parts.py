"""Runs the parts of a merge in processes, which end with this one however it ends."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

import structlog

from shalekv.cli.process.merge_part import LIFT, LINE_BYTES_MAX, PartReply, PartTask
from shalekv.engine.compaction.part import Part, PartResult
from shalekv.errors import PartFailed, ShaleError, StoreUnavailable
from shalekv.jobs.compact.parts import OwnProcessParts
from shalekv.settings import CompactSettings
from shalekv.store.cas import CasStore

COMMAND = (sys.executable, "-m", "shalekv.cli.process.merge_part")
LIFT_POLL_S = 0.1
log = structlog.get_logger(__name__)
_MAY_PASS = frozenset((StoreUnavailable.reason,))


class ProcessParts:
    """Each part of a merge that is divided gets a process; one that is not is run here."""

    is_parallel = True

    def __init__(
        self, store: CasStore, settings: CompactSettings, command: Sequence[str] = COMMAND
    ) -> None:
        """`command` starts a process that does what `shalekv.cli.process.merge_part` says."""
        self._store = store
        self._settings = settings
        self._command = command
        self._here = OwnProcessParts(store)

    async def run(
        self, parts: Sequence[Part], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """The results, in the order of the parts.

        Raises `PartFailed` when a process ends without a result, or cannot go on; then the others
        are ended, too.
        """
        if len(parts) < 2:  # noqa: PLR2004 - one part is the whole
            return await self._here.run(parts, is_lifted)
        results: dict[int, PartResult] = {}
        failures: list[ShaleError] = []
        started: list[Process] = []

        async def run(number: int, part: Part) -> None:
            try:
                process = await self._start()
                started.append(process)
                if failures:
                    _kill(process)
                results[number] = await self._run(process, part, is_lifted)
            except ShaleError as error:  # raised below, because the group would wrap it
                failures.append(error)
                # Not cancelled: one that is being started would be left behind.
                for each in started:
                    _kill(each)

        async with asyncio.TaskGroup() as tasks:
            for numbered in enumerate(parts):
                tasks.create_task(run(*numbered))
        if failures:
            raise failures[0]
        return [results[number] for number in range(len(parts))]

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX
        )
        log.debug("part started", pid=process.pid)
        return process

    async def _run(self, process: Process, part: Part, is_lifted: Callable[[], bool]) -> PartResult:
        settings = self._settings
        task = PartTask(
            url=self._store.url, part=part, store=settings.store, process=settings.server
        )
        try:
            line = await _converse(process, task, is_lifted)
        finally:
            _kill(process)
            code = await process.wait()
        if not line.endswith(b"\n"):
            raise PartFailed(f"the process of a part of a merge ended with {code}, and no result")
        reply = PartReply.model_validate_json(line)
        for kind, requests in reply.sent.items():
            self._store.sent.add(kind, requests)
        if reply.result is not None:
            return reply.result
        if reply.reason in _MAY_PASS:
            raise StoreUnavailable(self._store.url, "compact", "levels/", reply.problem)
        raise PartFailed(f"a part of a merge failed: {reply.reason}: {reply.problem}")


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


async def _converse(process: Process, task: PartTask, is_lifted: Callable[[], bool]) -> bytes:
    """Send the task, and wait for the line of the reply, or the end of the process."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    async def lift() -> None:
        while not is_lifted():  # noqa: ASYNC110 - the manifest may say so, which sets no event
            await asyncio.sleep(LIFT_POLL_S)
        stdin.write(LIFT)

    stdin.write(task.model_dump_json().encode() + b"\n")
    async with asyncio.TaskGroup() as tasks:
        lifting = tasks.create_task(lift())
        try:
            return await stdout.readline()
        finally:
            lifting.cancel()
