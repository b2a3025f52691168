"""The search for the writer among the servers of one database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from shalekv_client.errors import PermissionDenied, ShaleKVError, Unauthenticated, WrongDatabase
from shalekv_client.routing.endpoints import Endpoint, Endpoints

HOPS_MAX = 4  # unknown addresses, reported by servers, that are asked in one round
DOUBTED_PAUSE_S = 0.03  # before a server that failed a moment ago is asked
PAUSE_INITIAL_S = 0.02
PAUSE_MAX_S = 0.3


class WriterSearch:
    """Searches for the writer as long as a call waits for it.

    Every server is asked for its role and for the address of the writer. Readers learn from the
    manifest where a new writer is, some time after it has begun. So all servers are asked again and
    again, until one answers as the writer under an epoch that is not known to be over. All calls
    that wait for the writer share one search.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        ask: Callable[[Endpoint, bool], Awaitable[str]],
        drop: Callable[[list[Endpoint]], None],
    ) -> None:
        """Create a search that is not running.

        `ask(endpoint, refresh)` notes the answer of a server in `endpoints` and returns the address
        of the writer that the server reports, or an empty string. With `refresh` the server reads
        the newest state before it answers. `drop` closes connections that are not needed any more.
        """
        self._endpoints = endpoints
        self._ask = ask
        self._drop = drop
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._refusal: ShaleKVError | None = None  # that repeating the search would meet again

    async def find(self, within_s: float) -> Endpoint | None:
        """Wait for the writer and return it; None: it was not found within `within_s`.

        Raises `WrongDatabase` when an address that the user gave belongs to another database, and
        `Unauthenticated` or `PermissionDenied` when a server does not tell its role.
        """
        task = self._task
        if task is None or task.done():
            task = self._task = asyncio.create_task(self._search())
        self._waiting += 1
        try:
            await asyncio.wait([task], timeout=within_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._end()
        if task.done() and not task.cancelled():
            task.result()  # raises unexpected errors
        if self._endpoints.writer is None and self._refusal is not None:
            raise self._refusal.again()
        return self._endpoints.writer

    async def aclose(self) -> None:
        """End the search."""
        self._end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _search(self) -> None:
        pause_s = PAUSE_INITIAL_S
        refresh = False
        while True:
            self._refusal = None
            await self._round(refresh=refresh)
            refresh = True
            self._drop(self._endpoints.drop_reported())
            if self._endpoints.writer is not None or self._refusal is not None:
                return
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            await asyncio.sleep(pause_s * (0.5 + 0.5 * chance))
            pause_s = min(PAUSE_MAX_S, pause_s * 2.0)

    async def _round(self, *, refresh: bool) -> None:
        """Ask all servers, and those whose addresses they report, until one is the writer."""
        endpoints = self._endpoints
        asked: set[Endpoint] = set()
        tasks: set[asyncio.Task[str]] = set()

        def ask(endpoint: Endpoint) -> None:
            if endpoint not in asked:
                asked.add(endpoint)
                tasks.add(asyncio.create_task(self._ask_one(endpoint, refresh)))

        for endpoint in endpoints:
            ask(endpoint)
        hops_left = HOPS_MAX
        try:
            while tasks and endpoints.writer is None:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for address in {task.result() for task in done} - {""}:
                    if endpoints.get(address) is not None or hops_left:
                        hops_left -= endpoints.get(address) is None
                        ask(endpoints.add_reported(address))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_one(self, endpoint: Endpoint, refresh: bool) -> str:  # noqa: FBT001 (passed on)
        if endpoint.avoid_until_s > asyncio.get_running_loop().time():
            await asyncio.sleep(DOUBTED_PAUSE_S)  # others may answer first
        try:
            return await self._ask(endpoint, refresh)
        except WrongDatabase as error:
            if endpoint.is_listed:
                self._refusal = error
        except (Unauthenticated, PermissionDenied) as error:
            self._refusal = error
        except ShaleKVError:
            pass  # no answer: the other servers are asked as well
        return ""
