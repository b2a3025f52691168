"""The election in etcd: one key, created if it is absent, that lives as long as a lease.

A holder keeps its lease alive, and looks whether the key is still its own: whoever deletes the key
by hand makes it step down. A candidate asks for the key again and again, and creates it when it is
gone. etcd ends a lease by its own time, in whole seconds, and some hundred milliseconds later.
"""

from __future__ import annotations

import math
from contextlib import suppress

import structlog

from shalekv.clock import Clock
from shalekv.core.leasing import poll_wait_ms
from shalekv.format.election import NONCE_BYTES
from shalekv.roles.electors.etcd_client import EtcdClient, EtcdSilent
from shalekv.roles.electors.tenure import Tenure
from shalekv.runtime import Runtime
from shalekv.server.election.elector import Told

_log = structlog.get_logger(__name__)


class EtcdElector:
    """One process that campaigns in etcd."""

    def __init__(
        self, client: EtcdClient, runtime: Runtime, *, holder: str, ttl_ms: int, told: Told
    ) -> None:
        """`holder` is the HOST:PORT that others are told; `told` hears of theirs."""
        self._client = client
        self._clock = runtime.clock
        self._random = runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._told = told
        self._is_silent = False

    async def campaign(self) -> Tenure:
        """As `Elector.campaign`."""
        while True:
            try:
                tenure = await self._attempt()
            except EtcdSilent as error:
                if not self._is_silent:
                    _log.warning("election goes on without an answer", problem=str(error))
                self._is_silent = True
            else:
                self._is_silent = False
                if tenure is not None:
                    return tenure
            await self._clock.sleep_ms(poll_wait_ms(self._ttl_ms, self._random.random()))

    async def _attempt(self) -> Tenure | None:
        found = await self._client.holder()
        self._told("" if found is None else _holder_in(found))
        if found is not None:
            return None
        value = f"{self._holder} {self._random.randbytes(NONCE_BYTES).hex()}".encode()
        sent_ms = self._clock.monotonic_ms()
        lease_id = await self._client.grant(math.ceil(self._ttl_ms / 1_000))
        try:
            is_ours = await self._client.create(value, lease_id)
        except EtcdSilent:
            is_ours = await self._client.holder() == value
        if not is_ours:
            await self._client.revoke(lease_id)
            return None
        self._told(self._holder)
        _log.info("elected", lease_id=f"{lease_id:x}", holder=self._holder)
        held = EtcdLease(self._client, self._clock, lease_id, value, self._ttl_ms)
        return Tenure(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)


class EtcdLease:
    """A `RenewableLease` in etcd."""

    def __init__(
        self, client: EtcdClient, clock: Clock, lease_id: int, value: bytes, ttl_ms: int
    ) -> None:
        """`value` is what the key has as long as the lease is ours."""
        self._client = client
        self._clock = clock
        self._id = lease_id
        self._value = value
        self._ttl_ms = ttl_ms

    async def renew(self) -> str | None:
        """As `RenewableLease.renew`."""
        while True:
            try:
                return await self._attempt()
            except EtcdSilent as error:
                _log.warning("lease not renewed yet", problem=str(error))
            await self._clock.sleep_ms(poll_wait_ms(self._ttl_ms, 1.0))

    async def release(self) -> None:
        """As `RenewableLease.release`."""
        with suppress(EtcdSilent):  # then it lapses
            await self._client.revoke(self._id)
            _log.info("lease released", lease_id=f"{self._id:x}")

    async def _attempt(self) -> str | None:
        if not await self._client.keep_alive(self._id):
            return "the lease has ended in etcd"
        found = await self._client.holder()
        if found == self._value:
            return None
        return "somebody has deleted the lease" if found is None else f"{_holder_in(found)} has it"


def _holder_in(value: bytes) -> str:
    """The HOST:PORT in a value; whatever else is there is shown as it is."""
    return value.decode(errors="replace").partition(" ")[0]
