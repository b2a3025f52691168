"""The one place that asks the policy, takes from quotas and notes what was done.

    credentials ---caller_of---> Caller ---begin---> Permit ---end--->
                                   |
            its open streams ------+--- ended when they are not covered any more

A call is checked when it begins, before anything is looked up for it: a refusal does not depend on
what the database holds. Streams are checked again when the policy changes, and when the
credentials of their callers have expired or were withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from google.protobuf.message import Message

from shalekv.errors import PermissionDenied, QuotaExceeded, ShaleError, Unauthenticated
from shalekv.protocol.access import ANONYMOUS, EVERYTHING, Verb
from shalekv.server.access.audit import AuditEntry, AuditLog, Outcome
from shalekv.server.access.caller import Caller, Policies
from shalekv.server.access.identity import Credentials, Identity
from shalekv.server.access.needs import ANYTHING, Needs, is_known, needs_of
from shalekv.server.access.quotas import STREAMS, Charge, Quotas
from shalekv.server.access.quotas import charge as charge_of
from shalekv.server.service import Call
from shalekv.telemetry.metrics import Metrics
from shalekv.v1 import admin_pb2, kv_pb2

CALLERS_MAX = 10_000  # whose credentials are remembered; each takes about 2 KB
WITHDRAWN = "the credentials have expired, or were withdrawn"
SWEEP_S = 1.0  # between two looks at credentials that may have expired
# Callers or streams that are looked at between two chances for other tasks. Each takes 1 ms after
# a change of a policy that is as large as it may be.
A_TURN = 20
# Streams, which may get a quota while they are open.
_LASTING = frozenset((*STREAMS, kv_pb2.WatchRequest))


class Identifies(Protocol):
    """Finds out who calls: `access.authenticator`."""

    def identify(self, credentials: Credentials) -> Identity | Awaitable[Identity]:
        """Return the identity. Raises `Unauthenticated`, and `Overloaded`."""
        ...

    def is_valid(self, identity: Identity) -> bool:
        """Return whether the identity has not expired, and its token was not removed."""
        ...


class NotedPermit:
    """An operation that was allowed, and has a line in the audit log."""

    __slots__ = ("_charge", "_entry")

    def __init__(self, charge: Charge | None, entry: AuditEntry) -> None:
        """Hold `charge`, if any, and write the line of `entry` at its end."""
        self._charge = charge
        self._entry = entry

    def reply(self, size_bytes: int) -> float:
        """Count a message of a stream of replies; returns the pause that must follow, in ms."""
        self._entry.sent_bytes += size_bytes
        return self._charge.reply(size_bytes) if self._charge is not None else 0.0

    def end(self, outcome: Outcome) -> None:
        """Note the end: gives back what it held of a quota, and writes its audit line."""
        if self._charge is not None:
            self._charge.end(outcome)
        self._entry.end(outcome)


# An operation that was allowed, until it ends.
Permit: TypeAlias = NotedPermit | Charge


class OpenStream:
    """A stream that goes on as long as its caller may have it: a session, a scan, or a watch."""

    __slots__ = ("caller", "end", "needs")

    def __init__(self, caller: Caller, needs: Needs, end: Callable[[ShaleError], None]) -> None:
        """`end` ends it with an error."""
        self.caller = caller
        self.needs = needs
        self.end = end


class Guard:
    """Decides about each operation of a process, and notes it."""

    def __init__(
        self,
        authenticator: Identifies,
        policies: Policies,
        *,
        quotas: Quotas | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`run` has to run as long as calls are answered."""
        self.policies = policies
        self._authenticator = authenticator
        self._quotas = quotas
        self._audit = audit
        self._anonymous = Caller(Identity(ANONYMOUS), policies)
        self._callers: dict[tuple[str, bytes], Caller] = {}
        self._streams: dict[OpenStream, None] = {}
        self._changed = asyncio.Event()
        self.refused = admin_pb2.AccessStatus()
        self.is_enforcing = True  # not everything is allowed to everybody
        self.is_open = False  # everything is allowed to everybody, and nothing is noted
        self._judge()
        policies.listen(self._on_change)

    def caller_of(self, credentials: Credentials) -> Caller | Awaitable[Caller]:
        """Return who calls.

        Raises as `Authenticator.identify`. While the policy is not enforced, credentials that are
        not valid are those of nobody.
        """
        authorization, certificate = credentials.authorization, credentials.certificate
        if not authorization and not certificate:
            return self._anonymous
        caller = self._callers.get((authorization, certificate))
        if caller is not None:
            return caller
        try:
            identity = self._authenticator.identify(credentials)
        except ShaleError as error:
            return self._nobody(credentials, error)
        if isinstance(identity, Identity):
            return self._remember(credentials, identity)
        return self._identified(credentials, identity)

    def begin(self, call: Call, request: Message, size_bytes: int) -> Permit | None:
        """Admit an operation: a unary call, a scan, an operation of a session, or a watch.

        The opening of a session or of a stream of watches is one as well: its request is empty.
        `size_bytes` are those of the request. None: nothing has to be done at its end.

        Raises:
            Unauthenticated: the caller is anonymous and not allowed, or its credentials have
                expired.
            PermissionDenied: its roles do not allow the operation.
            QuotaExceeded: its quota does not.
            PolicyUnknown: the policy that this process knows may have been replaced.
        """
        if self.is_open:
            return None
        caller, charge = call.caller or self._anonymous, None
        try:
            if self._quotas is not None and self.policies.policy.is_enforced:
                use = caller.use_in(self._quotas)
                if use.is_limited or type(request) in _LASTING:
                    charge = charge_of(use, request, size_bytes)
            self._check(caller, request)
        except ShaleError as refusal:
            if charge is not None:
                charge.end(None)
            self._note_refusal(call, request, size_bytes, refusal)
            raise
        audit = self._audit
        if audit is None or not audit.notes(type(request)):
            return charge
        return NotedPermit(charge, audit.begin(call, request, size_bytes))

    def check(self, call: Call, kind: Message) -> None:
        """Raise as `begin` if the caller may send no request of this kind, whatever is in it."""
        if not self.policies.policy.is_enforced:
            return
        caller = call.caller or self._anonymous
        try:
            self._check_identity(caller)
            if not is_known(kind) or needs_of(kind) is not None:
                self._check_needs(caller, ANYTHING)
        except ShaleError as refusal:
            self._note_refusal(call, kind, None, refusal)
            raise

    def keep(self, call: Call, request: Message, end: Callable[[ShaleError], None]) -> OpenStream:
        """Call `end` with an error when the caller may not go on with a stream, until `leave`."""
        stream = OpenStream(call.caller or self._anonymous, needs_of(request) or ANYTHING, end)
        self._streams[stream] = None
        return stream

    def leave(self, stream: OpenStream) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(stream, None)

    async def run(self) -> None:
        """End streams that are not covered any more, and sum up refusals, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._changed.wait()
            self._changed.clear()
            self._judge()
            if self._audit is not None:
                self._audit.sum_up()
            await self._sweep()

    def _check(self, caller: Caller, request: Message) -> None:
        if self._is_stale:
            self.policies.check()
        if not self.policies.policy.is_enforced:
            return
        if not is_known(request):
            raise self._refusal(caller, Verb.ADMIN)  # nobody said what it needs
        if caller.problem is not None or caller.is_fleeting:
            self._check_identity(caller)
        if caller.permissions is EVERYTHING:
            return
        needs = needs_of(request)
        if needs is not None:
            self._check_needs(caller, needs)

    def _check_identity(self, caller: Caller) -> None:
        """Raise what is wrong with the credentials. Those that were withdrawn are found later."""
        if caller.problem is not None:
            raise caller.problem.with_traceback(None)
        if caller.is_fleeting and self._is_withdrawn(caller):
            raise Unauthenticated(WITHDRAWN)

    def _is_withdrawn(self, caller: Caller) -> bool:
        """Return whether credentials that were valid are so no more; marks the caller then."""
        if caller is self._anonymous or self._authenticator.is_valid(caller.identity):
            return False
        caller.problem = caller.problem or Unauthenticated(WITHDRAWN)
        return True

    def _check_needs(self, caller: Caller, needs: Needs) -> None:
        permissions = caller.permissions
        for need in needs:
            if not permissions.allow(need):
                raise self._refusal(caller, need.verb)
        if not needs and permissions.is_empty:
            raise self._refusal(caller, None)

    def _refusal(self, caller: Caller, verb: Verb | None) -> ShaleError:
        name = caller.identity.principal.name
        what = "anything" if verb is None else f"the verb {verb.value}"
        if verb not in (None, Verb.ADMIN):
            what += " on these keys"
        if not name:
            message = f"the call has no credentials, and without any it is not allowed {what}"
            return Unauthenticated(f"{message}: send a token, or connect with a certificate")
        message = f"no role of {name} allows {what}: ask an administrator for one that does"
        return PermissionDenied(message, verb=verb.value if verb is not None else "")

    def _note_refusal(
        self, call: Call, request: Message | None, size_bytes: int | None, refusal: ShaleError
    ) -> None:
        """Count and note a refusal; without a size what is in the request is not known."""
        counts = self.refused
        counts.denied += isinstance(refusal, PermissionDenied)
        counts.unauthenticated += isinstance(refusal, Unauthenticated)
        counts.quota_exceeded += isinstance(refusal, QuotaExceeded)
        if self._audit is not None:
            self._audit.refuse(call, request, size_bytes, refusal)

    def _nobody(self, credentials: Credentials, problem: ShaleError) -> Caller:
        if self.policies.policy.is_enforced:
            self._note_refusal(Call(credentials.peer), None, None, problem)
            raise problem
        return Caller(self._anonymous.identity, self.policies, problem)

    async def _identified(self, credentials: Credentials, found: Awaitable[Identity]) -> Caller:
        try:
            identity = await found
        except ShaleError as error:
            return self._nobody(credentials, error)
        return self._remember(credentials, identity)

    def _remember(self, credentials: Credentials, identity: Identity) -> Caller:
        if not identity.principal.name:
            return self._anonymous
        if len(self._callers) >= CALLERS_MAX:
            forgotten = self._callers.pop(next(iter(self._callers)))
            forgotten.is_fleeting = True  # its calls go on, and the sweep does not know it
        caller = Caller(identity, self.policies)
        self._callers[credentials.authorization, credentials.certificate] = caller
        return caller

    def status(self) -> admin_pb2.AccessStatus:
        """Return the counts of what was refused."""
        if self._audit is not None:
            self.refused.audit_lines_lost = self._audit.file.lost_count
        return self.refused

    def collect(self, metrics: Metrics) -> None:
        """Add what the audit log has lost."""
        if self._audit is not None:
            metrics.add("audit_lines_lost", self._audit.file.lost_count)

    def _judge(self) -> None:
        if self._audit is not None:
            self._audit.use_secret(self.policies.policy.secret)
        self._is_stale = self.policies.is_stale
        self.is_enforcing = self.policies.policy.is_enforced or self._is_stale
        self.is_open = not self.is_enforcing and self._audit is None

    def _on_change(self) -> None:
        self._judge()
        self._changed.set()

    async def _sweep(self) -> None:
        """Look at all remembered callers and all streams once, some in each turn."""
        for count, (key, caller) in enumerate([*self._callers.items()], 1):
            if self._is_withdrawn(caller):
                self._callers.pop(key, None)
            if not count % A_TURN:
                await asyncio.sleep(0)
        for count, stream in enumerate([*self._streams], 1):
            if stream in self._streams and (error := self._why_not(stream)) is not None:
                self._streams.pop(stream, None)
                stream.end(error)
            elif self._quotas is not None:
                stream.caller.use_in(self._quotas)  # a new quota counts for what it sends
            if not count % A_TURN:
                await asyncio.sleep(0)

    def _why_not(self, stream: OpenStream) -> ShaleError | None:
        """Return why the caller may not go on with a stream."""
        self._is_withdrawn(stream.caller)
        try:
            if self._is_stale:
                self.policies.check()
            if not self.policies.policy.is_enforced:
                return None
            self._check_identity(stream.caller)
            self._check_needs(stream.caller, stream.needs)
        except ShaleError as error:
            return error
        return None
