"""Interfaces of electors, the renewal of leases for all of them, and the setting `elect`.

An elector may be wrong: it may elect two processes at once, or none for a while. Epochs and fences
keep the history right in any case (server/docs/protocol.md, "Epochs and fences"). Another kind of
elector needs an implementation of `Elector` and of `RenewableLease`, and a case in `parse_place`
and in `election.opening`.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting
from shalekv.protocol.lease import lapse_at_ms, renew_wait_ms

BUCKET = "bucket"
ETCD_SCHEME, ETCD_TLS_SCHEME = "etcd://", "etcds://"
KUBERNETES_SCHEME = "kubernetes://"
EXAMPLES = (
    f"{BUCKET}, {ETCD_SCHEME}HOST:PORT,HOST:PORT/name/of/the/key, the same with "
    f"{ETCD_TLS_SCHEME}, or {KUBERNETES_SCHEME}NAMESPACE/NAME"
)
PORT_MAX = 65_535
NAMESPACE_CHARS_MAX = 63
LEASE_NAME_CHARS_MAX = 253

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_KEY = re.compile(r"[A-Za-z0-9._/-]{1,400}")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_LEASE_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Election in the bucket of the database."""


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Address of one server of etcd."""

    host: str
    port: int

    def __str__(self) -> str:
        """Format as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """Election by a key of etcd, on these servers."""

    addresses: tuple[EtcdAddress, ...]
    key: str
    has_tls: bool = False


@dataclass(frozen=True, slots=True)
class KubernetesPlace:
    """Election by a Lease of Kubernetes."""

    namespace: str  # empty: that of the service account
    name: str


def parse_place(elect: str) -> BucketPlace | EtcdPlace | KubernetesPlace:
    """Parse the setting `elect`. Raises `InvalidSetting`."""
    if elect == BUCKET:
        return BucketPlace()
    before, slash, after = elect.partition("://")[2].partition("/")
    is_etcd = elect.startswith((ETCD_SCHEME, ETCD_TLS_SCHEME))
    if is_etcd and slash and _KEY.fullmatch(after) is not None:
        addresses = tuple(_address(each) for each in before.split(","))
        return EtcdPlace(addresses, after, has_tls=elect.startswith(ETCD_TLS_SCHEME))
    if elect.startswith(KUBERNETES_SCHEME) and slash:
        return KubernetesPlace(check_namespace(before) if before else "", _lease_name(after))
    raise InvalidSetting(f"--elect must be {EXAMPLES}, not {elect!r}")


def check_namespace(text: str) -> str:
    """Return the name of a namespace of Kubernetes; raises `InvalidSetting` for any other text."""
    if len(text) > NAMESPACE_CHARS_MAX or _NAMESPACE.fullmatch(text) is None:
        raise InvalidSetting(
            f"--elect: {text!r} is not the name of a namespace of Kubernetes: at most "
            f"{NAMESPACE_CHARS_MAX} characters of a-z, 0-9 and '-', a letter or digit at both ends"
        )
    return text


def _lease_name(text: str) -> str:
    if len(text) > LEASE_NAME_CHARS_MAX or _LEASE_NAME.fullmatch(text) is None:
        raise InvalidSetting(
            f"--elect: {text!r} is not the name of a Lease of Kubernetes: at most "
            f"{LEASE_NAME_CHARS_MAX} characters of a-z, 0-9, '-' and '.', "
            "a letter or digit at both ends and around each '.'"
        )
    return text


def _address(text: str) -> EtcdAddress:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= PORT_MAX:
        raise InvalidSetting(f"--elect: {text!r} is not HOST:PORT of a server of etcd")
    return EtcdAddress(found[1].strip("[]"), int(found[2]))


# Returns the context for the next connection, made of the newest files.
TlsContext = Callable[[], ssl.SSLContext]

# Called with the HOST:PORT of the holder of the lease whenever it changes; "" for none.
HolderChanged = Callable[[str], None]


class RenewableLease(Protocol):
    """A lease that this process holds; `LeasedTerm` keeps it."""

    async def renew(self) -> str | None:
        """Renew the lease, with retries; returns None, or the reason why that is impossible."""
        ...

    async def release(self) -> None:
        """Release the lease, so that others can take it at once; raises nothing on failure."""
        ...


class Term(Protocol):
    """The time in which this process may try to be the writer."""

    async def keep(self) -> str:
        """Renew the lease until it is lost; returns the reason.

        May be cancelled, and called again after that. What this process does as the writer when the
        lease is lost is up to `cli.process.writer`.
        """
        ...

    async def resign(self) -> None:
        """Release the lease, unless it was lost. REQUIRES: `keep` is not running."""
        ...


class Elector(Protocol):
    """Decides which process tries to be the writer of one database."""

    async def campaign(self) -> Term:
        """Wait until this process may try to be the writer; may be cancelled.

        Temporary errors are logged and retried. Permanent ones are raised: `StoreRefused`,
        `StoreBroken`, `InvalidSetting`.
        """
        ...


class LeasedTerm:
    """A `Term` that lasts as long as a `RenewableLease`, which it renews.

    held ---- renewed every third of the TTL ----> held
     |
     +------ another process has it --------------> lost
     +------ not renewed for HOLD_SHARE of it ----> lost, before another process may take it
    """

    def __init__(
        self, lease: RenewableLease, clock: Clock, *, ttl_ms: int, acquired_ms: float
    ) -> None:
        """`acquired_ms` is the time when the request that acquired the lease was *sent*."""
        self._lease = lease
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._renewed_ms = acquired_ms
        self._is_lost = False

    async def keep(self) -> str:
        """Implement `Term.keep`."""
        async with asyncio.TaskGroup() as tasks:
            ways = (tasks.create_task(self._renew()), tasks.create_task(self._lapse()))
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for each in ways:
                each.cancel()
        self._is_lost = True
        return "; ".join(each.result() for each in ways if each in done)

    async def resign(self) -> None:
        """Implement `Term.resign`; takes no longer than the TTL of the lease."""
        if self._is_lost:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ttl_ms / 1_000):
                await self._lease.release()

    async def _renew(self) -> str:
        while True:
            await self._clock.sleep_ms(renew_wait_ms(self._ttl_ms))
            sent_ms = self._clock.monotonic_ms()
            why = await self._lease.renew()
            if why is not None:
                return why
            self._renewed_ms = sent_ms

    async def _lapse(self) -> str:
        while True:
            left_ms = lapse_at_ms(self._renewed_ms, self._ttl_ms) - self._clock.monotonic_ms()
            if left_ms <= 0:
                return f"the lease could not be renewed within its {self._ttl_ms} ms"
            await self._clock.sleep_ms(left_ms)
