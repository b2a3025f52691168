"""Callers and permits of calls: what stands between the adapter and the guard.

A context says who calls. Finding that out may need a request to the issuer of a token; then the
call waits for it like for any answer. Without a guard everything is allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from shalekv.clock import Clock
from shalekv.errors import DeadlinePassed, ShaleError
from shalekv.rpc.call_counts import PrincipalCalls
from shalekv.rpc.calls import ServerCall
from shalekv.server.access.caller import Caller
from shalekv.server.access.guard import Guard, Permit
from shalekv.server.access.identity import Credentials
from shalekv.server.service import Answer, Call
from shalekv.v1 import kv_pb2
from shalekv.watch.stream import Admit
from shalekv.write.pending_replies import PendingReply
from shalekv_wire.trace_context import UNNAMED

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message | bytes)
EndStream = Callable[[ShaleError], None]


class Guarding:
    """Contexts of the calls of an adapter, and the guard's permits for them."""

    def __init__(
        self,
        guard: Guard | None,
        clock: Clock,
        checked_as: Message | None,
        calls: PrincipalCalls | None = None,
    ) -> None:
        """The guard is asked about `checked_as` in place of the requests, if it is given.

        `calls` counts who calls.
        """
        self.guard = guard
        self._calls = calls or PrincipalCalls()
        self._clock = clock
        self._checked_as = checked_as
        self._undated = Call()  # that of the last call without a deadline
        self._shown = Credentials("")  # of that call
        self._checks: set[asyncio.Task[None]] = set()

    def context(self, call: ServerCall, end: EndStream | None = None) -> Call | Awaitable[Call]:
        """Return the context of a call.

        Calls of one connection share one, if they have neither deadlines nor names.

        Raises `DeadlinePassed`, and as `Guard.caller_of`.
        """
        last, shown = self._undated, self._shown
        if (
            call.deadline_s is None
            and end is None
            and call.peer is last.peer
            and call.authorization == shown.authorization
            and call.certificate is shown.certificate
            and call.names is UNNAMED
            and (last.caller is None or last.caller.problem is None)
        ):
            self._calls.repeats += 1
            return last
        deadline_ms = None
        if call.deadline_s is not None:
            left_s = call.deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlinePassed("the deadline had passed when the server received the call")
            deadline_ms = self._clock.monotonic_ms() + left_s * 1_000
        caller = None
        if self.guard is not None:
            shown = Credentials(call.peer, call.certificate, call.authorization)
            found = self.guard.caller_of(shown)
            if not isinstance(found, Caller):
                nobody = Call(call.peer, deadline_ms, None, None, call.names, end)
                return self._identified(nobody, found)
            caller = found
        context = Call(call.peer, deadline_ms, None, caller, call.names, end)
        if (
            deadline_ms is None
            and end is None
            and call.names is UNNAMED
            and (caller is None or caller.problem is None)
        ):
            self._undated, self._shown = context, shown
            self._calls.begin(context.principal)
        else:
            self._calls.add(context.principal)
        return context

    async def _identified(self, context: Call, found: Awaitable[Caller]) -> Call:
        context = await _identified(context, found)
        self._calls.add(context.principal)
        return context

    def check(self, call: ServerCall, kind: Message, refuse: EndStream) -> None:
        """Check who calls, while the rest of a request of the type of `kind` is still to come.

        Raises as `Guard.check`; calls `refuse` with the error if it takes time to find out.
        """
        kind = self._checked_as or kind
        if self.guard is None or self.guard.is_open:
            return
        caller = self.guard.caller_of(Credentials(call.peer, call.certificate, call.authorization))
        context = Call(call.peer, names=call.names)
        if isinstance(caller, Caller):
            self.guard.check(replace(context, caller=caller), kind)
        else:
            task = asyncio.ensure_future(self._check_late(context, caller, kind, refuse))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check_late(
        self, context: Call, caller: Awaitable[Caller], kind: Message, refuse: EndStream
    ) -> None:
        assert self.guard is not None
        try:
            self.guard.check(await _identified(context, caller), kind)
        except ShaleError as error:
            refuse(error)

    def answer(
        self,
        call: ServerCall,
        answer: Callable[[RequestT, Call], Answer[ReplyT]],
        request: RequestT,
        context: Call | Awaitable[Call],
        size_bytes: int,
    ) -> Answer[ReplyT]:
        """Answer a request of `size_bytes`, if the guard allows it. Raises as `Guard.begin`.

        Until it is known who calls, the call is not admitted.
        """
        if not isinstance(context, Call):
            call.is_admitted = False
            return self._answer_late(call, answer, request, context, size_bytes)
        if self.guard is None:
            return answer(request, context)
        return answer_guarded(
            self.guard, answer, request, context, size_bytes, checked_as=self._checked_as
        )

    @contextmanager
    def permitted(
        self,
        call: ServerCall,
        context: Call,
        request: Message,
        size_bytes: int,
        end: EndStream,
    ) -> Iterator[Permit | None]:
        """Admit a stream for its request while entered; `end` is called when it may not go on.

        Raises as `Guard.begin`.
        """
        if self.guard is None:
            call.is_admitted = True
            yield None
            return
        request = self._checked_as or request
        permit = self.guard.begin(context, request, size_bytes)
        call.is_admitted = True
        stream = self.guard.keep(context, request, end)
        outcome: BaseException | None = None
        try:
            yield permit
        except BaseException as error:
            outcome = error
            raise
        finally:
            self.guard.leave(stream)
            if permit is not None:
                permit.end(outcome)

    def admit_watch(self, context: Call) -> Admit | None:
        """Return what admits the watches of a stream; None: all are."""
        if self.guard is None:
            return None
        return partial(_admit_watch, self.guard, context)

    async def _answer_late(
        self,
        call: ServerCall,
        answer: Callable[[RequestT, Call], Answer[ReplyT]],
        request: RequestT,
        context: Awaitable[Call],
        size_bytes: int,
    ) -> ReplyT:
        reply = self.answer(call, answer, request, await context, size_bytes)
        call.is_admitted = True
        return await reply if isinstance(reply, Awaitable) else reply


async def _identified(context: Call, caller: Awaitable[Caller]) -> Call:
    return replace(context, caller=await caller)


def answer_guarded(
    guard: Guard,
    answer: Callable[[RequestT, Call], Answer[ReplyT]],
    request: RequestT,
    call: Call,
    size_bytes: int,
    *,
    checked_as: Message | None = None,
) -> Answer[ReplyT]:
    """Answer a request of `size_bytes`, if the guard allows it. Raises as `Guard.begin`.

    The guard is asked about `checked_as` in place of the request, if it is given.
    """
    permit = guard.begin(call, checked_as or request, size_bytes)
    if permit is None:
        return answer(request, call)
    try:
        reply = answer(request, call)
    except BaseException as error:
        permit.end(error)
        raise
    if not isinstance(reply, PendingReply) and isinstance(reply, (bytes, Message)):
        permit.end(reply)
        return reply
    return _ended_with(permit, reply)


def _ended_with(permit: Permit, reply: Awaitable[ReplyT]) -> Awaitable[ReplyT]:
    """Return the same answer; `permit` ends with it."""
    if isinstance(reply, (PendingReply, asyncio.Future)):
        reply.add_done_callback(partial(_end, permit))
        return reply
    return _end_after(permit, reply)


def _end(permit: Permit, done: asyncio.Future[Any] | PendingReply[Any]) -> None:
    if isinstance(done, PendingReply):
        permit.end(done.outcome)
    elif done.cancelled():
        permit.end(asyncio.CancelledError())
    else:
        permit.end(done.exception() or done.result())


async def _end_after(permit: Permit, reply: Awaitable[ReplyT]) -> ReplyT:
    outcome: ReplyT | BaseException | None = None
    try:
        outcome = await reply
        return outcome
    except BaseException as error:
        outcome = error
        raise
    finally:
        permit.end(outcome)
        del outcome  # an error would hold this frame


def _admit_watch(
    guard: Guard, context: Call, create: kv_pb2.WatchCreate, end: EndStream
) -> Callable[[], None]:
    permit = guard.begin(context, create, create.ByteSize())
    stream = guard.keep(context, create, end)

    def leave() -> None:
        guard.leave(stream)
        if permit is not None:
            permit.end(None)

    return leave
