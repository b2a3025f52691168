"""A bulk load under way: the lease that protects its files, from before the first is written.

The lease is made by an edit of the manifest, and the ids of all files derive from it; so none of
them is collected before the load is committed, by whatever process it was written. What is written
twice, or too late, or for nothing, is named by no commit: an orphan, which the collector takes
when the lease is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from shalekv.core.key_range import KEY_BYTES_MAX
from shalekv.engine.bulk.committed import committed_seq
from shalekv.engine.editing import edit_deadline
from shalekv.errors import ManifestConflict, StoreError
from shalekv.jobs.compact.claim import HeldLease, Leases
from shalekv.protocol.lease import has_lease, without_lease
from shalekv.protocol.loads import check_load_id
from shalekv.protocol.manifest import Manifest
from shalekv.settings import LevelSettings, LimitSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

LEASE_TTL_S = 600  # if nothing else is wished: how long what a dead job has written stays

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """All that is needed to write files of a load, in this process or in another."""

    database_id: bytes
    load_id: str
    lease_id: bytes
    logical_time_ms: int  # of the files; by the store's clock, and what lives `n` ms ends n later
    levels: LevelSettings
    key_bytes_max: int
    value_bytes_max: int


class LoadJob:
    """One attempt at a load, from its lease to its commit. Use `LoadJob.begin`.

    Either the load was committed before (`committed_seq`), and there is nothing to do; or files are
    written with the `ticket` and committed, all inside of `guard`; then the job is ended.
    """

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        *,
        ticket: LoadTicket,
        leases: Leases,
        held: HeldLease | None,
        committed: int | None,
    ) -> None:
        """Use `begin`."""
        self.ticket = ticket
        self.committed_seq = committed  # the sequence number, if it was committed before
        self._store = store
        self._stored = stored
        self._leases = leases
        self._held = held

    @classmethod
    async def begin(
        cls,
        store: CasStore,
        load_id: str,
        *,
        levels: LevelSettings,
        limits: LimitSettings,
        ttl_s: int = LEASE_TTL_S,
    ) -> LoadJob:
        """Find out whether the load was committed; if not, make a lease that lives `ttl_s` seconds.

        Raises `InvalidRequest` for an id that no load can have, `DatabaseNotFound`,
        `DatabaseMismatch`, `ManifestConflict`, `CorruptObject`, `StoreError`.
        """
        check_load_id(load_id)
        stored = StoredManifest(store)
        stored.check_cas_mode(await stored.refresh())
        committed = await committed_seq(store, stored, load_id)
        now_ms = await store.reads.now_ms()
        leases = Leases(store, ttl_s=ttl_s, holder=f"load {load_id}")
        held = None
        if committed is None:  # the last step: nothing fails after it that would leave the lease
            async with edit_deadline(store):
                held = await leases.take(stored)
        current = stored.current
        ticket = LoadTicket(
            database_id=current.database_id,
            load_id=load_id,
            lease_id=held.lease.id if held else b"",
            logical_time_ms=max(current.logical_time_ms, now_ms),
            levels=levels,
            key_bytes_max=KEY_BYTES_MAX,
            value_bytes_max=limits.value_bytes_max,
        )
        return cls(store, stored, ticket=ticket, leases=leases, held=held, committed=committed)

    async def guard(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work()``, while the lease is renewed before half its life is over.

        Raises what `work` raises; and `LeaseLost` when `work` was cancelled because it is in vain:
        what it wrote may be deleted by now.
        """
        if self._held is None:
            return await work()
        return await self._leases.guard(self._stored, self._held, work)

    async def end(self) -> None:
        """Give the lease up: from now on, what no commit names may be collected.

        REQUIRES: the load is committed, or nothing tries to commit it any more. Errors of the store
        are logged: then the lease expires by itself.
        """
        held, self._held = self._held, None
        if held is None:
            return
        self._leases.drop(held)
        lease_id = held.lease.id

        def edit(manifest: Manifest) -> Manifest:
            return without_lease(manifest, lease_id)

        def is_gone(manifest: Manifest) -> bool:
            return not has_lease(manifest, lease_id)

        try:
            if has_lease(await self._stored.refresh(), lease_id):
                async with edit_deadline(self._store):
                    await self._stored.edit(edit, is_gone)
        except (StoreError, ManifestConflict) as error:
            log.warning("the lease of a load is left to expire", error=str(error))
