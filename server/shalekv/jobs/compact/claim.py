"""Becoming the compactor of a database, and the leases of its jobs.

A compactor takes over by an edit of the manifest that claims the next compactor epoch. From then
on, the edits of an older compactor raise `Superseded`. So compactors need not know of each other.

Each job that writes has a lease of its own. The id of an SST contains the time at which the lease
of its job was made, which the policy uses as the age of the SST. So a lease serves one job only,
and the edit that publishes the result exchanges it for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from shalekv.errors import ShaleError, StoreBroken, StoreError
from shalekv.protocol.compaction.publish import (
    CompactorId,
    check_claimable,
    check_unclaimed,
    claim_compactor_epoch,
)
from shalekv.protocol.lease import (
    RANDOM_BYTES,
    has_lease,
    new_lease_id,
    renew_lease,
    with_lease,
    without_lease,
)
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.read.origins import check_pins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import CompactorManifest, Edit, Landed, StoredManifest

_MS_PER_S = 1_000
_RETRY_SHARE = 10  # a failed renewal is retried after this fraction of the lease's life
_NONCE_BYTES = 16

T = TypeVar("T")
log = structlog.get_logger()


class LeaseManifest(Protocol):
    """The manifest, as the holder of a lease edits it."""

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Edit the manifest, see `StoredManifest.edit`."""
        ...


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease, and the monotonic time just before it was last made or renewed."""

    lease: Lease
    since_ms: float


class CompactorLeases:
    """The leases of one compactor."""

    def __init__(self, store: CasStore, *, ttl_s: int, holder: str) -> None:
        """`holder` names the owner of the leases for operators."""
        self._store = store
        self._ttl_s = ttl_s
        self._holder = holder
        self._free: list[HeldLease] = []
        self._held: list[HeldLease] = []

    async def new(self) -> HeldLease:
        """Make a lease that is not in the manifest yet."""
        since_ms = self._store.runtime.clock.monotonic_ms()
        now_ms = await self._store.now_ms()
        random_bytes = self._store.runtime.random.randbytes(RANDOM_BYTES)
        lease_id = new_lease_id(now_ms, random_bytes)
        return HeldLease(Lease(lease_id, self._expire_time_s(now_ms), self._holder), since_ms)

    async def take(self, manifest: LeaseManifest) -> HeldLease:
        """Take a lease for a job that begins now. Raises `Superseded` and `StoreError`."""
        stale = [each for each in self._free if self._age_ms(each) >= self._half_life_ms]
        self._free = [each for each in self._free if each not in stale]
        if self._free:
            held = self._free.pop()
        else:
            held = await self.new()
            lease, gone = held.lease, [each.lease.id for each in stale]

            def edit(current: Manifest) -> Manifest:
                for lease_id in gone:
                    current = without_lease(current, lease_id)
                return with_lease(current, lease)

            await manifest.edit(edit, lambda current: has_lease(current, lease.id))
        self._held.append(held)
        return held

    def drop(self, held: HeldLease) -> None:
        """Forget a lease, since its job is over."""
        self._held.remove(held)

    def keep_for_next(self, held: HeldLease) -> None:
        """Keep a lease that is in the manifest for the next job."""
        self._free.append(held)

    async def release(self, manifest: LeaseManifest) -> None:
        """Remove all leases from the manifest. Raises what the edit raises."""
        gone = [each.lease.id for each in (*self._free, *self._held)]

        def edit(current: Manifest) -> Manifest:
            for lease_id in gone:
                current = without_lease(current, lease_id)
            return current

        if gone:
            await manifest.edit(
                edit, lambda current: not any(has_lease(current, lease_id) for lease_id in gone)
            )

    async def guard(
        self, manifest: LeaseManifest, held: HeldLease, work: Callable[[], Awaitable[T]]
    ) -> T:
        """Await ``work()`` and return its result; renew the lease meanwhile.

        Each renewal begins before half of the lease's life is over. Raises what `work` raises, and
        `LeaseLost` or `Superseded` when `work` was cancelled since its result could not be used.
        """
        lost: list[ShaleError] = []
        failed: list[Exception] = []
        outcome: list[T] = []

        async def run() -> None:
            try:
                outcome.append(await work())
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failed.append(error)

        async def renew() -> None:
            try:
                await self._renew(manifest, held)
            except ShaleError as error:
                lost.append(error)
                running.cancel()

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run())
            renewing = tasks.create_task(renew())
            running.add_done_callback(lambda _: renewing.cancel())
        if outcome:  # the work has ended before the lease was found to be lost
            return outcome[0]
        raise (lost or failed)[0]

    async def _renew(self, manifest: LeaseManifest, held: HeldLease) -> None:
        """Renew the lease again and again; never returns. Raises when the lease is lost."""
        clock = self._store.runtime.clock
        while True:
            await clock.sleep_ms(max(self._half_life_ms * 0.8 - self._age_ms(held), 0))
            since_ms = clock.monotonic_ms()
            lease_id = held.lease.id
            try:
                expire_time_s = self._expire_time_s(await self._store.now_ms())
                await manifest.edit(
                    lambda current: renew_lease(current, lease_id, expire_time_s),  # noqa: B023
                    lambda current: any(
                        each.id == lease_id and each.expire_time_s >= expire_time_s  # noqa: B023
                        for each in current.leases
                    ),
                )
            except StoreBroken:
                raise
            except StoreError as error:
                log.warning("lease not renewed", error=str(error))
                await clock.sleep_ms(self._ttl_s * _MS_PER_S / _RETRY_SHARE)
                continue
            held.since_ms = since_ms

    def _age_ms(self, held: HeldLease) -> float:
        return self._store.runtime.clock.monotonic_ms() - held.since_ms

    @property
    def _half_life_ms(self) -> float:
        return self._ttl_s * _MS_PER_S / 2

    def _expire_time_s(self, now_ms: int) -> int:
        return -(-now_ms // _MS_PER_S) + self._ttl_s


async def claim_compaction(
    store: CasStore,
    leases: CompactorLeases,
    *,
    after: CompactorId | None = None,
) -> CompactorManifest:
    """Take over from any other compactor, and put a lease for the first job into `leases`.

    With `after`, take over only from that compactor, and under its nonce. A process that starts
    again must not take back what another one has taken over meanwhile; and by the nonce it finds
    its own claim, if that has landed although it seemed to fail. Raises `Superseded` when another
    compactor has taken over, or begins at the same time and wins; `DatabaseNotFound`, `OriginLost`,
    `CorruptObject` and `StoreError`.
    """
    stored = StoredManifest(store)
    seen = await stored.refresh()
    if after is not None:
        check_claimable(seen, after)
    await check_pins(store, seen)
    nonce = store.runtime.random.randbytes(_NONCE_BYTES) if after is None else after.nonce
    held = await leases.new()

    def claim(current: Manifest) -> Manifest:
        check_unclaimed(current, seen, nonce)
        return with_lease(claim_compactor_epoch(current, nonce), held.lease)

    def landed(current: Manifest) -> bool:
        return current.compactor_nonce == nonce and has_lease(current, held.lease.id)

    claimed = await stored.edit(claim, landed)
    leases.keep_for_next(held)
    return CompactorManifest(stored, CompactorId(claimed.compactor_epoch, nonce))
