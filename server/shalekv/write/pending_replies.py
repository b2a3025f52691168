"""Calls that wait for the outcome of their commits, and the reply of each.

A call ends before its commit is settled when its deadline passes, or when no majority of the
safekeepers answers any more. The outcome is unknown to the caller then; the commit itself
continues, and may be applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from shalekv.concurrency import Waiter, complete, fail, new_waiter
from shalekv.errors import OutcomeUnknown, ShaleError, WriteTimedOut
from shalekv.telemetry.activity import CURRENT, CallActivity, CommitActivity, StoreRequest

TICK_MS = 10


MessageT = TypeVar("MessageT")


class PendingReply(Generic[MessageT]):
    """The serialized reply to one call, as a light future that the log completes.

    A transport adds a callback, and takes the `outcome` in it: that needs no task, and no turn of
    the loop. `await` parses them, for callers in this process. Only the call that waits may
    cancel it, which affects neither other calls nor the commit.
    """

    __slots__ = ("_callbacks", "activity", "outcome", "parse")

    def __init__(self, parse: Callable[[bytes], MessageT]) -> None:
        """Begin without an outcome; `parse` makes the message of a serialized reply."""
        self.parse = parse
        self.outcome: bytes | BaseException | None = None  # once it is there: reply or error
        # The group of commits that it has waited for, once it is done; None: there was none.
        self.activity: CommitActivity | None = None
        self._callbacks: tuple[Callable[[Any], object], ...] = ()

    @property
    def first_key(self) -> bytes:
        """The first key that the commit changes; empty: there is none."""
        return b""

    def queued_behind(self) -> Sequence[StoreRequest] | None:
        """Return the requests that its commit waits for in the queue; None: it is in no queue."""
        return None

    def done(self) -> bool:
        """Return whether there is a reply, an error or a cancellation."""
        return self.outcome is not None

    def cancelled(self) -> bool:
        """Return whether the call has given up."""
        return isinstance(self.outcome, asyncio.CancelledError)

    def exception(self) -> BaseException | None:
        """Return the error of the call; None: there is a reply. REQUIRES: it is done."""
        return self.outcome if isinstance(self.outcome, BaseException) else None

    def result(self) -> bytes:
        """Return the serialized reply, or raise the error of the call. REQUIRES: it is done."""
        outcome = self.outcome
        if type(outcome) is bytes:
            return outcome
        assert isinstance(outcome, BaseException)
        try:
            raise outcome
        finally:
            del self, outcome  # the error would hold this frame

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` with this object as soon as it is done, at once if it is.

        It is called from within the log, so it must neither write nor wait.
        """
        if self.outcome is not None:
            callback(self)
        else:
            self._callbacks += (callback,)

    def cancel(self) -> bool:
        """Give up, unless it is done already; returns whether it was not."""
        return self._complete(asyncio.CancelledError())

    def set_result(self, reply: bytes) -> None:
        """Complete the call with its reply, unless it is done."""
        self._complete(reply)

    def set_exception(self, error: ShaleError) -> None:
        """Complete the call with an error, unless it is done."""
        self._complete(error)

    def _complete(self, outcome: bytes | BaseException) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = outcome
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - a bug in one call must not end the log
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a callback of a call has failed", "exception": error}
                )
        return True

    def __await__(self) -> Generator[Any, None, MessageT]:
        """Return the reply, parsed, or raise the error of the call. Cancelling this cancels it."""
        waiter = new_waiter()
        self.add_done_callback(partial(_wake, waiter))
        try:
            yield from waiter
            return self.parse(self.result())
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            call = CURRENT.get()
            if isinstance(call, CallActivity):
                call.commit, call.queued_behind = self.activity, self.queued_behind()
            del self, waiter  # an error would hold this frame


def _wake(waiter: Waiter, _done: object) -> None:
    complete(waiter)


Waiting: TypeAlias = asyncio.Future[Any] | PendingReply[Any]


class PendingReplies:
    """The calls that wait for commits of one log."""

    def __init__(self, explain: Callable[[], str]) -> None:
        """Begin without calls. `explain` says why commits are not settled, for error messages."""
        self._explain = explain
        # Future -> the tick of its deadline, if it has one. Nearly all calls are answered long
        # before, so the calls of one tick share a timer.
        self._waiting: dict[Waiting, int | None] = {}
        self._due: dict[int, dict[Waiting, None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, future: Waiting, *, within_ms: float | None = None) -> None:
        """Let a call wait for `future`, unless it is done already.

        After `within_ms` it fails with `WriteTimedOut`; None: it has no deadline.
        """
        if future.done():
            return
        if within_ms is None:
            self._waiting[future] = None
            return
        loop = asyncio.get_running_loop()
        tick = int((1_000 * loop.time() + within_ms) // TICK_MS)
        self._waiting[future] = tick
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = {}
            due_s = tick * TICK_MS / 1_000
            loop.call_at(due_s, self._expire, tick, context=Context())  # it is of many calls
        due[future] = None

    def add(self, reply: PendingReply[Any]) -> None:
        """Let a call without a deadline wait for `reply`, which is not done."""
        self._waiting[reply] = None

    def end(self, future: Waiting) -> bool:
        """End the wait of a call. Returns whether `future` is still open, to be completed now."""
        tick = self._waiting.pop(future, None)
        if tick is not None and tick in self._due:
            self._due[tick].pop(future, None)
        return not future.done()

    def fail_all(self) -> None:
        """Fail all waiting calls with `OutcomeUnknown`: their writes may be applied or not."""
        for future in list(self._waiting):
            if self.end(future):
                fail(future, still_unknown())

    def _expire(self, tick: int) -> None:
        late = [future for future in self._due.pop(tick) if self.end(future)]
        if not late:
            return
        message = (
            f"the write was not durable by the deadline of its call: {self._explain()}. It may "
            "be applied or not, now or later. Read the key to find out, or write it again"
        )
        for future in late:
            fail(future, WriteTimedOut(message))


def still_unknown() -> OutcomeUnknown:
    """Build the error of a commit that was sent, and may be applied later."""
    return OutcomeUnknown(
        "no majority of the safekeepers has answered so far: the write may be applied or not, now "
        "or when they answer. Read the key to find out, or write it again"
    )
