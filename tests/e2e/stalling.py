"""The command `shalekv`, which stops itself (SIGSTOP) at one request to the object store.

    python -m tests.e2e.stalling 'before create wal/ 2' serve --url file:///tmp/db

stands still just before it sends the second create of an object whose name begins with `wal/`, and
with `after create wal/ 2` when that was answered. Everything else is the command as it is shipped.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from tests.e2e.over_store import OpenStore, run_over
from tests.kit.engine.interposed import InterposedStore


@dataclass(slots=True)
class Stall:
    """Where to stop: at the `left`-th such request from now on."""

    moment: str
    operation: str
    prefix: str
    left: int

    @classmethod
    def parse(cls, text: str) -> Stall:
        """The inverse of what the command line says."""
        moment, operation, prefix, count = text.split()
        return cls(moment, operation, prefix, int(count))

    def wrap(self, opened: OpenStore) -> OpenStore:
        """Opens stores that stop the process there."""

        def open_store(url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
            return InterposedStore(opened(url, runtime, settings), self.before, self.after)

        return open_store

    async def before(self, operation: str, name: str) -> None:
        """Called before each request."""
        self._meet("before", operation, name)

    async def after(self, operation: str, name: str) -> None:
        """Called when it was answered."""
        self._meet("after", operation, name)

    def _meet(self, moment: str, operation: str, name: str) -> None:
        if (moment, operation) != (self.moment, self.operation) or not name.startswith(self.prefix):
            return
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Run the command over a store that stops the process."""
    run_over(Stall.parse(sys.argv[1]).wrap, sys.argv[2:])


if __name__ == "__main__":
    main()
