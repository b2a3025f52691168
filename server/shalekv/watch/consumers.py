"""Named consumers of watches: their leases, which keep the WAL while a consumer may be away.

The lease of a consumer protects the WAL objects from the first one it still needs on. It expires by
the store's clock unless it is renewed; the collector removes expired leases. See
`shalekv.protocol.lease` for what a lease may protect.

A consumer belongs to the principal that has opened its watch: those of different principals are
different consumers, even if their names are the same. A principal that uses a name for the first
time continues where a consumer of this name is that belongs to no principal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Protocol

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.protocol.lease import find_wal_lease, hold_wal, holds_wal, release_wal
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.store.cas import CasStore
from shalekv.store.manifests import Edit, Landed, edit_deadline
from shalekv.watch.feed import CommitFeed
from shalekv.watch.history import History

NAME_CHARS_MAX = 128
_HOLDER = "consumer "
_OWNER = "\t"  # between a name, which cannot contain it, and a principal
_MS_PER_S = 1_000
PERIOD_MS = 30_000  # least time between two edits of the manifest for one consumer
CONSUMERS_MAX = 1_000  # of one principal: each has a place in the manifest, and keeps the WAL
POSITIONS_MAX = 4_096  # positions remembered between the acknowledged and the last published commit
_SEQ = itemgetter(0)


class EditableManifest(Protocol):
    """The manifest of one database, editable by a writer, a reader or a command."""

    @property
    def current(self) -> Manifest:
        """The newest manifest seen so far."""
        ...

    async def refresh(self) -> Manifest:
        """Return the newest manifest, by a list that is sent now."""
        ...

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Apply `edit` until `landed` holds for a manifest; return that manifest."""
        ...


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer and its lease."""

    name: str
    principal: str  # to which it belongs; empty: to none
    lease: Lease


class ConsumerLeases:
    """The leases of the consumers of one database."""

    def __init__(self, store: CasStore, stored: EditableManifest, ttl_s: int) -> None:
        """Each lease lives for `ttl_s` from its last `hold` on."""
        self._store = store
        self._stored = stored
        self._ttl_s = ttl_s

    async def hold(self, consumer: str, wal_id_min: int, *, principal: str = "") -> None:
        """Keep the WAL objects from `wal_id_min` on for this consumer, from now for `ttl_s`.

        After this returns, they are kept until the lease expires, is released, or is moved on by a
        later call, which frees the objects before its `wal_id_min`. The lease never moves back:
        for a lower `wal_id_min` it is renewed where it is. Nothing is edited if the lease keeps
        these objects already and more than half of its life is left. Raises `WalUnprotected` when
        there is no lease and these objects may be deleted at any moment, `InvalidRequest` for an
        invalid name and for a principal that has `CONSUMERS_MAX` others, `ManifestConflict`,
        `StoreError`, and what the manifest's `edit` raises.
        """
        holder = holder_of(consumer, principal)
        now_ms = await self._store.now_ms()
        manifest = await self._stored.refresh()
        if self._is_held(manifest, holder, wal_id_min, now_ms):
            return
        if principal and find_wal_lease(manifest, holder) is None:
            _check_count(manifest, principal)
        expire_time_s = -(-now_ms // _MS_PER_S) + self._ttl_s

        def edit(manifest: Manifest) -> Manifest:
            return hold_wal(manifest, holder, wal_id_min, expire_time_s)

        def landed(manifest: Manifest) -> bool:
            return holds_wal(manifest, holder, wal_id_min, expire_time_s)

        async with edit_deadline(self._store):
            await self._stored.edit(edit, landed)

    async def find(self, consumer: str, *, principal: str = "") -> Lease | None:
        """Return the consumer's lease in the newest manifest, expired or not; None: it has none."""
        return find_wal_lease(await self._stored.refresh(), holder_of(consumer, principal))

    async def release(self, consumer: str, *, principal: str = "") -> None:
        """Remove the lease of this consumer, if it has one. Raises as `hold`."""
        holder = holder_of(consumer, principal)
        if find_wal_lease(await self._stored.refresh(), holder) is None:
            return
        async with edit_deadline(self._store):
            await self._stored.edit(
                partial(release_wal, holder=holder),
                lambda manifest: find_wal_lease(manifest, holder) is None,
            )

    async def list(self) -> Sequence[Consumer]:
        """Return all consumers that have a lease, expired or not, by name."""
        return consumers_of(await self._stored.refresh())

    def _is_held(self, manifest: Manifest, holder: str, wal_id_min: int, now_ms: int) -> bool:
        found = find_wal_lease(manifest, holder)
        if found is None or found.wal_id_min is None or found.wal_id_min < wal_id_min:
            return False
        return found.expire_time_s * _MS_PER_S - now_ms > self._ttl_s * _MS_PER_S / 2


def _check_count(manifest: Manifest, principal: str) -> None:
    """Raise `InvalidRequest` if a principal may have no more consumers."""
    owned = sum(each.principal == principal for each in consumers_of(manifest))
    if owned >= CONSUMERS_MAX:
        problem = f"{principal} has {owned} consumers, and no more are allowed"
        raise InvalidRequest("consumer", f"{problem}: delete some, or let their leases end")


def consumers_of(manifest: Manifest) -> Sequence[Consumer]:
    """Return the consumers that have a lease in this manifest, expired or not, by name."""
    found = [
        _consumer(lease)
        for lease in manifest.leases
        if lease.holder.startswith(_HOLDER) and lease.wal_id_min is not None
    ]
    return sorted(found, key=lambda each: (each.name, each.principal))


def _consumer(lease: Lease) -> Consumer:
    name, _, principal = lease.holder.removeprefix(_HOLDER).partition(_OWNER)
    return Consumer(name, principal, lease)


def holder_of(consumer: str, principal: str = "") -> str:
    """Return the holder of a consumer's lease. Raises `InvalidRequest` for an invalid name."""
    if (
        not 1 <= len(consumer) <= NAME_CHARS_MAX
        or not consumer.isprintable()
        or consumer != consumer.strip()
    ):
        problem = f"expected 1 to {NAME_CHARS_MAX} characters that can be printed"
        raise InvalidRequest("consumer", problem)
    return f"{_HOLDER}{consumer}{_OWNER}{principal}" if principal else f"{_HOLDER}{consumer}"


class WatchConsumer:
    """The progress of the consumer of an open watch, and the renewal of its lease.

    A lease keeps whole WAL objects, while a consumer acknowledges commits. So the object of the
    last acknowledged commit is kept as well. Moving the lease on edits the manifest, so this is not
    done at each acknowledgement, but when `is_due`.
    """

    def __init__(
        self, leases: ConsumerLeases, name: str, principal: str, ttl_s: int, clock: Clock
    ) -> None:
        """`ttl_s` is the life of the lease. Raises `InvalidRequest` for an invalid name."""
        holder_of(name, principal)
        self._leases = leases
        self._clock = clock
        self._renew_ms = ttl_s * 1_000 / 3
        self._period_ms = min(PERIOD_MS, self._renew_ms)
        self._positions: list[tuple[int, int]] = []  # published: commit and WAL object, in order
        self._held_wal_id = 0
        self._held_ms = 0.0
        self._tried_ms = 0.0
        self._acked_wal_id = 0
        self._is_holding = False
        self.name = name
        self.principal = principal

    @property
    def holder(self) -> str:
        """The holder of its lease."""
        return holder_of(self.name, self.principal)

    async def find_lease(self) -> Lease | None:
        """Return the lease that says where to begin, expired or not; None: there is none."""
        found = await self._leases.find(self.name, principal=self.principal)
        return found or await self._leases.find(self.name)

    async def hold(self, wal_id: int) -> None:
        """Keep the WAL from this object on. Raises as `ConsumerLeases.hold`."""
        self._acked_wal_id = max(self._acked_wal_id, wal_id)
        await self._hold()

    def record(self, seq: int, wal_id: int) -> None:
        """Record that everything up to this commit was published, from objects up to this one."""
        positions = self._positions
        if positions and positions[-1][1] == wal_id:
            positions[-1] = (seq, wal_id)
        else:
            positions.append((seq, wal_id))
        if len(positions) > POSITIONS_MAX:
            # An acknowledgement of a position that is dropped counts for the one before it.
            del positions[1::2]

    def ack(self, seq: int) -> None:
        """Record that the consumer has processed everything up to this commit."""
        count = bisect_right(self._positions, seq, key=_SEQ)
        if count:
            self._acked_wal_id = self._positions[count - 1][1]
            del self._positions[: count - 1]

    @property
    def is_due(self) -> bool:
        """Return whether the lease should be moved on, or renewed before it expires."""
        now_ms = self._clock.monotonic_ms()
        if self._is_holding or now_ms - self._tried_ms < self._period_ms:
            return False
        is_behind = self._acked_wal_id > self._held_wal_id
        return is_behind or now_ms - self._held_ms >= self._renew_ms

    async def renew(self) -> None:
        """Move the lease on to the acknowledged commit. Raises as `ConsumerLeases.hold`."""
        await self._hold()

    async def leave(self) -> None:
        """Move the lease on a last time, if more was acknowledged. Raises as `hold`."""
        if self._acked_wal_id > self._held_wal_id:
            await self._hold()

    async def _hold(self) -> None:
        self._is_holding = True
        wal_id = self._acked_wal_id
        # Set even if the edit fails, so that attempts are spaced out after an error.
        now_ms = self._tried_ms = self._clock.monotonic_ms()
        try:
            await self._leases.hold(self.name, wal_id, principal=self.principal)
            self._held_wal_id, self._held_ms = wal_id, now_ms
        finally:
            self._is_holding = False


class OpenConsumers:
    """The consumers of the open watches of one process: at most one watch for each name."""

    def __init__(
        self,
        leases: ConsumerLeases | None,
        feed: CommitFeed,
        history: History,
        clock: Clock,
        lease_ttl_s: int,
    ) -> None:
        """Without `leases`, no watch can have a consumer."""
        self._leases = leases
        self._feed = feed
        self._history = history
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._holders: set[str] = set()

    def take(self, name: str, principal: str) -> WatchConsumer:
        """Take the consumer of this name. Raises `InvalidRequest` if another open watch has it."""
        if self._leases is None:
            raise InvalidRequest("create.consumer", "this server keeps no leases for consumers")
        consumer = WatchConsumer(self._leases, name, principal, self._lease_ttl_s, self._clock)
        if consumer.holder in self._holders:
            problem = f"another watch of this server is open for the consumer {name!r}"
            raise InvalidRequest("create.consumer", problem)
        self._holders.add(consumer.holder)
        return consumer

    def release(self, consumer: WatchConsumer) -> None:
        """Let another watch take the consumer of this name."""
        self._holders.discard(consumer.holder)

    async def begin(self, consumer: WatchConsumer, start_seq: int) -> int:
        """Secure the lease of a consumer; return the commit at which its watch begins.

        The lease keeps the WAL from that commit on: from `start_seq`, or, if that is 0, from what
        the lease keeps already. Returns 0 to begin at the next commit. Raises `WalCollected`,
        `WalUnprotected`, and what leases and history raise.
        """
        try:
            return await self._begin(consumer, start_seq)
        except ObjectNotFound as missing:
            raise await self._history.why_missing(missing, start_seq) from None

    async def _begin(self, consumer: WatchConsumer, start_seq: int) -> int:
        found = await consumer.find_lease()
        position = self._feed.position
        end_wal_id = 0 if position.wal_id is None else position.wal_id + 1
        wal_id = position.next_wal_id
        if start_seq:
            if position.wal_id is not None and start_seq <= position.seq:
                wal_id = await self._history.locate(start_seq, position.wal_id)
        elif found is not None and found.wal_id_min is not None:
            wal_id = min(found.wal_id_min, position.next_wal_id)
            first_seq = await self._history.first_seq(range(wal_id, end_wal_id))
            start_seq = first_seq or position.seq + 1
        await consumer.hold(wal_id)
        return start_seq
