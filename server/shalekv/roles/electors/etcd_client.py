"""Requests to etcd: whichever of its servers answers, in threads, each with a time limit.

etcd3gw is OpenStack's client of etcd's JSON gateway. It blocks, so what it does is done in threads
of its own: a request that hangs must not hold up the object store. Its watches have no time limit,
so nothing is watched: a candidate asks again after a part of the TTL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease
from requests.exceptions import RequestException

from shalekv.roles.electors.place import EtcdAddress
from shalekv.runtime import ThreadWorkers

T = TypeVar("T")

THREADS = 2  # one that hangs leaves one


class EtcdSilent(Exception):
    """No server of etcd has answered in time, or as it should: nobody knows what was done."""


class EtcdClient:
    """What an elector asks of etcd."""

    def __init__(self, addresses: Sequence[EtcdAddress], key: str, *, timeout_ms: float) -> None:
        """`key` holds the value of whoever has the lease; `timeout_ms` is for each request."""
        self._addresses = [str(each) for each in addresses]
        self._clients = [
            Etcd3Client(each.host, each.port, timeout=timeout_ms / 1_000, api_path="/v3/")
            for each in addresses
        ]
        self._key = key
        self._workers = ThreadWorkers(THREADS)

    def close(self) -> None:
        """Wait for what is under way; it blocks."""
        self._workers.close()

    async def holder(self) -> bytes | None:
        """The value of the key; None when nobody has it. Raises `EtcdSilent`, as all do."""

        def get(client: Etcd3Client) -> bytes | None:
            return next(iter(client.get(self._key)), None)

        return await self._ask(get)

    async def grant(self, ttl_s: int) -> int:
        """A new lease of that many seconds."""
        return await self._ask(lambda client: client.lease(ttl_s).id)

    async def create(self, value: bytes, lease_id: int) -> bool:
        """Give the key this value, as long as the lease lives; False: somebody has it."""
        return await self._ask(
            lambda client: client.create(self._key, value, Lease(lease_id, client))
        )

    async def keep_alive(self, lease_id: int) -> bool:
        """Renew the lease; False: it is over."""
        return await self._ask(lambda client: Lease(lease_id, client).refresh() > 0)

    async def revoke(self, lease_id: int) -> None:
        """End the lease, and with it the key."""
        await self._ask(lambda client: Lease(lease_id, client).revoke())

    async def _ask(self, request: Callable[[Etcd3Client], T]) -> T:
        return await self._workers.run(self._ask_in_turn, request)

    def _ask_in_turn(self, request: Callable[[Etcd3Client], T]) -> T:
        """In a thread: the first server that answers; who fails is asked last the next time."""
        problems = []
        for _ in range(len(self._clients)):
            client = self._clients[0]
            try:
                return request(client)
            except (Etcd3Exception, RequestException, KeyError, ValueError) as error:
                problems.append(f"{type(error).__name__} {error}".strip())
                self._clients = [*self._clients[1:], client]
        asked = ", ".join(self._addresses)
        raise EtcdSilent(f"none of {asked} has answered: {'; '.join(problems)}")
