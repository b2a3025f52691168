"""The access token of a client: where it comes from, and when it is asked for again.

A token is a secret. It is sent with every call, and it is in no text that this package makes: not
in errors, not in logs, not in the `repr` of an object.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TypeAlias

from shalekv_client.errors import ErrorDetails, ShaleKVError, Unauthenticated
from shalekv_wire.status import Metadata

# What returns the token, or something to await for it. It is called in a thread.
TokenFunction: TypeAlias = Callable[[], str | Awaitable[str]]
# A token, a file that has one, or a function.
TokenSource: TypeAlias = str | Path | TokenFunction

FILE_INTERVAL_S = 1.0  # between two looks at a file
FUNCTION_INTERVAL_S = 60.0  # between two calls of a function whose token no server has refused
FUNCTION_PAUSE_S = 1.0  # at least, between two calls of a function whose token servers refuse
# Until a call of a function is given up: more than the tools of issuers need, so that few are given
# up that would return.
FUNCTION_TIMEOUT_MS = 15_000
THREADS_MAX = 8  # in which a function has not returned; then it is not called until one ends
TOKEN_CHARS_MAX = 8_192
_TOKEN = re.compile(r"[!-~]+")
_LOG = logging.getLogger("shalekv_client")


class _NotReturned(Exception):
    """A function for the token has not returned in time; the text says which calls of it."""


class AccessToken:
    """The token that goes with the calls of one client, and those that replace it.

    A token from a file or a function is asked for again from time to time, and at once when a
    server has refused it. When that fails, the last one stays in use, and the log says why.

    A function that does not return is given up, and called again later. Its thread cannot be ended,
    so the pauses become longer with each thread that is still there, and with THREADS_MAX of them
    the function is not called until one ends.
    """

    def __init__(self, source: TokenSource, on_change: Callable[[], None]) -> None:
        """Take the token, or read the file; a function is called by the first who waits.

        `on_change` is called when there is another token. Raises ValueError for text that is no
        token, and OSError for a file that cannot be read.
        """
        self.metadata: Metadata = ()  # of calls; empty: no token is known yet
        self.number = 0  # of tokens so far
        self._source = source
        self._on_change = on_change
        self._asking: asyncio.Task[None] | None = None
        self._renewed_s = float("-inf")  # when it was asked for again because of a refusal
        self._failure: Exception | None = None  # of the last question; None: it was answered
        self._threads: list[Thread] = []  # in which a function was called
        self._paused_until_s = float("-inf")  # after it has not returned
        if isinstance(source, str):
            self._take(source)
        elif isinstance(source, Path):
            self._take(_content(source))

    @property
    def can_renew(self) -> bool:
        """Return whether there may be another token."""
        return not isinstance(self._source, str)

    async def follow(self) -> None:
        """Ask for the token from time to time, as long as it may change."""
        while self.can_renew:
            is_file = isinstance(self._source, Path)
            await asyncio.sleep(FILE_INTERVAL_S if is_file else FUNCTION_INTERVAL_S)
            if self.number:
                await self._ask()

    def close(self) -> None:
        """Give up a question that is not answered yet."""
        if self._asking is not None:
            self._asking.cancel()

    async def known(self, address: str, timeout_ms: float) -> None:
        """Wait for the first token.

        Raises `Unauthenticated`, with the `address` of a server, when there is none.
        """
        if not self.number:
            await self._ask(timeout_ms)
        if not self.number:
            message = f"there is no access token: {self._problem()}"
            raise Unauthenticated(
                ErrorDetails(address, "UNAUTHENTICATED", message)
            ) from self._failure

    async def renewed(self, number: int, timeout_ms: float) -> bool:
        """Return whether there is another token than that with `number`, which was refused.

        Asks for it, unless that has happened a moment ago, and waits for at most `timeout_ms`.
        """
        if self.number == number and self.can_renew:
            pause_s = 0.0 if isinstance(self._source, Path) else FUNCTION_PAUSE_S
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._renewed_s + pause_s or self._asking is not None:
                self._renewed_s = now_s
                await self._ask(timeout_ms)
        return self.number != number

    def explained(self, refusal: ShaleKVError) -> ShaleKVError:
        """Return a refusal of the token; if another was asked for in vain, it says why."""
        is_file = isinstance(self._source, Path)  # it is read at once: there is nothing to wait for
        if self._failure is None and (self._asking is None or is_file):
            return refusal
        message = f"{refusal.details.message}; there is no other access token: {self._problem()}"
        return type(refusal)(replace(refusal.details, message=message))

    async def _ask(self, timeout_ms: float | None = None) -> None:
        """Ask once, for all who wait; returns when that is done or the time is over."""
        if self._asking is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._paused_until_s:
                return
            self._asking = loop.create_task(self._ask_once())
        await asyncio.wait([self._asking], timeout=timeout_ms and timeout_ms / 1000.0)

    async def _ask_once(self) -> None:
        was_answered = self._failure is None
        number = self.number
        try:
            self._take(await self._answer())
            self._failure = None
        except Exception as error:  # noqa: BLE001 - whatever a function of the user raises
            self._failure = error
            if number and was_answered:
                _LOG.warning("the last access token stays in use: %s", self._problem())
        finally:
            self._asking = None
        if self.number != number:
            self._on_change()

    async def _answer(self) -> str:
        if isinstance(self._source, Path):
            return _content(self._source)
        if isinstance(self._source, str):
            return self._source
        self._threads = [each for each in self._threads if each.is_alive()]
        if len(self._threads) >= THREADS_MAX:
            raise _NotReturned(f"{THREADS_MAX} calls of the function for it have not returned")
        bound = asyncio.timeout(FUNCTION_TIMEOUT_MS / 1000.0)
        try:
            async with bound:
                answer = await self._called(self._source)
                return answer if isinstance(answer, str) else await _awaited(answer)
        except TimeoutError:
            if not bound.expired():
                raise  # by the function
        self._threads = [each for each in self._threads if each.is_alive()]
        pause_s = min(FUNCTION_INTERVAL_S, FUNCTION_PAUSE_S * 2.0 ** min(len(self._threads), 16))
        self._paused_until_s = asyncio.get_running_loop().time() + pause_s
        raise _NotReturned(f"the function for it has not returned within {FUNCTION_TIMEOUT_MS} ms")

    async def _called(self, function: TokenFunction) -> str | Awaitable[str]:
        """Call `function` in a thread of its own, which does not keep the process alive."""
        returned: Future[str | Awaitable[str]] = Future()
        returned.set_running_or_notify_cancel()

        def call() -> None:
            try:
                returned.set_result(context.run(function))
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                returned.set_exception(error)

        context = copy_context()
        thread = Thread(target=call, name="shalekv access token", daemon=True)
        self._threads.append(thread)
        thread.start()
        return await asyncio.wrap_future(returned)

    def _take(self, token: str) -> None:
        if len(token) > TOKEN_CHARS_MAX or not _TOKEN.fullmatch(token):
            origin = f"{self._source}: " if isinstance(self._source, Path) else ""
            raise ValueError(
                f"{origin}an access token has 1 to {TOKEN_CHARS_MAX:,} visible ASCII characters"
            )
        metadata = (("authorization", f"Bearer {token}"),)
        if metadata != self.metadata:
            self.metadata = metadata
            self.number += 1

    def _problem(self) -> str:
        """Say what has failed, without the words of a function, which may repeat a secret."""
        if isinstance(self._source, Path) or isinstance(self._failure, _NotReturned):
            return str(self._failure)
        if self._failure is None:
            return "the function for it has not returned in time"
        return f"the function for it has raised {type(self._failure).__name__}"


async def _awaited(answer: Awaitable[str]) -> str:
    """Await what a function has returned; when that is given up, don't wait until it ends."""
    task = asyncio.ensure_future(answer)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was retrieved
    try:
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()


def _content(file: Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(TOKEN_CHARS_MAX + 3)  # with the end of a line
    return content.decode("latin-1").strip()
