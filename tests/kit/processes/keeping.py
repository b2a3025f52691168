"""The command `shalekv`, which keeps a copy of each object that it deletes.

    python -m tests.kit.processes.keeping /tmp/kept '' 'after list wal/ 2' collector --url file:///tmp/db

deletes nothing that it has not copied to the folder `/tmp/kept` before, so whoever judges a
database whose collector is at work misses nothing, however busy the machine is. The second argument
is the endpoint to copy from, if that which the command was told makes faults; the third one says
where the command stops itself, as in `tests.e2e.stalling`. Either may be empty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shalekv.errors import ObjectNotFound
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.local import LocalStore
from tests.e2e.over_store import OpenStore, run_over
from tests.e2e.stalling import Stall
from tests.kit.engine.interposed import InterposedStore


class KeepingStore(InterposedStore):
    """Passes everything on to `inner`; copies from `source` to `kept` what is to be deleted.

    Of two objects of one name that were deleted, the first is kept.
    """

    def __init__(self, inner: ObjectStore, source: ObjectStore, kept: ObjectStore) -> None:
        super().__init__(inner)
        self._source = source
        self._kept = kept

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            with suppress(ObjectNotFound):  # somebody else has deleted it, and keeps it
                await self._kept.create(name, (await self._source.get(name)).data)
        await super().delete(doomed)

    async def close(self) -> None:
        await super().close()
        await self._source.close()


def main() -> None:
    """Run the command over a store that keeps what it deletes."""
    folder, endpoint, pin, *argv = sys.argv[1:]

    def wrap(opened: OpenStore) -> OpenStore:
        def open_store(url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
            past = settings.model_copy(update={"endpoint_url": endpoint or settings.endpoint_url})
            source, kept = opened(url, runtime, past), LocalStore(Path(folder), runtime)
            return KeepingStore(opened(url, runtime, settings), source, kept)

        return Stall.parse(pin).wrap(open_store) if pin else open_store

    run_over(wrap, argv)


if __name__ == "__main__":
    main()
