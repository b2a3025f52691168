"""Commits and groups of commits: the values that pass through the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from shalekv.errors import OutcomeUnknown, ShaleError
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
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
    Puts,
    Read,
    Transaction,
)
from shalekv.read.read_set import EMPTY_READ_SET, ReadSet
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES, MemoryRun
from shalekv.telemetry.activity import CommitActivity, SentCounts

# Memory of a commit beside its entries until it is durable, measured: the commit, the pending
# reply, and the callback that completes it.
COMMIT_OVERHEAD_BYTES = 1_200
RECORD_BYTES = ENTRY_OVERHEAD_BYTES + 128  # an idempotency key, its record and an ordinary reply
_KEY = itemgetter(0)  # of an Entry
_PUT = Kind.PUT
_new = tuple.__new__  # what `Entry()` and `Receipt()` call in the end, at half the cost


class GroupCharge(NamedTuple):
    """Requests of a group of commits. One of its commits gets them, so sums are exact."""

    sent: SentCounts
    key: bytes  # the first one of the commit; empty: it is a load
    commit_count: int  # of the group


class Receipt(NamedTuple):
    """The outcome of a commit that was not refused; everything that it depends on is durable.

    For a commit without changes, `seq` and `wal_id` are those of the view that decided it.
    """

    seq: int
    wal_id: int | None
    decision: Decision | None = None  # of a transaction
    record: Entry | None = None  # the record that was written for its idempotency key
    activity: CommitActivity | None = None  # of its group; None: it was in none
    bill: GroupCharge | None = None  # of its group, if this commit was chosen to be charged with it


OnSettled: TypeAlias = Callable[[Receipt | ShaleError], None]


def outcome_unknown(who: str) -> OutcomeUnknown:
    """Build the error of a commit that was sent to `who` and whose outcome is unknown."""
    return OutcomeUnknown(
        f"the writer stopped while {who} had not answered: the write may be applied or not. Read "
        "the key to find out, or write it again"
    )


class KeyedRequest(NamedTuple):
    """A request with an idempotency key, and what its record will contain (I15)."""

    key: bytes
    request_hash: bytes
    expire_at_ms: int  # logical time
    reply_kind: ReplyKind
    reply: Callable[[Decision | None], bytes]  # the reply to a retry, without a header

    def record(self, seq: int, wal_id: int, decision: Decision | None) -> Entry:
        """Build the idempotency record, which is written to the WAL object of the changes."""
        key, request_hash, expire_at_ms, reply_kind, reply = self
        record = IdempotencyRecord(request_hash, wal_id, reply_kind, reply(decision))
        value = encode_idempotency_record(record)
        return _new(Entry, (record_key(key), seq, _PUT, value, expire_at_ms))


class Commit:
    """Changes that become durable together, under one sequence number.

    The sequence number may be raised while the commit is not durable, when another writer's fence
    took the slot that it was meant for; a transaction is decided again then. `submit_order`, its
    order among all commits of this writer, stays.
    """

    __slots__ = (
        "decision",
        "entries",
        "keyed",
        "load",
        "range_tombstones",
        "read_set",
        "record",
        "seq",
        "settle",
        "size_bytes",
        "submit_order",
        "transaction",
    )

    def __init__(
        self,
        changes: Sequence[Change] | Puts,
        seq: int,
        settle: OnSettled,
        *,
        size_bytes: int | None = None,
        keyed: KeyedRequest | None = None,
    ) -> None:
        """REQUIRES: no key occurs twice in `changes`, which take `size_bytes`, if given.

        `settle` is called exactly once, from within the log: it must neither raise nor write.
        """
        self.seq = seq
        self.submit_order = seq
        self.settle = settle
        self.keyed = keyed
        self.record: Entry | None = None
        self.load: PendingLoad | None = None
        self.transaction: Transaction | None = None
        self.decision: Decision | None = None
        self.read_set = EMPTY_READ_SET
        self.range_tombstones: Sequence[Entry] = ()
        self.entries = self._entries(changes)
        if size_bytes is None:
            size_bytes = changes_bytes(self.entries)
        self.size_bytes = size_bytes if keyed is None else size_bytes + RECORD_BYTES

    @classmethod
    def of(
        cls,
        transaction: Transaction,
        seq: int,
        settle: OnSettled,
        *,
        size_bytes: int,
        read_set: ReadSet = EMPTY_READ_SET,
        keyed: KeyedRequest | None = None,
    ) -> Commit:
        """Build a commit of the changes that `transaction` decides on, of at most `size_bytes`.

        `read_set` answers its needs from the levels. REQUIRES: `decide` is called before anything
        else.
        """
        commit = cls((), seq, settle, keyed=keyed)
        commit.read_set = read_set
        commit.transaction = transaction
        commit.size_bytes = size_bytes + _record_bytes(keyed)
        return commit

    @classmethod
    def of_load(
        cls,
        load: PendingLoad,
        seq: int,
        settle: OnSettled,
        *,
        size_bytes: int,
        keyed: KeyedRequest | None = None,
    ) -> Commit:
        """Build a commit of ready-made SSTs, for which `size_bytes` were admitted."""
        commit = cls((), seq, settle, keyed=keyed)
        commit.load = load
        commit.size_bytes = size_bytes + _record_bytes(keyed)
        return commit

    @property
    def writes(self) -> bool:
        """Return whether there is anything to make durable."""
        return bool(self.entries or self.range_tombstones or self.load is not None)

    @property
    def entries_bytes(self) -> int | None:
        """Memory of the entries, as `sorted_runs.entries_bytes`; None: `size_bytes` is a bound."""
        if self.transaction is not None or self.load is not None:
            return None
        return self.size_bytes - COMMIT_OVERHEAD_BYTES - _record_bytes(self.keyed)

    @property
    def depends_on_state(self) -> bool:
        """Return whether all commits before it must be durable before it is uploaded."""
        if self.load is not None:  # it divides the log into older and newer commits
            return True
        return self.transaction is not None and self.transaction.depends_on_state

    def decide(self, state: DatabaseState) -> None:
        """Decide the transaction, if there is one, by `state`, and take over its changes."""
        if self.transaction is None:
            return
        self.decision = self.transaction.decide(state)
        self.entries = self._entries(self.decision.changes)
        self.range_tombstones = [
            Entry(start, self.seq, Kind.RANGE_TOMBSTONE, end)
            for start, end in self.decision.deleted
        ]

    def account_found(self) -> int:
        """Account for the values that the transaction has found, and return their size in bytes.

        Those that it touches are written again; those that it reads are written with its
        idempotency record. REQUIRES: called once, after the first `decide`.
        """
        if self.decision is None or not self.decision.writes:
            return 0
        found_bytes = self.decision.touched_bytes
        if self.keyed is not None:
            read = [each.entry for each in self.decision.results if isinstance(each, Read)]
            found_bytes += sum([RESULT_FRAME_BYTES + len(entry.value) for entry in read if entry])
        self.size_bytes += found_bytes
        return found_bytes

    def resequence(self, seq: int) -> None:
        """Renumber the commit when it has lost its slot."""
        self.seq = seq
        self.record = None  # it names the slot that was lost
        self.entries = [entry._replace(seq=seq) for entry in self.entries]
        self.range_tombstones = [entry._replace(seq=seq) for entry in self.range_tombstones]

    def take_slot(self, wal_id: int) -> None:
        """Build the idempotency record, which contains the number of the WAL object."""
        if self.keyed is not None and self.writes:
            self.record = self.keyed.record(self.seq, wal_id, self.decision)

    def succeed(
        self,
        seq: int,
        wal_id: int | None,
        activity: CommitActivity | None = None,
        bill: GroupCharge | None = None,
    ) -> None:
        """Settle the commit: everything that it wrote, or depends on, is durable."""
        decision = self.decision
        if decision is not None and decision.refusal is not None:
            self.end(decision.refusal)
        else:
            self.end(_new(Receipt, (seq, wal_id, decision, self.record, activity, bill)))

    def end(self, outcome: Receipt | ShaleError) -> None:
        """Settle the commit with its outcome.

        It is never decided again, so its read set is released at once: memory keeps entries as long
        as its version token is held, which must not depend on when garbage is collected. The
        callback is released as well, since it refers to the commit (see `RequestInFlight`).
        """
        settle = self.settle
        self.read_set, self.settle = EMPTY_READ_SET, _ignore
        settle(outcome)

    def _entries(self, changes: Sequence[Change] | Puts) -> list[Entry]:
        seq = self.seq
        if isinstance(changes, Puts):
            return changes.entries(seq)
        if len(changes) == 1:
            ((key, kind, value, expire_at_ms),) = changes
            return [_new(Entry, (key, seq, kind, value, expire_at_ms))]
        return [
            _new(Entry, (key, seq, kind, value, expire_at_ms))
            for key, kind, value, expire_at_ms in changes
        ]


def _ignore(_outcome: Receipt | ShaleError) -> None:
    """Ignore the outcome of a commit that is settled already."""


def changes_bytes(changes: Puts | Sequence[Change] | Sequence[Entry]) -> int:
    """Accounted memory of a commit with these changes until it is durable, bytes."""
    size_bytes = COMMIT_OVERHEAD_BYTES + ENTRY_OVERHEAD_BYTES * len(changes)
    if isinstance(changes, Puts):
        return size_bytes + changes.payload_bytes
    for change in changes:
        size_bytes += len(change.key) + len(change.value)
    return size_bytes


def _record_bytes(keyed: KeyedRequest | None) -> int:
    return 0 if keyed is None else RECORD_BYTES


class WalContents(NamedTuple):
    """The entries of a WAL object, each part in the order of an SST."""

    points: Sequence[Entry] = ()
    range_tombstones: Sequence[Entry] = ()
    records: Sequence[Entry] = ()
    control: Sequence[Entry] = ()


class Group:
    """Commits that enter the log together, as a WAL object or a part of one."""

    __slots__ = (
        "activity",
        "commits",
        "is_acknowledged",
        "load",
        "max_seq",
        "position",
        "run",
        "size_bytes",
        "wal_id",
    )

    activity: CommitActivity  # set by `LogStats.begin`

    def __init__(
        self, wal_id: int, commits: Sequence[Commit], *, position: int | None = None
    ) -> None:
        """`position` is how many groups were taken before; None: one for each object before.

        REQUIRES: `commits` are in the order of their sequence numbers, and at least one writes.
        """
        self.wal_id = wal_id
        self.position = wal_id if position is None else position
        self.commits = commits
        self.is_acknowledged = False
        self.size_bytes = sum([commit.size_bytes for commit in commits])
        # A commit that writes nothing has a number, too, but no reader of the WAL ever sees it.
        self.max_seq = next(commit.seq for commit in reversed(commits) if commit.writes)
        newest: dict[bytes, Entry] = {}
        for commit in commits:
            newest.update(zip(map(_KEY, commit.entries), commit.entries, strict=True))
        self.run = MemoryRun.from_newest(
            newest,
            max_seq=self.max_seq,
            range_tombstones=[entry for commit in commits for entry in commit.range_tombstones],
            size_bytes=self._entries_bytes(len(newest)),
        )
        for commit in commits:
            if commit.keyed is not None:
                commit.take_slot(wal_id)
        self.load = self._load()

    def contents(self) -> WalContents:
        """All versions, by key and then newest first."""
        tombstones = sorted(self.run.range_tombstones, key=lambda entry: (entry.key, -entry.seq))
        newest_first = reversed(self.commits)
        records = [commit.record for commit in newest_first if commit.record is not None]
        records.sort(key=_KEY)  # stable, as in `_points`
        control = [load_entry(each.load, each.seq) for each in self.commits if each.load]
        return WalContents(self._points(), tombstones, records, control)

    def _entries_bytes(self, key_count: int) -> int | None:
        """Accounted memory of the newest entries; None: the commits do not tell it."""
        if key_count != sum([len(commit.entries) for commit in self.commits]):
            return None  # a key occurs twice
        sizes = [commit.entries_bytes for commit in self.commits]
        return None if None in sizes else sum(map(int, filter(None, sizes)))

    def _load(self) -> CommittedLoad | None:
        """The load that the group commits, which is then its only commit."""
        commit = self.commits[0]
        if commit.load is None:
            return None
        return CommittedLoad(commit.load.load_id, commit.load.ssts, commit.seq, self.wal_id)

    def _points(self) -> Sequence[Entry]:
        if len(self.run.entries) == sum([len(commit.entries) for commit in self.commits]):
            return self.run.entries  # no key occurs twice
        entries = [entry for commit in reversed(self.commits) for entry in commit.entries]
        entries.sort(key=_KEY)  # stable: versions of one key stay newest first
        return entries
