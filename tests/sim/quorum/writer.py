"""A simulated writer: the shipped candidacy and leader, and the routing of their messages.

It acts only on a message, or on a public call of the schedule. It sends by putting messages on
streams. The order is that of `server/docs/safekeepers.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shalekv.errors import LogBehindArchive
from shalekv.format.wal_record import make_record
from shalekv.protocol import membership
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum import proposer
from shalekv.protocol.quorum.proposer import Candidacy, Leader, epoch_to_claim
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Ballot,
    Greet,
    Greeting,
    Joined,
    LogEnd,
    LogShape,
    Record,
    Refusal,
    ToAcceptor,
    ToProposer,
    Vote,
    VoteRequest,
)
from tests.sim.quorum.judge import Judge, Violation

# Records that a fetch finds in the log of a member; None: it does not answer.
Fetch = Callable[[Member], Sequence[Record] | None]


@dataclass(slots=True, eq=False)
class Stream:
    """One connection to a member: what is on its way, in order in each direction."""

    writer: Writer
    member: Member
    number: int | None = None  # at the member; None: it has not arrived there yet
    is_open: bool = True  # at this side; the other one may not know yet
    has_answered: bool = False
    is_joined: bool = False
    sent_lsn: int = 0
    there: deque[ToAcceptor] = field(default_factory=deque)
    back: deque[ToProposer] = field(default_factory=deque)

    def send(self, message: ToAcceptor) -> None:
        self.there.append(message)


class Writer:
    """One process that wants to be, or is, the writer."""

    def __init__(
        self, name: str, nonce: bytes, manifest: Manifest, judge: Judge, count_max: int = 1_000
    ) -> None:
        """It has read the manifest, and claimed nothing. It sends `count_max` records at a time."""
        self.count_max = count_max
        self.name = name
        self.nonce = nonce
        self.judge = judge
        self.configuration = Configuration.of(manifest)
        self.ballot: Ballot | None = None
        self.candidacy: Candidacy | None = None
        self.leader: Leader | None = None
        self.ended = ""  # why
        self.streams: list[Stream] = []
        self.greetings: dict[bytes, Greeting] = {}
        self.records: dict[int, Record] = {}
        self.slot = 0  # in the WAL of the object store, for scenarios
        self._reported_lsn = 0  # commits up to here were reported to the judge

    @property
    def is_live(self) -> bool:
        return not self.ended

    @property
    def own(self) -> WriterId:
        """Its name. REQUIRES: it has claimed an epoch."""
        assert self.ballot is not None
        return WriterId(*self.ballot)

    def stream_to(self, member_id: bytes) -> Stream | None:
        found = (s for s in reversed(self.streams) if s.member.id == member_id and s.is_open)
        return next(found, None)

    def connect(self, member: Member) -> Stream:
        """Open a stream; one that there is, is given up."""
        before = self.stream_to(member.id)
        if before is not None:
            before.is_open = False
        stream = Stream(self, member)
        self.streams.append(stream)
        stream.send(Greet())
        return stream

    # The opening.

    @property
    def may_claim(self) -> bool:
        return self.ballot is None and self.configuration.is_majority(self.greetings.keys())

    def epoch_to_claim(self, manifest: Manifest) -> int:
        return epoch_to_claim(manifest.writer_epoch, self.greetings.values())

    def claimed(self, epoch: int, manifest: Manifest) -> None:
        """Record the claim as successful; ask all that have greeted for their votes."""
        self.ballot = Ballot(epoch, self.nonce)
        self.configuration = Configuration.of(manifest)
        self.candidacy = Candidacy(self.ballot, self.configuration)
        for stream in self.streams:
            if stream.is_open and stream.has_answered:
                self._go_on(stream)

    @property
    def has_won(self) -> bool:
        return self.leader is None and self.candidacy is not None and self.candidacy.is_won

    def lead(self, fetch: Fetch, *, archive_tip: int | None) -> None:
        """Take the log of the highest rank, and begin an epoch of its own with a fence."""
        candidacy = self.candidacy
        assert candidacy is not None
        log = candidacy.donor_log
        try:
            wal_id = proposer.next_object(log.last, archive_tip=archive_tip, last_compacted=None)
        except LogBehindArchive as error:
            self.ended = f"LogBehindArchive: {error}"
            self.judge.refused(self.name, candidacy.ballot, archive_tip, error)
            return
        self.judge.elected(candidacy.ballot, log)
        found = self._fetched(log, fetch)
        if found is None:
            self.ended = "the donor has gone"
            return
        self.records = {record.lsn: record for record in found}
        self.leader = Leader.of(candidacy)
        self._reported_lsn = log.base.lsn
        self.append(wal_id, b"fence", ends_object=True)
        for stream in self.streams:
            if stream.is_open and stream.has_answered:
                self._go_on(stream)

    def _fetched(self, log: LogShape, fetch: Fetch) -> Sequence[Record] | None:
        """The records of the log, as the members that voted with it have them."""
        assert self.candidacy is not None
        for member in self.configuration.everyone:
            vote = self.candidacy.votes.get(member.id)
            if vote is None or vote.log.last.rank != log.last.rank:
                continue
            found = fetch(member)
            kept = [each for each in found or () if log.base.lsn < each.lsn <= log.last.lsn]
            marks = [log.base, *(record.mark for record in kept)]
            if marks[-1] == log.last and len(kept) == log.last.lsn - log.base.lsn:
                return kept
        return None

    # Leading.

    @property
    def log(self) -> LogShape:
        assert self.leader is not None
        return self.leader.log

    def append(self, wal_id: int, payload: bytes, *, ends_object: bool) -> Record:
        """Make a record, without sending it yet: see `send`."""
        assert self.leader is not None
        record = make_record(
            self.log.last,
            epoch=self.leader.ballot.epoch,
            wal_id=wal_id,
            ends_object=ends_object,
            payload=payload,
        )
        self.leader = self.leader.appended(record)
        self.records[record.lsn] = record
        return record

    def send(self, stream: Stream) -> None:
        """Send a member that follows what it was not sent yet, and the commit point."""
        assert self.leader is not None
        first, last = stream.sent_lsn + 1, min(self.log.last.lsn, stream.sent_lsn + self.count_max)
        if not stream.is_joined or first <= self.log.base.lsn:
            return
        records = tuple(self.records[lsn] for lsn in range(first, last + 1))
        stream.sent_lsn = last
        stream.send(Append(self.leader.ballot, records, self.leader.committed_lsn))

    def tell_commit(self, stream: Stream) -> None:
        """Send the commit point alone, even to one that does not follow yet."""
        assert self.leader is not None
        stream.send(Append(self.leader.ballot, (), self.leader.committed_lsn))

    def trim(self, base: LogEnd) -> None:
        """Drop records that are in the archive."""
        assert self.leader is not None
        self.leader = self.leader.trimmed(base)
        self.records = {n: each for n, each in self.records.items() if n > self.log.base.lsn}

    def reconfigure(self, manifest: Manifest) -> None:
        """Follow the manifest, if it is still its own."""
        if self.leader is None or self.ballot is None:
            return
        if (manifest.writer_epoch, manifest.writer_nonce) != self.ballot:
            if manifest.writer_epoch > self.ballot.epoch:
                self.ended = "the manifest names another writer"
            return
        self.configuration = Configuration.of(manifest)
        self._moved(self.leader.reconfigured(self.configuration))

    def finish_change(self, manifest: Manifest) -> Manifest:
        """The second edit of a change. Raises what `membership.finish_change` does."""
        generation = self.configuration.generation
        return membership.finish_change(manifest, own=self.own, generation=generation)

    # Replies of members.

    def receive(self, stream: Stream, message: ToProposer) -> None:
        """Take an answer. What comes on a stream that was given up counts no more."""
        if not stream.is_open or not self.is_live:
            return
        stream.has_answered = True
        match message:
            case Greeting():
                self.greetings[stream.member.id] = message
                self._go_on(stream)
            case Vote():
                self._voted(stream, message)
            case Joined() if message.ballot == self.ballot:
                stream.is_joined = True
                stream.sent_lsn = message.last_lsn
                self._acknowledged(stream, message.last_lsn)
                self.send(stream)
            case Appended() if message.ballot == self.ballot:
                self._acknowledged(stream, message.flushed_lsn)
                if message.is_full:
                    stream.sent_lsn = message.flushed_lsn
            case Refusal():
                self._refused(stream, message)
            case _:
                pass

    def _go_on(self, stream: Stream) -> None:
        if self.leader is not None:
            stream.send(self.leader.elected(stream.member.id))
        elif self.ballot is not None:
            stream.send(VoteRequest(stream.member.id, self.ballot))

    def _voted(self, stream: Stream, vote: Vote) -> None:
        if self.leader is not None:
            if not stream.is_joined:
                self._go_on(stream)
        elif self.candidacy is not None:
            self.candidacy = self.candidacy.voted(stream.member.id, vote)

    def _acknowledged(self, stream: Stream, lsn: int) -> None:
        assert self.leader is not None
        self._moved(self.leader.acknowledged(stream.member.id, lsn))

    def _moved(self, leader: Leader) -> None:
        before, self.leader = self.leader, leader
        assert before is not None
        if leader.committed_lsn < before.committed_lsn:
            raise Violation(f"I5: the commit point of {self.name} goes back")
        if leader.committed_lsn > self._reported_lsn:
            first = max(self._reported_lsn, self.log.base.lsn) + 1
            lsns = range(first, leader.committed_lsn + 1)
            self.judge.acknowledged(leader.ballot, [self.records[lsn] for lsn in lsns])
            self._reported_lsn = leader.committed_lsn

    def _refused(self, stream: Stream, refusal: Refusal) -> None:
        stream.is_open = False
        if self.ballot is None or refusal.promise == self.ballot:
            return
        if refusal.promise.epoch >= self.ballot.epoch:
            self.ended = refusal.problem
