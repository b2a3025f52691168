"""Election in the bucket of the database itself: numbered leases, of which the highest counts.

`election/<20 digits>.lease` is created if it is absent, and never changed. A holder renews its
lease by creating the next one. A candidate that has seen the same lease as the highest for its
whole TTL creates the next one as well. Both use the same name, so only one succeeds.

A stalled process may create a lease whose name was in use before, and was deleted because newer
leases exist. So a process that takes a lease lists the folder *after* it has created it, and only
the highest lease counts, as with manifests (F2).

Requests while nothing changes: a holder creates one object each third of the TTL, and deletes
several at once. A candidate asks for one object about each thirteenth of the TTL, and lists the
folder when it takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from shalekv.errors import ObjectNotFound, StoreError, StoreUnavailable
from shalekv.format.election import NONCE_BYTES, decode_lease, encode_lease
from shalekv.format.names import (
    ELECTION_FOLDER,
    election_name,
    parse_election_name,
    parse_temporary_name,
)
from shalekv.protocol.lease import (
    KEPT,
    ElectionLease,
    ObservedLease,
    is_outdated,
    next_poll_wait_ms,
    observe,
)
from shalekv.server.election.elector import HolderChanged, LeasedTerm
from shalekv.store.cas import CasStore, Claimed, Taken

FIRST_ID = 0
RELEASE_ATTEMPTS = 3  # a renewal whose reply was lost may have taken the name of the release

_log = structlog.get_logger(__name__)


class BucketElector:
    """One process that campaigns in the bucket."""

    def __init__(
        self, store: CasStore, *, holder: str, ttl_ms: int, on_holder_change: HolderChanged
    ) -> None:
        """`holder` is the HOST:PORT that others see; `on_holder_change` is called with theirs."""
        self._store = store
        self._clock = store.runtime.clock
        self._random = store.runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._on_holder_change = on_holder_change
        self._seen: ObservedLease | None = None

    async def campaign(self) -> LeasedTerm:
        """Implement `Elector.campaign`."""
        while True:
            try:
                async with asyncio.timeout(self._ttl_ms / 1_000):
                    term = await self._attempt()
            except (StoreUnavailable, TimeoutError) as error:
                _log.warning("election goes on without an answer", problem=str(error))
                term = None
            if term is not None:
                return term
            now_ms = self._clock.monotonic_ms()
            chance = self._random.random()
            await self._clock.sleep_ms(next_poll_wait_ms(self._seen, self._ttl_ms, chance, now_ms))

    async def _attempt(self) -> LeasedTerm | None:
        seen = self._seen
        if seen is not None:
            seen = await self._follow(seen)
            if not seen.is_over(self._clock.monotonic_ms()):
                return None
        ids = _ids(await self._names())
        if ids and (seen is None or seen.lease_id != ids[-1]):
            seen = await self._read(ids[-1])
            if seen is None or not seen.lease.is_released:
                return None
        return await self._take(ids[-1] + 1 if ids else FIRST_ID)

    async def _follow(self, seen: ObservedLease) -> ObservedLease:
        """Read the leases after this one, as far as there are any."""
        while (after := await self._read(seen.lease_id + 1)) is not None:
            seen = after
        return seen

    async def _read(self, lease_id: int) -> ObservedLease | None:
        """Read this lease, the newest that is known then; None: it does not exist."""
        try:
            data = (await self._store.get(election_name(lease_id))).data
        except ObjectNotFound:
            return None
        return self._observe(lease_id, data)

    def _observe(self, lease_id: int, data: bytes) -> ObservedLease:
        # A lease that cannot be decoded lasts as long as one of this process.
        lease = decode_lease(lease_id, data) or ElectionLease("", b"", self._ttl_ms)
        self._seen = observe(self._seen, lease_id, lease, self._clock.monotonic_ms())
        self._on_holder_change("" if lease.is_released else lease.holder)
        return self._seen

    async def _take(self, lease_id: int) -> LeasedTerm | None:
        nonce = self._random.randbytes(NONCE_BYTES)
        lease = ElectionLease(self._holder, nonce, self._ttl_ms)
        sent_ms = self._clock.monotonic_ms()
        outcome = await self._store.claim(election_name(lease_id), encode_lease(lease_id, lease))
        if isinstance(outcome, Taken):
            self._observe(lease_id, outcome.data)
            return None
        self._seen = None
        names = await self._names()
        newest = max(_ids(names), default=None)
        if newest != lease_id:
            _log.info("lease created behind others", lease_id=lease_id, newest_id=newest)
            return None
        self._on_holder_change(self._holder)
        _log.info("elected", lease_id=lease_id, holder=self._holder)
        held = BucketLease(self._store, lease, lease_id, names)
        return LeasedTerm(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)

    async def _names(self) -> list[str]:
        return [info.name async for info in self._store.list(ELECTION_FOLDER)]


def _ids(listed: Sequence[str]) -> list[int]:
    """Return the ids of the leases among these names, in their order."""
    found = [parse_election_name(name) for name in listed]
    return [lease_id for lease_id in found if lease_id is not None]


class BucketLease:
    """A `RenewableLease` in the bucket."""

    def __init__(
        self, store: CasStore, lease: ElectionLease, lease_id: int, names: Sequence[str]
    ) -> None:
        """`names` are the objects of the folder; outdated ones are deleted at renewals."""
        self._store = store
        self._lease = lease
        self._id = lease_id
        self._names = list(names)

    async def renew(self) -> str | None:
        """Implement `RenewableLease.renew`."""
        why = await self._create(self._lease)
        if why is None:
            await self._delete_outdated()
        return why

    async def release(self) -> None:
        """Implement `RenewableLease.release`."""
        released = replace(self._lease, is_released=True)
        for _ in range(RELEASE_ATTEMPTS):
            before_id = self._id
            why = await self._create(released)
            if why is None:
                _log.info("lease released", lease_id=self._id)
            if why is None or self._id == before_id:
                return

    async def _create(self, lease: ElectionLease) -> str | None:
        """Create the next lease; returns None, or the reason why that is impossible."""
        lease_id = self._id + 1
        name = election_name(lease_id)
        try:
            outcome = await self._store.claim(name, encode_lease(lease_id, lease), is_patient=True)
        except StoreError as error:
            return f"the lease cannot be renewed: {error}"
        rival = decode_lease(lease_id, outcome.data) if isinstance(outcome, Taken) else None
        is_ours = rival is not None and rival.nonce == self._lease.nonce
        if isinstance(outcome, Claimed) or is_ours:  # ours: by a request whose reply was lost
            self._id = lease_id
            self._names.append(name)
        if isinstance(outcome, Claimed):
            return None
        return f"{rival.holder if rival is not None else 'somebody else'} has taken the lease"

    async def _delete_outdated(self) -> None:
        outdated = [name for name in self._names if self._is_outdated(name)]
        if len(outdated) < KEPT:
            return  # several at once: requests may cost money
        with suppress(StoreError):  # outdated leases are harmless
            await self._store.delete(outdated)
            gone = set(outdated)
            self._names = [name for name in self._names if name not in gone]

    def _is_outdated(self, name: str) -> bool:
        temporary = parse_temporary_name(name)
        lease_id = parse_election_name(name if temporary is None else temporary.destination)
        return lease_id is not None and is_outdated(lease_id, self._id)
