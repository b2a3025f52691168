"""A store with compare-and-swap in two phases, over one that has no conditional writes.

What stands where after any crash, and what each process does about it, is told in
`shalekv.protocol.two_phase`; the steps of a create in `shalekv.store.two_phase.creating`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial

from shalekv.errors import InvalidRequest
from shalekv.format.coding import crc32c
from shalekv.format.names import parse_temporary_name
from shalekv.protocol.manifest import CasMode
from shalekv.protocol.two_phase import Destination
from shalekv.runtime import Runtime
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    PlainStore,
    Recovered,
    StoredObject,
    nothing_is_collected,
)
from shalekv.store.arguments import check_name, check_new_name
from shalekv.store.two_phase.abandoning import Abandoning
from shalekv.store.two_phase.creating import Creating
from shalekv.store.two_phase.records import RecordStore
from shalekv.store.two_phase.recovering import Recovering
from shalekv.store.two_phase.sources import new_source


class TwoPhaseStore(ObjectStore):
    """`plain`, with a `create` that `records` decide. It owns both, and closes them.

    Lists show temporary objects too: a collector deletes them when they are old, which may be done
    at any time.
    """

    cas_mode = CasMode.TWO_PHASE

    def __init__(self, plain: PlainStore, records: RecordStore, runtime: Runtime) -> None:
        self.url = plain.url
        self.sent = plain.sent
        records.sent = plain.sent
        self._plain = plain
        self._records = records
        self._runtime = runtime

    @property
    def plain(self) -> PlainStore:
        """The store of the objects, for whoever checks whether it is fit."""
        return self._plain

    @property
    def records(self) -> RecordStore:
        """The records that decide, likewise."""
        return self._records

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """As the interface says. It tries steps 4 and 5 before it returns; they may fail."""
        check_new_name(name)
        if parse_temporary_name(name) is not None:
            raise InvalidRequest("name", f"{name!r} is that of a temporary object")
        destination = Destination(self.url, name)
        draw = partial(new_source, self._runtime.random, destination, crc32c(data))
        return await Creating(self._plain, self._records, destination, draw).create(data, metadata)

    async def get(self, name: str) -> StoredObject:
        return await self._plain.get(name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        return await self._plain.get_range(name, offset, length)

    async def head(self, name: str) -> ObjectInfo:
        return await self._plain.head(name)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._plain.list(prefix, start_after=start_after)

    async def delete(self, names: Iterable[str]) -> None:
        """As the interface says: objects first, then their records.

        A crash in between leaves records that `recover` forgets. In the other order a stalled
        writer could insert its record again, and overwrite what is there.
        """
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        temporary = [name for name in doomed if parse_temporary_name(name) is not None]
        if temporary:
            await Abandoning(self._plain, self._records, self._runtime.random).delete(temporary)
        created = [name for name in dict.fromkeys(doomed) if parse_temporary_name(name) is None]
        if not created:
            return
        await self._plain.delete(created)
        destinations = [Destination(self.url, name) for name in created if name.isascii()]
        await self._records.delete_committed(destinations)

    async def now_ms(self) -> int:
        return await self._plain.now_ms()

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        return await Recovering(self._plain, self._records, is_collected).recover()

    async def close(self) -> None:
        try:
            await self._plain.close()
        finally:
            await self._records.close()
