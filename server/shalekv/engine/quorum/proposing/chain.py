"""Members that pass records on to each other, so that the writer sends each record once.

The writer sends to the first of the chain, and names the others in each append (seed 001,
"Optimizations"). Acknowledgements come from each of them directly, so a chain is no matter of
safety. It is none of availability either: whoever acknowledges nothing for a time although there is
something leaves the chain, and is sent everything directly, until it may try again.

    enter   when it was sent all that the first was sent: what follows comes by the chain
    leave   when the stream to it ends, when it has no room, or when nothing comes of it
"""

from __future__ import annotations

from typing import Protocol

import structlog

from shalekv.core.quorum.messages import RelayTarget
from shalekv.protocol.membership import Member
from shalekv.settings import QuorumSettings, SafekeeperTransport

log = structlog.get_logger()

_PENALTY_TIMEOUTS = 10  # it stays out of the chain for so many timeouts, twice as many each time
_PENALTY_MS_MAX = 300_000.0


class Sender(Protocol):
    """Who sends records to one member."""

    @property
    def member(self) -> Member:
        """To whom."""
        ...

    @property
    def sent_lsn(self) -> int:
        """It needs nothing up to here any more: it was sent, or acknowledged."""
        ...


class Chain:
    """Who stands in it, the first of them at the head."""

    def __init__(self, settings: QuorumSettings) -> None:
        """Nobody does."""
        self.is_on = settings.safekeeper_transport is SafekeeperTransport.CHAIN
        self.is_broadcast = settings.commit_broadcast
        self.timeout_ms = settings.chain_timeout_ms
        self.senders: list[Sender] = []

    @property
    def head(self) -> Sender | None:
        """Who is sent records from here."""
        return self.senders[0] if self.senders else None


class Station:
    """The place of one member: at the head of the chain, further down, or beside it."""

    def __init__(self, chain: Chain, sender: Sender) -> None:
        """Beside it."""
        self._chain = chain
        self._sender = sender
        self._waiting_since_ms: float | None = None  # for an acknowledgement
        self._entered_ms = 0.0
        self._barred_until_ms = 0.0
        self._penalty_ms = 0.0

    @property
    def is_relayed(self) -> bool:
        """Whether another member passes records on to this one."""
        return self._sender in self._chain.senders[1:]

    @property
    def relays(self) -> tuple[RelayTarget, ...]:
        """The members that records go on to from this one."""
        if self._chain.head is not self._sender:
            return ()
        return tuple(_target(each) for each in self._chain.senders[1:])

    def leave(self) -> None:
        """Stand beside the chain from now on."""
        self._waiting_since_ms = None
        if self._sender in self._chain.senders:
            self._chain.senders.remove(self._sender)

    def judge(self, now_ms: float, *, flushed_lsn: int, last_lsn: int, is_fit: bool) -> None:
        """Enter if that may be, leave if it has to be. The log ends with `last_lsn`."""
        if not self._chain.is_on:
            return
        if self._sender not in self._chain.senders:
            if is_fit and now_ms >= self._barred_until_ms and self._is_beside_the_head:
                self._chain.senders.append(self._sender)
                self._entered_ms = now_ms
            else:
                return
        if not is_fit:
            self.leave()
        elif flushed_lsn >= last_lsn:
            self._waiting_since_ms = None
        elif self._waiting_since_ms is None:
            self._waiting_since_ms = now_ms
        elif now_ms >= self._waiting_since_ms + self._chain.timeout_ms:
            self._fail(now_ms)

    def acknowledged(self, now_ms: float) -> None:
        """Something has come."""
        if self._waiting_since_ms is not None:
            self._waiting_since_ms = now_ms

    @property
    def due_ms(self) -> float | None:
        """When it leaves the chain, unless something comes before; None: it does not."""
        if self._waiting_since_ms is None:
            return None
        return self._waiting_since_ms + self._chain.timeout_ms

    @property
    def _is_beside_the_head(self) -> bool:
        """Whether everything that the head was sent came here as well, or does directly."""
        head = self._chain.head
        return head is None or self._sender.sent_lsn >= head.sent_lsn

    def _fail(self, now_ms: float) -> None:
        if now_ms - self._entered_ms > self._penalty_ms:  # it has gone well since the last time
            self._penalty_ms = 0.0
        at_first_ms = float(self._chain.timeout_ms * _PENALTY_TIMEOUTS)
        self._penalty_ms = min(max(2 * self._penalty_ms, at_first_ms), _PENALTY_MS_MAX)
        self._barred_until_ms = now_ms + self._penalty_ms
        address = self._sender.member.address
        log.info("safekeeper leaves the chain", address=address, barred_ms=self._penalty_ms)
        self.leave()


def _target(sender: Sender) -> RelayTarget:
    return RelayTarget(sender.member.id, sender.member.address)
