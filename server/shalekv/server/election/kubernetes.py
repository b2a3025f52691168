"""The election in Kubernetes: one Lease, which is renewed by replacing it.

A Lease says who holds it and how long it lasts without being renewed. A holder replaces it in order
to renew it. A candidate replaces it when it has seen it unchanged for as long as it lasts, by its
own clock. Both name the version that they have read, and the API server refuses the slower one. The
times in a Lease are there for people and other programs. They are never compared with a clock here:
the clocks of two machines differ.

Other programs that elect with Leases do the same, so a Lease that one of them holds is respected.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import structlog

from shalekv.clock import Clock
from shalekv.core.leasing import (
    RENEWALS,
    ElectionLease,
    Sighting,
    look_wait_ms,
    poll_wait_ms,
    sight,
)
from shalekv.errors import InvalidSetting
from shalekv.format.election import NONCE_BYTES
from shalekv.roles.electors.kubernetes_api import (
    Document,
    KubernetesLease,
    KubernetesSilent,
    Leases,
)
from shalekv.roles.electors.tenure import Tenure
from shalekv.runtime import Runtime
from shalekv.server.election.elector import Told

REPLACE_ATTEMPTS = 3  # a request that was cut off may have changed the Lease, or somebody's label
RELEASED_S = 1  # the least that a Lease may say

_IDENTITY = re.compile(rf"(.*)_[0-9a-f]{{{2 * NONCE_BYTES}}}")

_log = structlog.get_logger(__name__)


class KubernetesElector:
    """One process that campaigns in Kubernetes."""

    def __init__(
        self, leases: Leases, runtime: Runtime, *, holder: str, ttl_ms: int, told: Told
    ) -> None:
        """`holder` is the HOST:PORT that others are told; `told` hears of theirs."""
        self._leases = leases
        self._clock = runtime.clock
        self._random = runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._told = told
        self._seen: Sighting | None = None
        self._spec: Document = {}  # of the Lease that was seen
        self._changes = 0  # of it that were seen
        self._problem = ""

    async def campaign(self) -> Tenure:
        """Implement `Elector.campaign`."""
        identity = f"{self._holder}_{self._random.randbytes(NONCE_BYTES).hex()}"
        while True:
            least_ms = 0.0
            try:
                tenure = await self._attempt(identity)
            except KubernetesSilent as error:
                least_ms = min(error.wait_ms, self._ttl_ms)
                if str(error) != self._problem:
                    _log.warning("election goes on without an answer", problem=str(error))
                self._problem = str(error)
            else:
                self._problem = ""
                if tenure is not None:
                    return tenure
            now_ms, chance = self._clock.monotonic_ms(), self._random.random()
            wait_ms = look_wait_ms(self._seen, self._ttl_ms, chance, now_ms)
            await self._clock.sleep_ms(max(wait_ms, least_ms))

    async def _attempt(self, identity: str) -> Tenure | None:
        found = await self._leases.get()
        if found is None:
            self._seen = None
            self._told("")
            sent_ms = self._clock.monotonic_ms()
            taken = await self._leases.create(self._claim(identity, transitions=0))
        else:
            seen = self._sight(found)
            is_ours = found.holder == identity  # by a request whose answer was lost
            if not is_ours and not seen.is_over(self._clock.monotonic_ms()):
                return None
            transitions = found.transitions + (not is_ours)
            sent_ms = self._clock.monotonic_ms()
            changed = found.changed(**self._claim(identity, transitions=transitions))
            taken = await self._leases.replace(changed)
        if taken is None:  # somebody was faster
            return None
        self._seen = None
        self._told(self._holder)
        _log.info("elected", lease=identity, holder=self._holder)
        held = HeldLease(self._leases, self._clock, taken, self._ttl_ms)
        return Tenure(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)

    def _claim(self, identity: str, *, transitions: int) -> dict[str, Any]:
        now = _now(self._clock)
        return {
            "holderIdentity": identity,
            "leaseDurationSeconds": math.ceil(self._ttl_ms / 1_000),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _sight(self, found: KubernetesLease) -> Sighting:
        """State of this Lease; its age counts from the last change of its `spec`."""
        if self._seen is None or found.spec != self._spec:
            self._spec = found.spec
            self._changes += 1
        holder = _address_in(found.holder)
        ttl_ms = found.ttl_ms or self._ttl_ms
        lease = ElectionLease(holder, b"", ttl_ms, is_released=not found.holder)
        self._seen = sight(self._seen, self._changes, lease, self._clock.monotonic_ms())
        self._told(holder)
        return self._seen


class HeldLease:
    """A `RenewableLease` in Kubernetes."""

    def __init__(self, leases: Leases, clock: Clock, held: KubernetesLease, ttl_ms: int) -> None:
        """`held` is the Lease as this process has written it."""
        self._leases = leases
        self._clock = clock
        self._held = held
        self._identity = held.holder
        self._ttl_ms = ttl_ms

    async def renew(self) -> str | None:
        """Implement `RenewableLease.renew`."""
        while True:
            least_ms = 0.0
            try:
                return await self._replace(renewTime=_now(self._clock))
            except InvalidSetting as error:
                return str(error)
            except KubernetesSilent as error:
                least_ms = min(error.wait_ms, self._ttl_ms / RENEWALS)
                _log.warning("lease not renewed yet", problem=str(error))
            await self._clock.sleep_ms(max(poll_wait_ms(self._ttl_ms, 1.0), least_ms))

    async def release(self) -> None:
        """Implement `RenewableLease.release`."""
        now = _now(self._clock)
        with suppress(KubernetesSilent, InvalidSetting):  # then it lapses
            why = await self._replace(
                holderIdentity="",
                leaseDurationSeconds=RELEASED_S,
                acquireTime=now,
                renewTime=now,
            )
            if why is None:
                _log.info("lease released", lease=self._identity)

    async def _replace(self, **fields: Any) -> str | None:
        """Change the Lease as long as it is ours; why not, when it is not."""
        for _ in range(REPLACE_ATTEMPTS):
            replaced = await self._leases.replace(self._held.changed(**fields))
            if replaced is not None:
                self._held = replaced
                return None
            found = await self._leases.get()
            if found is None:
                return "somebody has deleted the lease"
            if not found.holder:
                return "somebody has released the lease"
            if found.holder != self._identity:
                return f"{_address_in(found.holder)} has taken the lease"
            self._held = found
        raise KubernetesSilent("somebody else changes the lease all the time")


def _address_in(identity: str) -> str:
    """The HOST:PORT in an identity of ours; that of another program is shown as it is."""
    found = _IDENTITY.fullmatch(identity)
    return identity if found is None else found[1]


def _now(clock: Clock) -> str:
    """The time of this machine, or of its clock that knows no day, as a Lease has it."""
    wall_ms = clock.wall_ms()
    now_ms = clock.monotonic_ms() if wall_ms is None else wall_ms
    return f"{datetime.fromtimestamp(now_ms / 1_000, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
