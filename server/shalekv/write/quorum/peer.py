"""One member as the writer sees it: connect, greet, make it follow this writer, send the log.

A slow or unreachable member does not delay others. The bytes that were sent to it and are not
acknowledged are bounded; the rest follows when it accepts more. If a member lacks records that the
writer has dropped, since they are archived, its log starts again after them (`Elected` says so).

Members may pass records on to each other in a chain, so that the writer sends each record once
(server/docs/safekeepers.md, "Ways of records"). The writer sends to the head of the chain, and
names the others in each append. Acknowledgements come from each member directly, so a chain does
not affect safety. It does not affect availability either: a member that acknowledges nothing for a
time although there is something leaves the chain, and is sent everything directly, until it may try
again.

    enter   when it was sent all that the head was sent: what follows comes by the chain
    leave   when the stream to it ends, when it is full, or when it acknowledges nothing
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from shalekv.errors import ShaleError
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Archived,
    Greet,
    Greeting,
    Joined,
    Record,
    Refusal,
    RelayTarget,
    ToProposer,
)
from shalekv.runtime import Runtime
from shalekv.settings import MIB, QuorumSettings, SafekeeperTransport
from shalekv.store.retry import Backoff
from shalekv.write.quorum.ledger import Ledger
from shalekv.write.quorum.links import CONNECT_TIMEOUT_MS, DatabasePlace, Link, LinkBroken, Links

log = structlog.get_logger()

_PENALTY_TIMEOUTS = 10  # a member stays out of the chain for so many timeouts, then twice as many
_PENALTY_MS_MAX = 300_000.0
APPEND_BYTES_MAX = 2 * MIB  # in one message, unless one record alone is larger
# Records that were sent to one member and not acknowledged: enough for 80 MB/s over a round trip of
# 100 milliseconds. A member that is further behind is sent nothing more, and delays no other.
SEND_QUEUE_BYTES_MAX = 8 * MIB
REPLY_TIMEOUT_MS = 10_000  # a sync of a busy disk takes seconds; then the connection may be broken
# A member of the chain that acknowledges nothing for so long, although records are due, leaves it
# for a time. A sync of a disk takes less, and `quorum_timeout_ms` is well above.
CHAIN_TIMEOUT_MS = 300
WAIT_MS_MIN = 1.0
FULL_PAUSE_MS = 200  # a full member is asked again after this
BACKOFF = Backoff(20.0, 2_000.0)


class Sender(Protocol):
    """The sender of records to one member."""

    @property
    def member(self) -> Member:
        """The member that it sends to."""
        ...

    @property
    def sent_lsn(self) -> int:
        """The member needs nothing up to this record any more: it was sent or acknowledged."""
        ...


class Chain:
    """The members in the chain, the head first."""

    def __init__(self, settings: QuorumSettings) -> None:
        """Begin with an empty chain."""
        self.is_on = settings.safekeeper_transport is SafekeeperTransport.CHAIN
        self.is_broadcast = settings.commit_broadcast
        self.timeout_ms = CHAIN_TIMEOUT_MS
        self.senders: list[Sender] = []

    @property
    def head(self) -> Sender | None:
        """The member that the writer sends records to."""
        return self.senders[0] if self.senders else None


class ChainPosition:
    """The position of one member: at the head of the chain, further down, or outside it."""

    def __init__(self, chain: Chain, sender: Sender) -> None:
        """Begin outside the chain."""
        self.chain = chain
        self._sender = sender
        self._waiting_since_ms: float | None = None  # start of the wait for an acknowledgement
        self._entered_ms = 0.0
        self._barred_until_ms = 0.0
        self._penalty_ms = 0.0

    @property
    def is_relayed(self) -> bool:
        """Return whether another member passes records on to this one."""
        return self._sender in self.chain.senders[1:]

    @property
    def relays(self) -> tuple[RelayTarget, ...]:
        """The members that this one passes records on to."""
        if self.chain.head is not self._sender:
            return ()
        return tuple(_target(each) for each in self.chain.senders[1:])

    def leave(self) -> None:
        """Leave the chain."""
        self._waiting_since_ms = None
        if self._sender in self.chain.senders:
            self.chain.senders.remove(self._sender)

    def judge(self, now_ms: float, *, flushed_lsn: int, last_lsn: int, is_fit: bool) -> None:
        """Enter the chain if possible, leave it if necessary. The log ends with `last_lsn`."""
        if not self.chain.is_on:
            return
        if self._sender not in self.chain.senders:
            if is_fit and now_ms >= self._barred_until_ms and self._has_caught_up_with_head:
                self.chain.senders.append(self._sender)
                self._entered_ms = now_ms
            else:
                return
        if not is_fit:
            self.leave()
        elif flushed_lsn >= last_lsn:
            self._waiting_since_ms = None
        elif self._waiting_since_ms is None:
            self._waiting_since_ms = now_ms
        elif now_ms >= self._waiting_since_ms + self.chain.timeout_ms:
            self._fail(now_ms)

    def acknowledged(self, now_ms: float) -> None:
        """Restart the timeout: the member has acknowledged something."""
        if self._waiting_since_ms is not None:
            self._waiting_since_ms = now_ms

    @property
    def due_ms(self) -> float | None:
        """Time at which the member leaves the chain unless it acknowledges; None: it does not."""
        if self._waiting_since_ms is None:
            return None
        return self._waiting_since_ms + self.chain.timeout_ms

    @property
    def _has_caught_up_with_head(self) -> bool:
        """Return whether everything that the head was sent was sent to this member as well."""
        head = self.chain.head
        return head is None or self._sender.sent_lsn >= head.sent_lsn

    def _fail(self, now_ms: float) -> None:
        if now_ms - self._entered_ms > self._penalty_ms:  # the last stay in the chain was long
            self._penalty_ms = 0.0
        at_first_ms = float(self.chain.timeout_ms * _PENALTY_TIMEOUTS)
        self._penalty_ms = min(max(2 * self._penalty_ms, at_first_ms), _PENALTY_MS_MAX)
        self._barred_until_ms = now_ms + self._penalty_ms
        address = self._sender.member.address
        log.info("safekeeper leaves the chain", address=address, barred_ms=self._penalty_ms)
        self.leave()


def _target(sender: Sender) -> RelayTarget:
    return RelayTarget(sender.member.id, sender.member.address)


class _Sent(NamedTuple):
    """An append that was not answered yet."""

    last_lsn: int
    size_bytes: int
    sent_ms: float


class SendWindow:
    """The records that were sent on one stream, and the bytes that are not acknowledged."""

    def __init__(self, last_lsn: int = 0) -> None:
        """Begin after record `last_lsn`, with nothing sent."""
        self.last_lsn = last_lsn  # the member needs nothing up to it: sent or acknowledged
        self.size_bytes = 0  # of records that are not acknowledged
        self.paused_until_ms = 0.0  # while the member is full; 0: not paused
        self._sent: deque[_Sent] = deque()

    @property
    def is_empty(self) -> bool:
        """Return whether everything sent is acknowledged."""
        return not self._sent

    def silent_ms(self, now_ms: float) -> float:
        """Age of the first append without an answer; 0 if there is none."""
        return now_ms - self._sent[0].sent_ms if self._sent else 0.0

    def send(self, records: Sequence[Record], now_ms: float) -> None:
        """Record that these records are sent now."""
        size_bytes = sum(len(record.payload) for record in records)
        self.last_lsn = records[-1].lsn
        self._sent.append(_Sent(self.last_lsn, size_bytes, now_ms))
        self.size_bytes += size_bytes

    def acknowledge(self, flushed_lsn: int, *, is_full: bool) -> None:
        """Record an answer: the member has everything up to `flushed_lsn`.

        If it is full, it has refused the first append behind that. Those behind a refused one are
        refused as well, and sent again later.
        """
        while self._sent and self._sent[0].last_lsn <= flushed_lsn:
            self.size_bytes -= self._sent.popleft().size_bytes
        if self._sent and is_full:  # the first append that was refused
            self.size_bytes -= self._sent.popleft().size_bytes
        self.last_lsn = max(self.last_lsn, flushed_lsn)
        if is_full and not self._sent:
            self.last_lsn = flushed_lsn


@dataclass(frozen=True, slots=True)
class QuorumContext:
    """The database, transport and settings with which the members of one log are reached."""

    links: Links
    place: DatabasePlace
    settings: QuorumSettings
    runtime: Runtime


class Peer:
    """A member, the stream to it, and how far it is."""

    def __init__(
        self, member: Member, ledger: Ledger, context: QuorumContext, chain: Chain
    ) -> None:
        """Begin unconnected; `run` connects."""
        self.member = member
        self.archived_wal_id: int | None = None  # as the member has seen
        self.is_full = False
        self.problem = "was not reached yet"  # why the member does not follow
        self._ledger = ledger
        self._context = context
        self._chain_position = ChainPosition(chain, self)
        self._link: Link | None = None  # the live stream, once the member follows
        self._disconnect_reason = ""  # why this side has ended the stream
        self._wake = asyncio.Event()
        self._window = SendWindow()  # of the last stream
        self._sent_commit = (0, b"")  # the commit point and the archiver that were sent last

    @property
    def is_joined(self) -> bool:
        """Return whether the member follows this writer, on a live stream."""
        return self._link is not None

    @property
    def sent_lsn(self) -> int:
        """The member needs nothing up to this record any more: it was sent or acknowledged."""
        return self._window.last_lsn

    @property
    def flushed_lsn(self) -> int:
        """The last record that the member has on disk, with all before it; 0: not known."""
        return self._ledger.leader.flushed.get(self.member.id, 0)

    async def run(self) -> None:
        """Follow the member until cancelled, or until the log has ended."""
        failures = 0
        clock, random = self._context.runtime.clock, self._context.runtime.random
        with self._ledger.broadcast.waking(self._wake):
            while self._ledger.failure is None:
                before = self.flushed_lsn
                problem = without_address(await self._follow(), self.member.address)
                if problem != self.problem:
                    log.warning("safekeeper lost", address=self.member.address, problem=problem)
                self.problem = problem
                failures = 1 if self.flushed_lsn > before else failures + 1
                await clock.sleep_ms(BACKOFF.wait_ms(failures, random))

    async def disconnect_if_silent(self, now_ms: float) -> None:
        """Close a stream without an answer for `REPLY_TIMEOUT_MS`; `run` opens another."""
        timeout_ms = REPLY_TIMEOUT_MS
        if self._link is not None and self._window.silent_ms(now_ms) > timeout_ms:
            self._disconnect_reason = f"left an append without an answer for {timeout_ms} ms"
            await self._link.close()

    async def _follow(self) -> str:
        """Follow the member on one stream. Returns why the stream has ended."""
        context = self._context
        link: Link | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1_000):
                link = await context.links.connect(self.member.address, context.place)
                problem = await self._join(link)
            return problem or await self._exchange(link)
        except TimeoutError:
            return f"did not answer within {CONNECT_TIMEOUT_MS} ms"
        except (LinkBroken, ShaleError) as error:
            return str(error)
        finally:
            self._link = None
            self._chain_position.leave()
            if link is not None:
                await link.close()

    async def _join(self, link: Link) -> str:
        """Make the member follow this writer. Returns why it does not; empty if it does."""
        ledger = self._ledger
        await link.send(Greet())
        greeting = await link.receive()
        if not isinstance(greeting, Greeting):
            return unexpected(greeting)
        if greeting.member_id != self.member.id:
            return "is another member by now: it has lost its disk, or was made anew"
        if ledger.refused(Refusal(greeting.promise, ""), self.member.address):
            return "follows another writer"
        await link.send(ledger.leader.elected(self.member.id))
        joined = await link.receive()
        if isinstance(joined, Refusal):
            ledger.refused(joined, self.member.address)
            return joined.problem
        if not isinstance(joined, Joined) or joined.ballot != ledger.ballot:
            return unexpected(joined)
        self._begin(link, joined.last_lsn)
        return ""

    def _begin(self, link: Link, last_lsn: int) -> None:
        self._link = link
        self._disconnect_reason = ""
        self._window = SendWindow(last_lsn)
        self._sent_commit = (0, b"")
        self.is_full = False
        if self.problem:
            log.info("safekeeper follows", address=self.member.address, lsn=last_lsn)
        self.problem = ""
        self._ledger.acknowledged(self.member.id, last_lsn)
        self._wake.set()

    async def _exchange(self, link: Link) -> str:
        """Send and receive until the stream or the log ends. Returns the reason."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(
                self._send(link), name=f"send to safekeeper {self.member.address}"
            )
            try:
                return await self._receive(link)
            except (LinkBroken, ShaleError) as error:
                return self._disconnect_reason or str(error)
            finally:
                sending.cancel()

    async def _send(self, link: Link) -> None:
        """Send everything new. Returns when the stream ends, which `_receive` notices as well."""
        try:
            while self._ledger.failure is None and self.sent_lsn >= self._ledger.held.base.lsn:
                self._wake.clear()
                message = self._next_append()
                if message is not None:
                    await link.send(message)
                else:
                    await self._wait()
        except LinkBroken:
            pass
        await link.close()

    async def _wait(self) -> None:
        """Wait until there is something new, or until a timeout.

        The timeout is that of a full member, which is then asked again, or that of the chain, in
        which a full member is not.
        """
        due_ms = self._window.paused_until_ms or self._chain_position.due_ms
        if due_ms is None:
            await self._wake.wait()
            return
        # At least `WAIT_MS_MIN`, else a rest left by rounding would be waited for in a loop.
        wait_ms = max(WAIT_MS_MIN, due_ms - self._context.runtime.clock.monotonic_ms())
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await self._wake.wait()
        except TimeoutError:
            self._window.paused_until_ms = 0.0

    def _next_append(self) -> Append | None:
        """The records and commit point that the member lacks; None: nothing to send for now."""
        ledger = self._ledger
        chain = self._chain_position.chain
        if chain.is_on:
            self._judge()
        records = (
            ledger.held.after(self.sent_lsn, self._sendable_bytes()) if self._may_send() else ()
        )
        commit_point = (ledger.committed_lsn, ledger.broadcast.archiver_id)
        if not records and not self._must_send(commit_point):
            return None
        self._sent_commit = commit_point
        if records:
            self._window.send(records, self._context.runtime.clock.monotonic_ms())
        return Append(
            ledger.ballot,
            records,
            *commit_point,
            self._chain_position.relays if records else (),
            self._commit_peers() if chain.is_broadcast else (),
        )

    def _judge(self) -> None:
        self._chain_position.judge(
            self._context.runtime.clock.monotonic_ms(),
            flushed_lsn=self.flushed_lsn,
            last_lsn=self._ledger.last_lsn,
            is_fit=not self.is_full,
        )

    def _commit_peers(self) -> tuple[RelayTarget, ...]:
        everyone = self._ledger.leader.configuration.everyone
        return tuple(RelayTarget(each.id, each.address) for each in everyone if each != self.member)

    def _must_send(self, commit_point: tuple[int, bytes]) -> bool:
        """Return whether to send this commit point and archiver although there is no record to
        send.
        """
        committed_lsn, archiver_id = self._sent_commit
        announced_lsn = self._ledger.broadcast.announced_lsn
        return committed_lsn < announced_lsn or archiver_id != commit_point[1]

    def _sendable_bytes(self) -> int:
        return min(self._free_bytes, APPEND_BYTES_MAX)

    @property
    def _free_bytes(self) -> int:
        return SEND_QUEUE_BYTES_MAX - self._window.size_bytes

    def _may_send(self) -> bool:
        if self._chain_position.is_relayed:
            return False
        if self._window.is_empty:  # at least one message, however large
            return not self._window.paused_until_ms
        return not self.is_full and self._free_bytes > 0

    async def _receive(self, link: Link) -> str:
        """Process replies. Returns why there are no more."""
        ledger = self._ledger
        while True:
            reply = await link.receive()
            match reply:
                case Appended() if reply.ballot == ledger.ballot and (
                    # In a chain, others may have passed it on.
                    not self._window.is_empty or self._chain_position.chain.is_on
                ):
                    self._appended(reply)
                case Archived() if reply.ballot == ledger.ballot:
                    self._archived(reply.wal_id)
                case Refusal():
                    ledger.refused(reply, self.member.address)
                    return reply.problem
                case _:
                    return unexpected(reply)

    def _appended(self, reply: Appended) -> None:
        self._window.acknowledge(reply.flushed_lsn, is_full=reply.is_full)
        self._chain_position.acknowledged(self._context.runtime.clock.monotonic_ms())
        if reply.archived_wal_id is not None:
            self._archived(reply.archived_wal_id)
        if reply.is_full and not self.is_full:
            log.warning("safekeeper is full", address=self.member.address)
        self.is_full = reply.is_full
        if self.is_full:
            now_ms = self._context.runtime.clock.monotonic_ms()
            self._window.paused_until_ms = now_ms + FULL_PAUSE_MS
        self._ledger.acknowledged(self.member.id, reply.flushed_lsn)
        self._wake.set()

    def _archived(self, wal_id: int) -> None:
        self.archived_wal_id = wal_id
        self._ledger.archived(wal_id)


def without_address(problem: str, address: str) -> str:
    """A problem without the address of its member, which some begin with."""
    return problem.removeprefix(f"{address}: ")


def unexpected(reply: ToProposer) -> str:
    """The problem of a member that has answered with a message that was not asked for."""
    return f"answered with {type(reply).__name__}, which nothing asks for"
