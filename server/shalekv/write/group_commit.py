"""Group commit: from submitted commits to durable groups (protocol, "Writes and reads").

A commit passes through these steps; "the log" that accepts and settles commits is `GroupCommit`:

    submit       it enters the queue, where it has no slot, and the pending writes
    _take_group  the front of the queue becomes a group, which gets the next slot
    _upload      `WriteAheadLog.create` makes the group durable: as an object of the store, or as a
                 record on a majority of the safekeepers
    Land         the group enters the memtable
    Advance      once all slots before it have an outcome, the watermark passes its slot: reads and
                 watches show it
    Acknowledge  its commits are settled; this does not wait for slots before it

`protocol.log` decides when a group may be taken, and what follows from each outcome; this module
carries it out. Callers never cancel an upload, and each commit is settled exactly once. It fails

    when submitted        with the error that stopped the log, or that of `check_available`
    by its decision       with the refusal of its transaction, once all before it is durable
    in the queue          with the error that stopped the log
    by its slot           with `Fenced` or `IllegalState`, when another writer's object is there and
                          stops the log; or with the error that stopped it before
    by its upload         with `OutcomeUnknown`, when `create` raised or `run` was cancelled: only
                          then may the commit be applied

A transaction is decided when it is submitted, by the newest state in memory. Since it may depend on
commits that are not durable yet, it is neither uploaded nor answered before they are. With a
quorum, the order of the log ensures that. While no majority of safekeepers answers, new commits are
refused. Commits in flight continue, but calls no longer wait for them (`PendingReplies`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from time import perf_counter_ns
from typing import Protocol

import structlog

from shalekv.clock import Clock
from shalekv.errors import ShaleError, Stopping, raise_if
from shalekv.protocol.log import (
    Abandon,
    Acknowledge,
    Advance,
    Close,
    Fail,
    FailQueue,
    FlushPolicy,
    GroupTaken,
    Land,
    LogEffect,
    LogEvent,
    LogSlot,
    LogState,
    Mode,
    Outcome,
    Refuse,
    Requeue,
    SlotFilled,
    Stop,
    UploadFailed,
    step,
)
from shalekv.protocol.transaction import DatabaseState, Transaction
from shalekv.read.read_set import EMPTY_READ_SET, ReadSet
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.watermark import Watermark
from shalekv.telemetry.activity import CURRENT, CommitActivity
from shalekv.telemetry.tracing import Tracer
from shalekv.write.admission import Admission
from shalekv.write.commit import Commit, Group, KeyedRequest, OnSettled, outcome_unknown
from shalekv.write.log_stats import LogStats, charge_of
from shalekv.write.pending_replies import PendingReplies
from shalekv.write.pending_writes import PendingWrites
from shalekv.write.wal import WriteAheadLog

log = structlog.get_logger()
_SUBMIT_ORDER = attrgetter("submit_order")


def report_lost(commit: Commit, error: ShaleError) -> None:
    """Log that `commit` was accepted and will not be acknowledged, because of `error`.

    Read-only commits are not logged.
    """
    if not commit.writes:
        return
    first = (*commit.entries[:1], *commit.range_tombstones[:1])
    log.error(
        "write lost",
        reason=error.reason,
        seq=commit.seq,
        keys=len(commit.entries),
        range_deletes=len(commit.range_tombstones),
        first_key=repr(first[0].key[:64]) if first else "",
        load_id=commit.load.load_id if commit.load else "",
    )


class CommitQueue:
    """Commits that have no slot yet, in the order of their submission, and their size in bytes."""

    def __init__(self, next_seq: int) -> None:
        """Begin empty; `next_seq` is the sequence number of the first commit."""
        self._commits: deque[Commit] = deque()
        # The first commit that came after each `take`: its submit order, and when it came.
        self._arrivals: deque[tuple[int, int]] = deque()
        self._is_taken = True  # no commit has come since the last `take`
        self.size_bytes = 0
        self.next_seq = next_seq

    def __len__(self) -> int:
        return len(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._commits)

    @property
    def front(self) -> Commit:
        """The oldest commit. REQUIRES: the queue is not empty."""
        return self._commits[0]

    @property
    def front_since_ns(self) -> int:
        """When the front came: it, or one that came before it, and after the same `take`.

        The clock is read once for each group, and not for each commit. REQUIRES: as `front`.
        """
        arrivals, order = self._arrivals, self._commits[0].submit_order
        while len(arrivals) > 1 and arrivals[1][0] <= order:
            arrivals.popleft()
        return arrivals[0][1]

    def append(self, commit: Commit) -> None:
        """Add a new commit at the end, which has the number `next_seq`."""
        if self._is_taken:
            self._arrivals.append((commit.submit_order, perf_counter_ns()))
            self._is_taken = False
        self._commits.append(commit)
        self.size_bytes += commit.size_bytes
        self.next_seq += 1

    def pop_read_only(self) -> Commit | None:
        """Remove and return the front of the queue if it writes nothing; else None."""
        if not self._commits or self._commits[0].writes:
            return None
        commit = self._commits.popleft()
        self.size_bytes -= commit.size_bytes
        return commit

    def take(self, bytes_max: int, *, takes_dependents: bool) -> list[Commit]:
        """Remove and return at least one commit from the front, and more while they fit
        `bytes_max`.

        Without `takes_dependents`, a commit that depends on those before it is left for a later
        group (`LogState.takes_dependents`). A load has a group of its own.

        REQUIRES: the queue is not empty.
        """
        self._is_taken = True
        commits = self._commits
        taken = [commits.popleft()]
        taken_bytes = taken[0].size_bytes
        while commits and taken_bytes + commits[0].size_bytes <= bytes_max:
            if taken[0].load or commits[0].load:
                break
            if not takes_dependents and commits[0].depends_on_state:
                break
            taken.append(commits.popleft())
            taken_bytes += taken[-1].size_bytes
        self.size_bytes -= taken_bytes
        return taken

    def put_back(self, taken: Sequence[Commit]) -> None:
        """Return commits to their place in the queue, and renumber the whole queue.

        With several objects in flight, commits may return after younger ones; sorting restores the
        order of submission. Only commits that have a slot already, or are durable,
        now precede some that were submitted earlier.
        """
        self._commits = deque(sorted([*taken, *self._commits], key=_SUBMIT_ORDER))
        self.size_bytes += sum(commit.size_bytes for commit in taken)
        for commit in self._commits:
            commit.resequence(self.next_seq)
            self.next_seq += 1

    def take_all(self) -> list[Commit]:
        """Empty the queue, and return its commits."""
        taken = list(self._commits)
        self._commits.clear()
        self.size_bytes = 0
        return taken


class Database(Protocol):
    """The state in memory to which the log applies its groups: a `WriterEngine`."""

    def newest_state(self, pending_writes: PendingWrites, read_set: ReadSet) -> DatabaseState:
        """The state after all pending writes, by which a transaction is decided."""
        ...

    def land(self, group: Group) -> None:
        """Take a durable group into memory. Groups before it may not be durable yet."""
        ...

    def publish(self, group: Group) -> None:
        """Show a group to scans and watches. It has landed, and all before it as well."""
        ...


class GroupCommit:
    """The log of one writer: queues commits, groups them, and stores the groups in `wal`."""

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        *,
        wal: WriteAheadLog,
        database: Database,
        admission: Admission,
        watermark: Watermark,
        policy: FlushPolicy,
        pending_writes: PendingWrites,
        clock: Clock,
        next_seq: int,
        tracer: Tracer | None = None,
    ) -> None:
        """Begin with the slot after `watermark.wal_id` and the sequence number `next_seq`.

        `tracer` records the groups; None: nobody does.
        """
        self.wal = wal
        self._database = database
        self.admission = admission
        self.watermark = watermark
        self._clock = clock
        self._queue = CommitQueue(next_seq)
        next_wal_id = 0 if watermark.wal_id is None else watermark.wal_id + 1
        self._state = LogState(wal.own, policy, wal.is_ordered, next_wal_id)
        self._groups: dict[int, Group] = {}  # by position: those of the window, in order
        self._wake = asyncio.Event()
        self.pending_writes = pending_writes
        self.stats = LogStats(tracer)
        wal.begin(next_wal_id)
        self.pending_replies = PendingReplies(self._explain)

    @property
    def groups_in_flight(self) -> int:
        """The number of groups whose upload has not ended yet."""
        return len(self._state.in_flight)

    @property
    def policy(self) -> FlushPolicy:
        """The bounds on groups."""
        return self._state.policy

    @property
    def next_seq(self) -> int:
        """The sequence number of the next commit."""
        return self._queue.next_seq

    @property
    def next_wal_id(self) -> int:
        """The slot after that of the last group."""
        return self._state.next_wal_id

    @property
    def runs_ahead(self) -> list[MemoryRun]:
        """The contents of the groups that are durable behind a gap, in their order."""
        return [self._groups[slot.position].run for slot in self._state.landed_behind_gap]

    def check_available(self) -> None:
        """Raise `QuorumUnavailable` or `LogFull` while nothing can become durable."""
        raise_if(self.wal.refusal)

    @property
    def is_closing(self) -> bool:
        """Return whether the log was closed by its owner, and not stopped by an error."""
        return self._state.mode is Mode.CLOSING

    @property
    def stopped_by(self) -> ShaleError | None:
        """Why nothing more is accepted; None while the log is open."""
        return self._state.refusal

    def submit(self, commit: Commit) -> Commit:
        """Order a commit behind all others, and return it. The log settles it exactly once.

        A load is alone in its object, and its object is alone in flight. A transaction must not be
        ordered behind it until it is settled (`PendingWrites.wait_loaded`), since memory does not
        hold the contents of the load.

        REQUIRES: the commit has the number `next_seq` and a change (an object without changes is a
        fence), or is a decided transaction. Its bytes were admitted; the log releases them. A load
        is pending in the manifest, and all its files are durable. Raises the error that stopped the
        log, and as `check_available`.
        """
        # In no variable: the error would refer to this frame, which refers to the commit.
        if self._state.refusal is not None or self.wal.refusal is not None:
            self.admission.release(commit.size_bytes)
            raise_if(self._state.refusal)
            self.check_available()
        queue = self._queue
        before_bytes = queue.size_bytes
        queue.append(commit)
        self.pending_writes.add(commit)
        if not commit.entries and not commit.writes:
            self._settle_read_only()
        if not before_bytes or before_bytes < self._state.policy.flush_bytes <= queue.size_bytes:
            self._wake.set()  # it was empty, or is to be flushed now
        return commit

    def transact(
        self,
        transaction: Transaction,
        settle: OnSettled,
        *,
        size_bytes: int,
        read_set: ReadSet = EMPTY_READ_SET,
        keyed: KeyedRequest | None = None,
    ) -> Commit:
        """Order a transaction behind all commits so far, as `submit`.

        `size_bytes`, and with `keyed` the bytes of its record, were admitted. `read_set` answers
        the needs of the transaction from the levels, and is current. `settle` gets a receipt or the
        refusal once everything that the decision depends on is durable. Raises as `submit`.
        """
        commit = Commit.of(
            transaction,
            self._queue.next_seq,
            settle,
            size_bytes=size_bytes,
            read_set=read_set,
            keyed=keyed,
        )
        commit.decide(self._database.newest_state(self.pending_writes, read_set))
        self.admission.take_more(commit.account_found())
        return self.submit(commit)

    def _settle_read_only(self) -> None:
        """Settle commits at the front of the queue that write nothing, unless groups are in flight.

        All commits before them are durable then.
        """
        while not self._state.slots and (commit := self._queue.pop_read_only()) is not None:
            self.pending_writes.remove(commit)
            self.admission.release(commit.size_bytes)
            commit.succeed(seq=self.watermark.landed_seq, wal_id=self.watermark.wal_id)

    def group_of(self, commit: Commit) -> CommitActivity | None:
        """Return the group of a commit that is not settled; None: it is still in the queue."""
        for group in reversed(self._groups.values()):
            if group.commits[0].seq <= commit.seq <= group.commits[-1].seq:
                return group.activity
        return None

    @property
    def oldest_in_flight(self) -> CommitActivity | None:
        """The group that commits in the queue wait for; None: there is none."""
        in_flight = self._state.in_flight
        return self._groups[in_flight[0].position].activity if in_flight else None

    async def run(self) -> None:
        """Flush until the log is closed or stopped and all uploads have ended.

        `stopped_by` holds the reason for the return. `is_closing` is still set only if everything
        accepted is durable. When cancelled, commits in flight end with an unknown outcome.
        """
        try:
            async with asyncio.TaskGroup() as uploads:
                while await self._wait_until_due():
                    # No variable holds the group: it, and all that it refers to, would stay
                    # alive until the next one.
                    name = f"upload group {self._state.next_position}"
                    uploads.create_task(self._upload(self._take_group()), name=name)
        finally:
            self.end()

    def close(self) -> None:
        """Accept no more commits; `run` returns when all accepted ones are durable."""
        self._apply(Close(Stopping("this writer is shutting down: nothing was applied")))

    def stop(self, error: ShaleError) -> None:
        """Accept and upload nothing more, because of `error`."""
        self._apply(Stop(error))

    def end(self) -> None:
        """Settle the remaining commits: each was either not sent, or its outcome is unknown.

        REQUIRES: `run` has returned, or never began.
        """
        if self._state.mode is Mode.OPEN or self._queue or self._state.slots:
            # This settles the queue, and records why `run` has ended; uploads end as unknown.
            self.stop(
                Stopping(
                    "this writer was stopped before all was durable: what it had not sent to the "
                    "store was not applied"
                )
            )
        self._apply(Abandon())

    async def _wait_until_due(self) -> bool:
        """Wait until the queue is to be flushed. Returns False when `run` should end."""
        while True:
            self._wake.clear()
            state = self._state
            if state.mode is not Mode.OPEN and not self._queue and not state.slots:
                return False
            delay_ms = self._delay_ms() if self._queue else None
            if delay_ms == 0:
                return True
            if delay_ms is None:
                await self._wake.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_ms / 1000):
                    await self._wake.wait()

    def _delay_ms(self) -> float | None:
        """Milliseconds until the queue is to be flushed; None: not before an upload has ended."""
        state, front = self._state, self._queue.front
        if not state.may_take(
            writes=front.writes,
            depends_on_state=front.depends_on_state,
            is_load=front.load is not None,
        ):
            return None
        return state.delay_ms(
            now_ms=self._clock.monotonic_ms(), queued_bytes=self._queue.size_bytes
        )

    def _take_group(self) -> Group:
        """Take the front of the queue as a group, and give it the next slot."""
        state, queued_ns = self._state, self._queue.front_since_ns
        taken = self._queue.take(state.policy.flush_bytes, takes_dependents=state.takes_dependents)
        size_bytes = sum([commit.size_bytes for commit in taken])
        is_load = taken[0].load is not None
        wal_id = self.wal.take(size_bytes, is_load=is_load)
        group = Group(wal_id, taken, position=state.next_position)
        self.stats.begin(group, queued_ns)
        self._groups[group.position] = group
        self._apply(GroupTaken(wal_id, group.max_seq, is_load, self._clock.monotonic_ms()))
        return group

    async def _upload(self, group: Group) -> None:
        """Upload one group, and apply the outcome to the log. An error of the upload stops it."""
        CURRENT.set(group.activity)
        try:
            occupant = await self.wal.create(
                group.wal_id,
                group.contents(),
                position=group.position,
                time_max_ms=self.pending_writes.holds_until_ms_after(group.commits[-1].seq),
            )
        except ShaleError as error:  # a broken disk, a corrupt object in the slot
            self._apply(UploadFailed(group.position, error))
        else:
            self._apply(SlotFilled(group.position, occupant))
            self._settle_read_only()
        self._wake.set()

    def _apply(self, event: LogEvent) -> None:
        """Apply an event to the log, and carry out what follows."""
        self._state, effects = step(self._state, event)
        for effect in effects:
            self._execute(effect)
        slots = self._state.slots
        self.watermark.open_wal_id = slots[0].wal_id if slots else None
        while self._groups and (first := next(iter(self._groups))) < (
            slots[0].position if slots else self._state.next_position
        ):
            del self._groups[first]

    def _execute(self, effect: LogEffect) -> None:
        match effect:
            case Land(slot):
                self.stats.stored(self._groups[slot.position])
                self._database.land(self._groups[slot.position])
                self.watermark.landed_seq = max(self.watermark.landed_seq, slot.last_seq)
            case Advance(slot):
                self._advance(slot)
            case Acknowledge(slot):
                self._acknowledge(self._groups[slot.position])
            case Requeue(slot):
                self._requeue(self._groups[slot.position])
            case Fail(slot, error):
                reason = error or outcome_unknown(self.wal.storage_name)
                group = self._groups[slot.position]
                for commit in group.commits:
                    self._fail(commit, reason)
                self.stats.fail(group, reason.reason)
            case Refuse(error):
                self.admission.close(error)
                self._wake.set()
            case FailQueue(error):
                for commit in self._queue.take_all():
                    self._fail(commit, error)
                self.watermark.fail(error)

    def _advance(self, slot: LogSlot) -> None:
        if slot.outcome is not Outcome.LANDED:
            self.watermark.advance(self.watermark.seq, slot.wal_id)
            return
        self.watermark.advance(slot.last_seq, slot.wal_id)
        group = self._groups[slot.position]
        self._database.publish(group)
        self.stats.visible(group)

    def _acknowledge(self, group: Group) -> None:
        activity, charged = group.activity, self.stats.count(group)
        view_seq = group.commits[0].seq  # the first commit writes, else it was settled already
        for commit in group.commits:
            self.pending_writes.remove(commit)
            if commit.entries or commit.writes:
                view_seq = commit.seq
            # A commit that writes nothing was decided by the commits before it alone.
            bill = charge_of(group, commit) if commit is charged else None
            commit.succeed(view_seq, group.wal_id, activity, bill)
        self.admission.release(group.size_bytes)
        self.stats.acknowledged(group)

    def _requeue(self, group: Group) -> None:
        """Queue a group again, whose slot an older writer has filled with its fence.

        Groups in later slots may be in flight or durable already, with greater sequence numbers.
        Slot order must be sequence order (I4), so the whole queue is renumbered above these, and
        its transactions are decided again.
        """
        log.warning("displaced by an older writer's fence", wal_id=group.wal_id)
        self.stats.displace(group)
        self._queue.put_back(group.commits)
        in_flight = [self._groups[slot.position] for slot in self._state.in_flight]
        self.pending_writes.rebuild(commit for each in in_flight for commit in each.commits)
        for commit in self._queue:
            # The groups that were in flight behind the slot precede this commit now.
            commit.decide(self._database.newest_state(self.pending_writes, commit.read_set))
            self.pending_writes.add(commit)

    def _explain(self) -> str:
        """Say what keeps commits from becoming durable."""
        trouble = self.wal.trouble(after_ms=0.0)
        if trouble is None:
            return f"{self.wal.storage_name} has not answered yet"
        return trouble.text(self._clock.monotonic_ms())

    def _fail(self, commit: Commit, error: ShaleError) -> None:
        """Report and settle a commit that was accepted and is lost."""
        report_lost(commit, error)
        self.pending_writes.remove(commit)
        self.admission.release(commit.size_bytes)
        commit.end(error)
