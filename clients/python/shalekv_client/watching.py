"""All watches of a client on one KV.Watch call, which is replaced by another when it breaks.

    idle --- a watch is begun ---> streaming --- the last watch is closed ---> idle
                                    |     ^
                      the call ends +-----+ after a while, with the server that the route then names

A watch that is begun while a call ends keeps the call, or, when that is too late, has the next one.

A watch is opened again behind the last commit that it was told, so that its user gets each commit
once. A watch that is not read from is parked: closed at the server, and opened again when its user
has taken half of what waits. So one that nobody reads neither fills the memory nor holds others up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import TypeAlias

from shalekv_client.cancellation import abandoned
from shalekv_client.error_table import silence
from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    ServerFailed,
    ShaleKVError,
    Unreachable,
)
from shalekv_client.retry import RetryPolicy, may_repeat
from shalekv_client.watch import Watch
from shalekv_client.watch_stream import Hear, WatchCall, WatchStream

CONSUMER_FIELD = "create.consumer"
LAST_WORDS_S = 1.0  # for the server to close a watch
_PASSING = (Cancelled, ConnectionLost, DeadlineExceeded, Fenced, Unreachable)
# Begins a call, with the address and who hears what it tells of the server; given why the call
# before is over, if there was one.
OpenCall: TypeAlias = Callable[[ShaleKVError | None], Awaitable[tuple[str, WatchCall, Hear]]]


class Watching:
    """The watches of one client."""

    def __init__(
        self, open_call: OpenCall, *, address: str, policy: RetryPolicy, timeout_ms: int
    ) -> None:
        """A watch that is not open after `timeout_ms` fails; `address` is for errors."""
        self._open_call = open_call
        self._address = address
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._numbers = count(1)
        self._watches: dict[Watch, None] = {}
        self._deadlines: dict[Watch, asyncio.TimerHandle] = {}  # to be open for the first time
        self._retries: dict[Watch, asyncio.TimerHandle] = {}  # to be opened again
        self._stream: WatchStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_acked = False
        self._reason: ShaleKVError | None = None  # the last one why a call was over

    def begin(self, watch: Watch) -> None:
        """Open `watch` for the first time."""
        self._watches[watch] = None
        loop = asyncio.get_running_loop()
        self._deadlines[watch] = loop.call_later(self._timeout_ms / 1000.0, self._expire, watch)
        self.go_on(watch)

    def go_on(self, watch: Watch) -> None:
        """Open `watch` where it has to go on."""
        self._retries.pop(watch, None)
        if self._stream is not None:
            self._stream.open(watch)
        elif self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def ack(self, watch: Watch) -> None:
        """Tell what it has acknowledged; when it is opened the next time, if it is not open."""
        self._has_acked = True
        if self._stream is not None:
            self._stream.ack(watch)

    async def end(self, watch: Watch) -> None:
        """Close `watch`; one with acknowledgements waits for a moment until they have arrived."""
        stream = self._stream
        farewell = stream.close(watch) if stream is not None else None
        self._drop(watch)
        if farewell is not None and watch.acked_seq:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.shield(farewell)
        self._end_if_idle()

    async def aclose(self) -> None:
        """End the call; the watches fail.

        After acknowledgements a call that ends in order is given a moment for that: the server
        moves leases on when it ends.
        """
        if self._has_acked and self._task is not None and not self._watches:
            await asyncio.wait([self._task], timeout=LAST_WORDS_S)
        for watch in list(self._watches):
            watch.fail(abandoned(self._address, "the client"))
            self._drop(watch)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while self._watches:
            reason, has_answered = await self._attempt()
            self._reason = reason
            if reason is None:  # nobody was left; perhaps somebody came meanwhile
                continue
            failures = 1 if has_answered else failures + 1
            for watch in list(self._watches):
                if watch.opened_at_seq is None or not _may_pass(reason):
                    self._count_failure(watch, reason)
            if self._watches:
                await asyncio.sleep(self._delay_s(failures, reason))

    async def _attempt(self) -> tuple[ShaleKVError | None, bool]:
        """Watch with one call until it is over: why, and whether the server had answered."""
        try:
            address, call, hear = await self._open_call(self._reason)
        except ShaleKVError as error:
            return error, False
        stream = self._stream = WatchStream(
            call, address, self._numbers, hear=hear, on_closed=self._closed
        )
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        for watch in self._watches:
            if not watch.is_parked:
                stream.open(watch)
        try:
            reason = await stream.run()
            return reason, stream.has_answered
        finally:
            self._stream = None

    def _closed(self, watch: Watch, reason: ShaleKVError) -> None:
        """The server has closed a watch: open it again, if that may help."""
        if self._count_failure(watch, reason):
            delay_s = self._delay_s(watch.attempts, reason)
            loop = asyncio.get_running_loop()
            self._retries[watch] = loop.call_later(delay_s, self.go_on, watch)

    def _count_failure(self, watch: Watch, reason: ShaleKVError) -> bool:
        """Note that a watch was not opened, or was closed; whether to go on with it."""
        watch.attempts += 1
        is_first = watch.opened_at_seq is None
        if is_first:
            goes_on = _may_pass(reason) and watch.attempts < self._policy.attempts_max
        else:
            goes_on = _may_pass(reason) or _is_own_shadow(reason)
        if goes_on:
            return True
        watch.fail(reason)
        self._drop(watch)
        self._end_if_idle()
        return False

    def _expire(self, watch: Watch) -> None:
        """A watch was not opened in time."""
        if watch.opened_at_seq is None:
            watch.fail(self._reason or silence(self._address, self._timeout_ms))
            if self._stream is not None:
                self._stream.close(watch)
            self._drop(watch)
            self._end_if_idle()

    def _drop(self, watch: Watch) -> None:
        self._watches.pop(watch, None)
        for timers in (self._deadlines, self._retries):
            timer = timers.pop(watch, None)
            if timer is not None:
                timer.cancel()

    def _end_if_idle(self) -> None:
        if not self._watches and self._stream is not None:
            self._stream.end()

    def _delay_s(self, failures: int, reason: ShaleKVError) -> float:
        policy = self._policy
        backoff_ms = min(policy.backoff_max_ms, policy.backoff_initial_ms * 2.0 ** (failures - 1))
        chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
        advice_ms = reason.details.retry_after_ms or 0
        return max(backoff_ms * (0.5 + 0.5 * chance), advice_ms * (1.0 + 0.5 * chance)) / 1000.0


def _is_own_shadow(reason: ShaleKVError) -> bool:
    """Whether the name of the consumer may be taken by this watch's own past.

    A server that has not noticed yet that a connection is gone keeps it for who was there.
    """
    return isinstance(reason, InvalidRequest) and reason.field == CONSUMER_FIELD


def _may_pass(reason: ShaleKVError) -> bool:
    """Whether a watch may go on, here or at another server, a little later."""
    if isinstance(reason, ServerFailed):  # what no server of ours has said: the way broke
        return not reason.reason and reason.code in {"INTERNAL", "UNKNOWN"}
    return isinstance(reason, _PASSING) or may_repeat(reason)
