"""Whether records belong to a database: a wrong table would exclude nobody, and say nothing.

The current manifest is never collected, so in a database that was created in two phases its
record is there. Tables are made on demand, so that a misspelt name looks like a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shalekv.errors import StoreRefused
from shalekv.format.names import MANIFEST_FOLDER, parse_manifest_name
from shalekv.protocol.two_phase import Destination
from shalekv.runtime import Runtime
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    PlainStore,
    Recovered,
    nothing_is_collected,
)
from shalekv.store.two_phase.records import RecordStore
from shalekv.store.two_phase.store import TwoPhaseStore

LOOKS_MAX = 3  # a manifest may be superseded and collected between the list and the record


class BelongingStore(TwoPhaseStore):
    """A two-phase store that makes sure of its records before it changes anything, once."""

    def __init__(self, plain: PlainStore, records: RecordStore, runtime: Runtime) -> None:
        super().__init__(plain, records, runtime)
        self._is_sure = False
        self._checking = asyncio.Lock()

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """As the interface says; raises `StoreRefused` when the records are another database's."""
        await self._make_sure()
        return await super().create(name, data, metadata)

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """As `create`."""
        await self._make_sure()
        return await super().recover(is_collected)

    async def _make_sure(self) -> None:
        if self._is_sure:
            return
        async with self._checking:
            if not self._is_sure:
                await check_belonging(self.plain, self.records)
                self._is_sure = True


async def check_belonging(plain: PlainStore, records: RecordStore) -> None:
    """Raise `StoreRefused` if there is a database, and `records` are not those of its creates."""
    newest = await _newest_manifest(plain)
    for _ in range(LOOKS_MAX):
        if newest is None or await records.find(Destination(plain.url, newest)) is not None:
            return
        seen, newest = newest, await _newest_manifest(plain)
        if newest == seen:
            break
    if newest is None:
        return
    raise StoreRefused(
        plain.url,
        "create",
        newest,
        f"the transactional store at {records.url} has no record of it. Either records_url, its "
        "region or its endpoint is another one than this database was created with, or it was "
        "created with --cas native",
    )


async def _newest_manifest(plain: PlainStore) -> str | None:
    newest: str | None = None
    async for info in plain.list(MANIFEST_FOLDER):
        if parse_manifest_name(info.name) is not None:
            newest = info.name
    return newest
