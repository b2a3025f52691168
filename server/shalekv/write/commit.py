"""Commits and groups of commits: what travels through the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from shalekv.errors import OutcomeUnknown, ShaleError
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_record,
    load_entry,
    record_key,
)
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.transaction import (
    RESULT_FRAME_BYTES,
    Change,
    DatabaseState,
    Decision,
    Read,
    Transaction,
)
from shalekv.read.read_set import NOTHING_BELOW, ReadSet
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES, MemoryRun

# What a commit takes beside its entries until it is durable, measured: itself, the reply that is
# waited for, and what completes it.
COMMIT_OVERHEAD_BYTES = 1_200
RECORD_BYTES = ENTRY_OVERHEAD_BYTES + 128  # of an idempotency key, its record, an ordinary reply
_KEY = itemgetter(0)  # of an Entry
_new = tuple.__new__  # what `Entry()` calls in the end, at half the cost


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a commit that was not refused; all that it rests on is durable.

    Without a change it holds the view that it was decided by.
    """

    seq: int
    wal_id: int | None
    decision: Decision | None = None  # of a transaction
    record: Entry | None = None  # that was written for its idempotency key


def outcome_unknown(who: str) -> OutcomeUnknown:
    """What is told of a commit that was sent to `who`, and of which nobody knows more."""
    return OutcomeUnknown(
        f"the writer stopped while {who} had not answered: the write may be applied or not. Read "
        "the key to find out, or write it again"
    )


Settled: TypeAlias = Callable[[Receipt | ShaleError], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """That a commit answers the request with this idempotency key (I15)."""

    key: bytes
    request_hash: bytes
    expire_at_ms: int  # logical time
    reply_kind: ReplyKind
    reply: Callable[[Decision | None], bytes]  # as a repeat will get it, without a header

    def record(self, seq: int, wal_id: int, decision: Decision | None) -> Entry:
        """What stands beside the changes in their WAL object."""
        record = IdempotencyRecord(self.request_hash, wal_id, self.reply_kind, self.reply(decision))
        return Entry(record_key(self.key), seq, Kind.PUT, encode_record(record), self.expire_at_ms)


class Commit:
    """Changes that become durable together, under one sequence number.

    The sequence number may be raised while the commit is not durable, when another writer's fence
    took the slot that it was meant for. Its place among all commits of this writer stays. What a
    transaction does is decided again then.
    """

    __slots__ = (
        "below",
        "claim",
        "decision",
        "entries",
        "load",
        "place",
        "range_tombstones",
        "record",
        "seq",
        "settle",
        "size_bytes",
        "transaction",
    )

    def __init__(
        self,
        changes: Iterable[Change],
        seq: int,
        settle: Settled,
        *,
        claim: Claim | None = None,
    ) -> None:
        """REQUIRES: each key stands once in `changes`.

        `settle` is called exactly once, from within the log: it must neither raise nor write.
        """
        self.seq = seq
        self.place = seq
        self.settle = settle
        self.claim = claim
        self.record: Entry | None = None
        self.load: PendingLoad | None = None
        self.transaction: Transaction | None = None
        self.decision: Decision | None = None
        self.below = NOTHING_BELOW
        self.range_tombstones: Sequence[Entry] = ()
        self.entries = self._entries(changes)
        self.size_bytes = changes_bytes(self.entries) + _record_bytes(claim)

    @classmethod
    def of(
        cls,
        transaction: Transaction,
        seq: int,
        settle: Settled,
        *,
        size_bytes: int,
        below: ReadSet = NOTHING_BELOW,
        claim: Claim | None = None,
    ) -> Commit:
        """A commit that does what `transaction` decides, which takes `size_bytes` at most.

        `below` is what the levels say of its needs. REQUIRES: `decide` is called before anything
        else.
        """
        commit = cls((), seq, settle, claim=claim)
        commit.below = below
        commit.transaction = transaction
        commit.size_bytes = size_bytes + _record_bytes(claim)
        return commit

    @classmethod
    def of_load(
        cls,
        load: PendingLoad,
        seq: int,
        settle: Settled,
        *,
        size_bytes: int,
        claim: Claim | None = None,
    ) -> Commit:
        """A commit of ready-made SSTs, for which `size_bytes` were admitted."""
        commit = cls((), seq, settle, claim=claim)
        commit.load = load
        commit.size_bytes = size_bytes + _record_bytes(claim)
        return commit

    @property
    def writes(self) -> bool:
        """Whether there is anything to make durable."""
        return bool(self.entries or self.range_tombstones or self.load)

    @property
    def rests_on_state(self) -> bool:
        """Whether all before it must be durable before it is uploaded."""
        if self.load is not None:  # so that it divides the log into what is older and newer
            return True
        return self.transaction is not None and self.transaction.rests_on_state

    def decide(self, state: DatabaseState) -> None:
        """Let the transaction decide, if there is one, what is changed in `state`."""
        if self.transaction is None:
            return
        self.decision = self.transaction.decide(state)
        self.entries = self._entries(self.decision.changes)
        self.range_tombstones = [
            Entry(start, self.seq, Kind.RANGE_TOMBSTONE, end)
            for start, end in self.decision.deleted
        ]

    def account_reply(self) -> int:
        """Count what it has read, which is written with its record; how many bytes that is.

        REQUIRES: called once, after the first `decide`.
        """
        if self.claim is None or self.decision is None or not self.decision.writes:
            return 0
        found = [each.entry for each in self.decision.results if isinstance(each, Read)]
        read_bytes = sum([RESULT_FRAME_BYTES + len(entry.value) for entry in found if entry])
        self.size_bytes += read_bytes
        return read_bytes

    def resequence(self, seq: int) -> None:
        """Move the commit behind everything that has a lower number; it has no slot any more."""
        self.seq = seq
        self.record = None  # of a slot that it did not get
        self.entries = [entry._replace(seq=seq) for entry in self.entries]
        self.range_tombstones = [entry._replace(seq=seq) for entry in self.range_tombstones]

    def take_slot(self, wal_id: int) -> None:
        """Its WAL object is known: so is what is remembered of it."""
        if self.claim is not None and self.writes:
            self.record = self.claim.record(self.seq, wal_id, self.decision)

    def succeed(self, *, seq: int, wal_id: int | None) -> None:
        """Tell that all that it did, or rested on, is durable."""
        refusal = None if self.decision is None else self.decision.refusal
        receipt = Receipt(seq, wal_id, self.decision, self.record)
        self.end(receipt if refusal is None else refusal)

    def end(self, outcome: Receipt | ShaleError) -> None:
        """Tell what became of it.

        It is never decided again, so what it knows of the levels is let go at once: who waits for
        it to be forgotten (see `Base`) must not depend on when garbage is collected. So is whoever
        is told, since that is what refers to the commit (see `Pending`).
        """
        self.below = NOTHING_BELOW
        settle, self.settle = self.settle, _is_told
        settle(outcome)

    def _entries(self, changes: Iterable[Change]) -> list[Entry]:
        seq = self.seq
        return [
            _new(Entry, (key, seq, kind, value, expire_at_ms))
            for key, kind, value, expire_at_ms in changes
        ]


def _is_told(_outcome: Receipt | ShaleError) -> None:
    """A commit that has come to its end tells nobody any more."""


def changes_bytes(changes: Sequence[Change] | Sequence[Entry]) -> int:
    """The memory that a commit with these changes is accounted with until it is durable, bytes."""
    keys_bytes = sum([len(change.key) for change in changes])
    values_bytes = sum([len(change.value) for change in changes])
    return COMMIT_OVERHEAD_BYTES + keys_bytes + values_bytes + ENTRY_OVERHEAD_BYTES * len(changes)


def _record_bytes(claim: Claim | None) -> int:
    return 0 if claim is None else RECORD_BYTES


class WalContents(NamedTuple):
    """What a WAL object holds, each part in the order of an SST."""

    points: Sequence[Entry] = ()
    range_tombstones: Sequence[Entry] = ()
    records: Sequence[Entry] = ()
    control: Sequence[Entry] = ()


class Group:
    """The commits that go into the log together: a WAL object, or a part of one."""

    __slots__ = ("commits", "landed", "load", "max_seq", "position", "run", "size_bytes", "wal_id")

    def __init__(
        self, wal_id: int, commits: Sequence[Commit], *, position: int | None = None
    ) -> None:
        """`position` is its place among all groups; None: it is alone in its object.

        REQUIRES: `commits` in the order of their sequence numbers, one of them writes.
        """
        self.wal_id = wal_id
        self.position = wal_id if position is None else position
        self.commits = commits
        self.size_bytes = sum(commit.size_bytes for commit in commits)
        # What writes nothing has a number, too, but no reader of the WAL would ever see it.
        self.max_seq = next(commit.seq for commit in reversed(commits) if commit.writes)
        newest = {entry.key: entry for commit in commits for entry in commit.entries}
        tombstones = [entry for commit in commits for entry in commit.range_tombstones]
        self.run = MemoryRun.from_newest(newest, max_seq=self.max_seq, range_tombstones=tombstones)
        for commit in commits:
            commit.take_slot(wal_id)
        self.load = self._load()
        self.landed: bool | None = None  # None: not known yet

    def contents(self) -> WalContents:
        """All versions, by key and then newest first."""
        tombstones = sorted(self.run.range_tombstones, key=lambda entry: (entry.key, -entry.seq))
        written = [commit.record for commit in self.commits if commit.record is not None]
        records = sorted(written, key=lambda entry: (entry.key, -entry.seq))
        control = [load_entry(each.load, each.seq) for each in self.commits if each.load]
        return WalContents(self._points(), tombstones, records, control)

    def _load(self) -> CommittedLoad | None:
        """The load that it commits, which is then its only commit."""
        commit = self.commits[0]
        if commit.load is None:
            return None
        return CommittedLoad(commit.load.load_id, commit.load.ssts, commit.seq, self.wal_id)

    def _points(self) -> Sequence[Entry]:
        entries = [entry for commit in reversed(self.commits) for entry in commit.entries]
        if len(entries) == len(self.run.entries):  # no key stands here twice
            return self.run.entries
        entries.sort(key=_KEY)  # stable: versions of one key stay newest first
        return entries
