"""Where the SSTs of one database are: in its own folder, or in that of one it was cloned from.

This is the one place that decides it. The stores of other databases are opened when they are first
needed, with the settings by which this process reaches its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shalekv.errors import DatabaseMismatch
from shalekv.protocol.manifest import CasMode, Origin
from shalekv.protocol.origins import unpacked
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store


class Place(NamedTuple):
    """Where an SST is, and of which database it says that it is."""

    store: CasStore
    database_id: bytes


class Origins:
    """The places of SSTs, and the stores of other databases that this process has opened."""

    def __init__(self, store: CasStore, database_id: bytes, origins: Iterable[Origin] = ()) -> None:
        """`store` and `database_id` are those of the database whose manifests name the SSTs."""
        self._own = Place(store, database_id)
        self._origin_of: dict[bytes, Origin] = {}
        self._learnt: dict[tuple[bytes, str, bytes], int] = {}
        self._opened: dict[tuple[str, CasMode], tuple[ObjectStore, CasStore]] = {}
        self.learn(origins)

    def learn(self, origins: Iterable[Origin]) -> None:
        """Where those are that one more manifest names.

        A newer manifest than one that was learnt names no others. An older one, that a snapshot
        keeps, may.
        """
        for origin in origins:
            key = (origin.database_id, origin.url, origin.snapshot_id)
            if len(origin.sst_ids) <= self._learnt.get(key, 0):
                continue  # of two manifests, the one that names more names all that the other does
            self._learnt[key] = len(origin.sst_ids)
            for sst_id in unpacked(origin.sst_ids):
                self._origin_of.setdefault(sst_id, origin)

    def is_foreign(self, sst_id: bytes) -> bool:
        """Whether the SST is in the folder of another database."""
        origin = self._origin_of.get(sst_id)
        return origin is not None and bool(origin.url)

    def locate(self, sst_id: bytes) -> Place:
        """Where the SST is. Raises `InvalidUrl` and `InvalidSetting`."""
        origin = self._origin_of.get(sst_id)
        if origin is None:
            return self._own
        store = self.store_at(origin.url) if origin.url else self._own.store
        return Place(store, origin.database_id)

    def store_at(self, url: str, cas_mode: CasMode = CasMode.NATIVE) -> CasStore:
        """The store of another database. To read one, its mode does not matter.

        Raises `DatabaseMismatch` when this process does not know the transactional store that
        decides there.
        """
        found = self._opened.get((url, cas_mode))
        if found is not None:
            return found[1]
        own = self._own.store
        store = open_store(url, own.runtime, _settings(own.settings, url, cas_mode))
        store.sent.add_up_in(own.sent)
        opened = CasStore(store, own.runtime, own.settings)
        self._opened[url, cas_mode] = (store, opened)
        return opened

    async def close(self) -> None:
        """Release the stores of other databases; who reads on opens them again."""
        while self._opened:
            _, (store, _) = self._opened.popitem()
            await store.close()


def _settings(own: StoreSettings, url: str, cas_mode: CasMode) -> StoreSettings:
    if cas_mode is CasMode.NATIVE:
        return own.model_copy(update={"cas": CasChoice.NATIVE, "records_url": ""})
    if own.cas is not CasChoice.TWO_PHASE:
        message = (
            f"{url} was created with --cas two_phase, and has to be edited for its clone: start "
            "with the flags of its creator"
        )
        raise DatabaseMismatch(message)
    return own
