"""Election in etcd: one key, created if it is absent, that lives as long as a lease of etcd.

A holder keeps its lease alive, and checks that the key is still its own: deleting the key by hand
makes it step down. A candidate polls the key, and creates it when it is gone. etcd measures a lease
by its own clock, in whole seconds, and ends it some hundred milliseconds late.

etcd3gw is OpenStack's client of etcd's JSON gateway. It blocks, so requests run in threads of their
own: one that hangs must not hold up the object store. Its watches have no time limit, so nothing is
watched; a candidate polls after a part of the TTL. Each request has a time limit, and is answered
by any one of the servers. With TLS, other connections are made once the files have changed.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any, TypeVar

import structlog
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease
from requests import Session
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException

from shalekv.clock import Clock
from shalekv.format.election import NONCE_BYTES
from shalekv.protocol.lease import poll_wait_ms
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.election.elector import EtcdAddress, HolderChanged, LeasedTerm, TlsContext

T = TypeVar("T")

THREADS = 2  # if one hangs, the other is left

_log = structlog.get_logger(__name__)


class EtcdUnavailable(Exception):
    """No server of etcd has answered in time, or as expected: the outcome is unknown."""


class EtcdClient:
    """Requests of an elector to etcd. All methods raise `EtcdUnavailable`."""

    def __init__(
        self,
        addresses: Sequence[EtcdAddress],
        key: str,
        *,
        timeout_ms: float,
        tls: TlsContext | None = None,
    ) -> None:
        """`key` has the value of the holder of the lease; `timeout_ms` is for each request.

        `tls` returns the context of the newest files; None: there is no TLS.
        """
        self._addresses = addresses
        self._timeout_s = timeout_ms / 1_000
        self._tls = tls
        self._context = None if tls is None else tls()
        self._clients = self._opened()
        self._key = key
        self._workers = ThreadWorkers(THREADS)

    def close(self) -> None:
        """Wait for requests in progress. Blocks the thread."""
        self._workers.close()

    async def holder(self) -> bytes | None:
        """Return the value of the key; None: there is no holder."""

        def get(client: Etcd3Client) -> bytes | None:
            return next(iter(client.get(self._key)), None)

        return await self._request(get)

    async def grant(self, ttl_s: int) -> int:
        """Create a lease of that many seconds, and return its id."""
        return await self._request(lambda client: client.lease(ttl_s).id)

    async def create(self, value: bytes, lease_id: int) -> bool:
        """Create the key with this value, for the life of the lease; False: it exists already."""
        return await self._request(
            lambda client: client.create(self._key, value, Lease(lease_id, client))
        )

    async def keep_alive(self, lease_id: int) -> bool:
        """Renew the lease; False: it has ended."""
        return await self._request(lambda client: Lease(lease_id, client).refresh() > 0)

    async def revoke(self, lease_id: int) -> None:
        """End the lease, and with it the key."""
        await self._request(lambda client: Lease(lease_id, client).revoke())

    def _opened(self) -> list[Etcd3Client]:
        """Return a client for each server."""
        session, protocol = Session(), "http"
        if self._context is not None:
            session.mount("https://", _TlsAdapter(self._context))
            protocol = "https"
        return [
            Etcd3Client(
                each.host,
                each.port,
                protocol=protocol,
                timeout=self._timeout_s,
                api_path="/v3/",
                session=session,
            )
            for each in self._addresses
        ]

    async def _request(self, request: Callable[[Etcd3Client], T]) -> T:
        if self._tls is not None and (context := self._tls()) is not self._context:
            self._context = context
            self._clients = self._opened()  # the connections of the others end with them
        return await self._workers.run(self._request_in_turn, request)

    def _request_in_turn(self, request: Callable[[Etcd3Client], T]) -> T:
        """Send a request to one server after the other until one answers; runs in a thread.

        A server that fails is asked last the next time.
        """
        problems = []
        clients = self._clients  # has another list by the end if the files have changed meanwhile
        for client in [*clients]:
            try:
                return request(client)
            except (Etcd3Exception, RequestException, KeyError, ValueError) as error:
                why = str(error) or error.__context__ or ""  # etcd3gw keeps the reason to itself
                problems.append(f"{type(error).__name__} {why}".strip())
                clients[:] = sorted(clients, key=partial(is_, client))
        asked = ", ".join(map(str, self._addresses))
        raise EtcdUnavailable(f"none of {asked} has answered: {'; '.join(problems)}")


class _TlsAdapter(HTTPAdapter):
    """Makes connections of a context alone, whatever the environment says of authorities."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, ssl_context=self._context, **options)

    def build_connection_pool_key_attributes(
        self, request: Any, *_: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().build_connection_pool_key_attributes(request, verify=True)

    def cert_verify(self, *_: Any) -> None:
        """Add no authorities to those of the context."""


class EtcdElector:
    """One process that campaigns in etcd."""

    def __init__(
        self,
        client: EtcdClient,
        runtime: Runtime,
        *,
        holder: str,
        ttl_ms: int,
        on_holder_change: HolderChanged,
    ) -> None:
        """`holder` is the HOST:PORT that others see; `on_holder_change` is called with theirs."""
        self._client = client
        self._clock = runtime.clock
        self._random = runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._on_holder_change = on_holder_change
        self._is_unavailable = False

    async def campaign(self) -> LeasedTerm:
        """Implement `Elector.campaign`."""
        while True:
            try:
                term = await self._attempt()
            except EtcdUnavailable as error:
                if not self._is_unavailable:
                    _log.warning("election goes on without an answer", problem=str(error))
                self._is_unavailable = True
            else:
                self._is_unavailable = False
                if term is not None:
                    return term
            await self._clock.sleep_ms(poll_wait_ms(self._ttl_ms, self._random.random()))

    async def _attempt(self) -> LeasedTerm | None:
        found = await self._client.holder()
        self._on_holder_change("" if found is None else _holder_in(found))
        if found is not None:
            return None
        value = f"{self._holder} {self._random.randbytes(NONCE_BYTES).hex()}".encode()
        sent_ms = self._clock.monotonic_ms()
        lease_id = await self._client.grant(math.ceil(self._ttl_ms / 1_000))
        try:
            is_ours = await self._client.create(value, lease_id)
        except EtcdUnavailable:
            is_ours = await self._client.holder() == value
        if not is_ours:
            await self._client.revoke(lease_id)
            return None
        self._on_holder_change(self._holder)
        _log.info("elected", lease_id=f"{lease_id:x}", holder=self._holder)
        held = EtcdLease(self._client, self._clock, lease_id, value, self._ttl_ms)
        return LeasedTerm(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)


class EtcdLease:
    """A `RenewableLease` in etcd."""

    def __init__(
        self, client: EtcdClient, clock: Clock, lease_id: int, value: bytes, ttl_ms: int
    ) -> None:
        """`value` is that of the key as long as this process holds the lease."""
        self._client = client
        self._clock = clock
        self._id = lease_id
        self._value = value
        self._ttl_ms = ttl_ms

    async def renew(self) -> str | None:
        """Implement `RenewableLease.renew`."""
        while True:
            try:
                return await self._attempt()
            except EtcdUnavailable as error:
                _log.warning("lease not renewed yet", problem=str(error))
            await self._clock.sleep_ms(poll_wait_ms(self._ttl_ms, 1.0))

    async def release(self) -> None:
        """Implement `RenewableLease.release`."""
        with suppress(EtcdUnavailable):  # then the lease expires
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
    """Return the HOST:PORT in a value; another value up to its first space."""
    return value.decode(errors="replace").partition(" ")[0]
