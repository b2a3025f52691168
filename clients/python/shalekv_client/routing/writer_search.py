"""The search for the writer among the servers of one database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import NamedTuple

from shalekv_client.errors import (
    AccessUnknown,
    PermissionDenied,
    ShaleKVError,
    Unauthenticated,
    WrongDatabase,
)
from shalekv_client.routing.endpoints import Endpoint, Endpoints

HOPS_MAX = 4  # unknown addresses, reported by servers, that are asked in one round
DOUBTED_PAUSE_S = 0.03  # before a server that failed a moment ago is asked
PAUSE_INITIAL_S = 0.02
PAUSE_MAX_S = 0.3
# Before a server that has refused the caller is asked again: it counts wrong tokens.
REFUSED_PAUSE_S = 1.0
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


class _Refusal(NamedTuple):
    """The answer of a server to a caller that it does not know, or allow anything."""

    error: ShaleKVError
    is_final: bool  # a server that could not find out who calls may accept the caller soon
    ends_at_s: float  # by the clock of the loop; then the server is asked again


class WriterSearch:
    """Searches for the writer as long as a call waits for it.

    Every server is asked for its role and for the address of the writer. Readers learn from the
    manifest where a new writer is, some time after it has begun. So all servers are asked again and
    again, until one answers as the writer under an epoch that is not known to be over. All calls
    that wait for the writer share one search.

    A server that refuses the caller does not end the search: others may know the caller, while a
    new file of tokens is given to one after the other. But it ends when all have refused, or when
    the others have read the newest state and say that one of those that refuse is the writer.
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
        self._wrong: WrongDatabase | None = None  # of a listed server: it will not change
        self._refusals: dict[str, _Refusal] = {}  # of this search, by address

    async def find(self, within_s: float) -> Endpoint | None:
        """Wait for the writer and return it; None: it was not found within `within_s`.

        Raises `WrongDatabase` when an address that the user gave belongs to another database, and
        the refusal if it was not found and a server has refused the caller.
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
        if self._endpoints.writer is None:
            for error in (self._wrong, *(each.error for each in self._refusals.values())):
                if error is not None:
                    raise error.unnamed()
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
        self._wrong = None
        self._refusals.clear()
        while True:
            reported = await self._round(refresh=refresh)
            self._drop(self._endpoints.drop_reported())
            if self._is_over(reported if refresh else set()):
                return
            refresh = True
            chance = _JITTER.random()
            await asyncio.sleep(pause_s * (0.5 + 0.5 * chance))
            pause_s = min(PAUSE_MAX_S, pause_s * 2.0)

    def _is_over(self, reported: set[str]) -> bool:
        """Return whether another round would be in vain.

        Either the writer is found, or all servers refuse the caller, or all do that were `reported`
        as the writer by those that have read the newest state.
        """
        if self._endpoints.writer is not None or self._wrong is not None:
            return True
        refusing = {address for address, each in self._refusals.items() if each.is_final}
        listed = {endpoint.address for endpoint in self._endpoints if endpoint.is_listed}
        return listed <= refusing or (bool(reported) and reported <= refusing)

    async def _round(self, *, refresh: bool) -> set[str]:
        """Ask all servers, and those whose addresses they report, until one is the writer.

        Returns the addresses that they have reported.
        """
        endpoints = self._endpoints
        reported: set[str] = set()
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
                addresses = {task.result() for task in done} - {""}
                reported |= addresses
                for address in addresses:
                    if endpoints.get(address) is not None or hops_left:
                        hops_left -= endpoints.get(address) is None
                        ask(endpoints.add_reported(address))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return reported

    async def _ask_one(self, endpoint: Endpoint, refresh: bool) -> str:  # noqa: FBT001 (passed on)
        loop = asyncio.get_running_loop()
        refusal = self._refusals.get(endpoint.address)
        if refusal is not None and loop.time() < refusal.ends_at_s:
            return ""
        if endpoint.avoid_until_s > loop.time():
            await asyncio.sleep(DOUBTED_PAUSE_S)  # others may answer first
        try:
            address = await self._ask(endpoint, refresh)
        except WrongDatabase as error:
            if endpoint.is_listed:
                self._wrong = error
        except (Unauthenticated, PermissionDenied, AccessUnknown) as error:
            is_final = not isinstance(error, AccessUnknown)
            pause_s = max(REFUSED_PAUSE_S, (error.details.retry_after_ms or 0) / 1_000)
            ends_at_s = loop.time() + (pause_s if is_final else 0.0)
            self._refusals[endpoint.address] = _Refusal(error, is_final, ends_at_s)
        except ShaleKVError:
            pass  # no answer: the other servers are asked as well
        else:
            self._refusals.pop(endpoint.address, None)
            return address
        return ""
