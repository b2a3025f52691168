"""Pins while a clone is being made: snapshots that expire, in its parent and that one's origins."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.engine.levels.origins import Origins
from shalekv.errors import SnapshotExists, SnapshotNotFound
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import needed_pins, pin_name
from shalekv.read.origins import OriginPins, lost
from shalekv.store.cas import CasStore
from shalekv.write.snapshots import Snapshots

PIN_TTL_MS = 3_600_000  # until the clone is there
_RENEWALS_IN_A_LIFE = 3
_SUFFIX_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Held:
    store: CasStore
    snapshot: Snapshot


class Pinning:
    """The pins of one clone that is being made."""

    def __init__(self, parent: CasStore, clone_id: bytes) -> None:
        """Nothing is pinned yet."""
        self._parent = parent
        self._clone_id = clone_id
        self._clock = parent.runtime.clock
        self._held: list[_Held] = []
        self._since_ms = self._clock.monotonic_ms()

    async def pin_parent(self, called: str) -> Snapshot:
        """A snapshot of what the snapshot `called` shows; "": of the current state.

        Raises as `Snapshots.create` and `Snapshots.share`.
        """
        return await self._pin(self._parent, called)

    async def pin_origins(self, origins: Origins, manifest: Manifest) -> dict[bytes, bytes]:
        """Snapshots in the origins of the parent's manifest, by those that the parent has there.

        Raises `OriginLost`.
        """
        found = {}
        for snapshot_id, url in sorted(needed_pins(manifest).items()):
            mode = await OriginPins(origins).cas_mode(url)
            try:
                pin = await self._pin(origins.store_at(url, mode), snapshot_id.hex())
            except SnapshotNotFound as error:
                raise lost(url, snapshot_id) from error
            found[snapshot_id] = pin.id
        return found

    async def renew(self) -> None:
        """Let the pins live on, if it is time. Raises `SnapshotNotFound` when one is gone."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._since_ms < PIN_TTL_MS / _RENEWALS_IN_A_LIFE:
            return
        for held in self._held:
            await Snapshots(held.store).renew(held.snapshot.id.hex(), ttl_ms=PIN_TTL_MS)
        self._since_ms = now_ms

    async def _pin(self, store: CasStore, called: str) -> Snapshot:
        name = pin_name(self._clone_id)
        try:
            pin = await _snapshot(store, called, name)
        except SnapshotExists:  # somebody else makes this clone, or has not come to an end
            suffix = store.runtime.random.randbytes(_SUFFIX_BYTES).hex()
            pin = await _snapshot(store, called, f"{name} {suffix}")
        self._held.append(_Held(store, pin))
        return pin


async def _snapshot(store: CasStore, called: str, name: str) -> Snapshot:
    snapshots = Snapshots(store)
    if called:
        return await snapshots.share(called, name=name, ttl_ms=PIN_TTL_MS)
    return await snapshots.create(name=name, ttl_ms=PIN_TTL_MS)
