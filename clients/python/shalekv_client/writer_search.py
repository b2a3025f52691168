"""Finding the writer: every server is asked for its role, and for who the writer is.

Readers learn from the manifest where a new writer is, some time after it has begun. Until somebody
answers as the writer, under an epoch that nobody knows to be over, all are asked again and again.
All calls that wait for the writer wait for the same search.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from shalekv_client.endpoints import Endpoint, Endpoints
from shalekv_client.errors import ShaleKVError, WrongDatabase

HOPS_MAX = 4  # addresses that are only told of and are asked in one round
DOUBTED_PAUSE_S = 0.03
PAUSE_INITIAL_S = 0.02
PAUSE_MAX_S = 0.3


class WriterSearch:
    """Searches as long as somebody waits."""

    def __init__(
        self,
        endpoints: Endpoints,
        ask: Callable[[Endpoint, bool], Awaitable[str]],
        drop: Callable[[list[Endpoint]], None],
    ) -> None:
        """`ask` lets `endpoints` know what a server answers, and returns the address of the writer
        as the server tells it, or nothing; if it is told so, the server looks for news before.
        `drop` closes connections that are needed no more.
        """
        self._endpoints = endpoints
        self._ask = ask
        self._drop = drop
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._foreign: WrongDatabase | None = None

    async def find(self, within_s: float) -> Endpoint | None:
        """The writer; None: it was not found in that time.

        Raises `WrongDatabase` when an address that the user gave is that of another database.
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
            task.result()  # raises what nobody expects
        if self._endpoints.writer is None and self._foreign is not None:
            raise self._foreign.again()
        return self._endpoints.writer

    async def aclose(self) -> None:
        """Search no more."""
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
        is_again = False
        while True:
            self._foreign = None
            await self._round(is_again=is_again)
            is_again = True
            self._drop(self._endpoints.forget_told())
            if self._endpoints.writer is not None or self._foreign is not None:
                return
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            await asyncio.sleep(pause_s * (0.5 + 0.5 * chance))
            pause_s = min(PAUSE_MAX_S, pause_s * 2.0)

    async def _round(self, *, is_again: bool) -> None:
        """Ask everybody, and whom they name, until one is the writer."""
        endpoints = self._endpoints
        asked: set[Endpoint] = set()
        tasks: set[asyncio.Task[str]] = set()

        def ask(endpoint: Endpoint) -> None:
            if endpoint not in asked:
                asked.add(endpoint)
                tasks.add(asyncio.create_task(self._told_by(endpoint, is_again)))

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
                        ask(endpoints.told(address))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _told_by(self, endpoint: Endpoint, is_again: bool) -> str:  # noqa: FBT001 (passed on)
        if endpoint.avoid_until_s > asyncio.get_running_loop().time():
            await asyncio.sleep(DOUBTED_PAUSE_S)  # who has just failed has not the first word
        try:
            return await self._ask(endpoint, is_again)
        except WrongDatabase as error:
            if endpoint.is_listed:
                self._foreign = error
        except ShaleKVError:
            pass  # it says nothing: who else does?
        return ""
