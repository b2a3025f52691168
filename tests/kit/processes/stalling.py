"""The command `shalekv`, which stops itself at one request, and may keep what it deletes.

    python -m tests.kit.processes.stalling 'before create wal/ 2' '' serve --url file:///tmp/db

stops (SIGSTOP) just before it sends the second create of an object whose name begins with `wal/`,
and with `after create wal/ 2` when that was answered. Where the second argument names a folder, a
copy of each object is put there before it is deleted; after a `#` it names the endpoint to copy
from, if that of the command makes faults. Either may be empty. All else is the command as shipped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shalekv.errors import ObjectNotFound
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store import opening as stores
from shalekv.store.api import ObjectStore
from shalekv.store.local import LocalStore
from tests.kit.constants import set_constants_as_given
from tests.kit.processes.child import Child, ChildFailed
from tests.kit.processes.processes import Processes
from tests.kit.store import FaultyStore, Request

MODULE = "tests.kit.processes.stalling"
STALL_S = 120


def start_stalling(
    processes: Processes,
    at: str,
    *argv: str,
    keep: str = "",
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Child:
    """Start a command that will stop itself at a request, and may keep what it deletes."""
    command = ("-m", MODULE, at, keep, *argv)
    return processes.start(*command, program=sys.executable, env=env, stdin=stdin)


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


@dataclass(slots=True)
class Stall:
    """A point to stop at: the `left`-th such request from now on."""

    moment: str
    operation: str
    prefix: str
    left: int

    @classmethod
    def parse(cls, text: str) -> Stall:
        moment, operation, prefix, count = text.split()
        return cls(moment, operation, prefix, int(count))

    async def before(self, request: Request) -> None:
        self._meet("before", request)

    async def after(self, request: Request) -> None:
        self._meet("after", request)

    def _meet(self, moment: str, request: Request) -> None:
        if (moment, request.operation) != (self.moment, self.operation):
            return
        self.left -= request.name.startswith(self.prefix)
        if self.left == 0:
            self.left = -1
            os.kill(os.getpid(), signal.SIGSTOP)


class KeepingStore(FaultyStore):
    """Copies objects that are to be deleted from `source` to `kept`, the first of each name."""

    def __init__(self, inner: ObjectStore, source: ObjectStore, kept: ObjectStore) -> None:
        super().__init__(inner)
        self._source = source
        self._kept = kept

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            with suppress(ObjectNotFound):  # another process has deleted it, and keeps it
                await self._kept.create(name, (await self._source.get(name)).data)
        await super().delete(doomed)

    async def close(self) -> None:
        await super().close()
        await self._source.close()


def main() -> None:
    pin, keep, *argv = sys.argv[1:]
    folder, _, endpoint = keep.partition("#")
    opened = stores.open_store
    stall = Stall.parse(pin) if pin else None

    def open_store(url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
        store = opened(url, runtime, settings)
        if folder:
            past = settings.model_copy(update={"endpoint_url": endpoint or settings.endpoint_url})
            kept = LocalStore(Path(folder), runtime)
            store = KeepingStore(store, opened(url, runtime, past), kept)
        return FaultyStore(store, before=stall.before, after=stall.after) if stall else store

    stores.open_store = open_store  # before any command takes it from there
    from shalekv.cli.main import main as shalekv  # noqa: PLC0415

    set_constants_as_given(os.environ)
    sys.argv = ["shalekv", *argv]
    shalekv()


if __name__ == "__main__":
    main()
