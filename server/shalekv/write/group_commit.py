"""Group commit: from submitted changes to durable WAL objects (protocol, "Writes and reads").

The queue holds commits that have no slot yet. A flush gives the front of the queue the next slot
and starts its upload. At most `max_parallel_writes` uploads are in flight; uploads with an unknown
outcome count. An upload ends in one of four ways:

- It lands.
- The slot holds an older writer's empty fence. The commits of the group get new sequence numbers
  and return to their place in the queue, where transactions are decided again.
- The slot belongs to a newer writer, so this one is fenced.
- The state is illegal.

Callers never cancel an upload, and each commit is settled exactly once.

With a quorum, a group is a record that a majority of safekeepers stores, and one object holds
several records. Groups land in their order, and none is displaced. While no majority answers, new
commits are refused. Commits in flight continue, but calls no longer wait for them
(`PendingReplies`).

A transaction is decided when it is submitted, by the newest state in memory. Since it may depend on
commits that are not durable yet, it is neither uploaded nor answered before they are. With a
quorum, the order of the log ensures that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import structlog

from shalekv.clock import Clock
from shalekv.errors import OutcomeUnknown, ShaleError, Stopping
from shalekv.protocol.fencing import SlotVerdict, judge, lost_slot_error
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.transaction import Change, DatabaseState, Transaction
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import EMPTY_READ_SET, ReadSet
from shalekv.write.admission import Admission, FlushPolicy
from shalekv.write.commit import Claim, Commit, Group, OnSettled, Receipt, outcome_unknown
from shalekv.write.pending_replies import PendingReplies
from shalekv.write.pending_writes import PendingWrites
from shalekv.write.wal import WriteAheadLog
from shalekv.write.watermark import DurableWatermark

log = structlog.get_logger()
_PLACE = attrgetter("place")


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

    def __init__(self) -> None:
        self._commits: deque[Commit] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._commits)

    def has_to_wait(self, *, is_ordered: bool) -> bool:
        """Whether the front of the queue must wait until all commits before it are durable.

        `is_ordered` says that groups become durable strictly in order. Even then a load waits,
        since it is newer than all that memory holds; and a commit that writes nothing is not
        uploaded, only answered.
        """
        if not self._commits:
            return False
        front = self._commits[0]
        if is_ordered and front.load is None:
            return not front.writes
        return front.depends_on_state or not front.writes

    def append(self, commit: Commit) -> None:
        """Add a new commit at the end."""
        self._commits.append(commit)
        self.size_bytes += commit.size_bytes

    def pop_decided(self) -> Commit | None:
        """Remove and return the front of the queue if it writes nothing."""
        if not self._commits or self._commits[0].writes:
            return None
        commit = self._commits.popleft()
        self.size_bytes -= commit.size_bytes
        return commit

    def take(self, bytes_max: int, *, is_alone: bool) -> list[Commit]:
        """Remove and return at least one commit from the front, and more while they fit
        `bytes_max`.

        A commit that depends on the commits before it is taken only if `is_alone`, that is, if no
        other object is in flight. It then lands together with them or after them, never without
        them. A load has an object of its own.

        REQUIRES: the queue is not empty, and its front need not wait.
        """
        commits = self._commits
        taken = [commits.popleft()]
        taken_bytes = taken[0].size_bytes
        while commits and taken_bytes + commits[0].size_bytes <= bytes_max:
            if (not is_alone and commits[0].depends_on_state) or taken[0].load or commits[0].load:
                break
            taken.append(commits.popleft())
            taken_bytes += taken[-1].size_bytes
        self.size_bytes -= taken_bytes
        return taken

    def put_back(self, taken: Sequence[Commit], next_seq: int) -> int:
        """Return commits to their place in the queue, and renumber the whole queue from `next_seq`.

        Returns the next free sequence number. With several objects in flight, commits may return
        after younger ones; sorting by place restores the order of submission. Only commits that
        have a slot already, or are durable, now precede some that were submitted earlier.
        """
        self._commits = deque(sorted([*taken, *self._commits], key=_PLACE))
        self.size_bytes += sum(commit.size_bytes for commit in taken)
        for commit in self._commits:
            commit.resequence(next_seq)
            next_seq += 1
        return next_seq

    def take_all(self) -> list[Commit]:
        """Empty the queue, and return its commits."""
        taken = list(self._commits)
        self._commits.clear()
        self.size_bytes = 0
        return taken


class GroupCommit:
    """The log of one writer: queues commits, groups them and makes the groups durable."""

    def __init__(
        self,
        *,
        wal: WriteAheadLog,
        memtable: Memtable,
        admission: Admission,
        watermark: DurableWatermark,
        policy: FlushPolicy,
        state: Callable[[PendingWrites, ReadSet], DatabaseState],
        clock: Clock,
        next_seq: int,
    ) -> None:
        """Begin with the slot after `watermark.wal_id` and the sequence number `next_seq`.

        `state` returns the database state after all pending writes, by which transactions are
        decided.
        """
        self._wal = wal
        self._memtable = memtable
        self._admission = admission
        self._watermark = watermark
        self._policy = policy
        self._state = state
        self._clock = clock
        self._loading_count = 0  # loads that were submitted and are not settled
        self._loaded = asyncio.Event()  # set while `_loading_count` is 0
        self._loaded.set()
        self._queue = CommitQueue()
        self._in_flight: dict[int, Group] = {}  # by position, in ascending order
        self._next_position = 0
        self._last_flush_ms: float | None = None
        self._wake = asyncio.Event()
        self._stopped_by: ShaleError | None = None
        self.is_closing = False  # closed by its owner, not stopped by an error
        self.ended = asyncio.Event()  # set when nothing more is accepted
        self.pending_writes = PendingWrites(memtable)
        self.next_seq = next_seq
        self.next_wal_id = watermark.next_wal_id  # the slot after that of the last group
        wal.begin(self.next_wal_id)
        self.pending_replies = PendingReplies(self._explain)  # the calls that wait for commits
        wal.on_unavailable = self.pending_replies.fail_all
        # The owner of the log sets both. The memtable contains the group when `landed` is called.
        self.land_load: Callable[[CommittedLoad], None] = lambda _: None
        self.landed: Callable[[Group], None] = lambda _: None
        self.objects_written = 0
        self._last_wal_id: int | None = None  # the object of the group that landed last
        self.commits_landed = 0

    @property
    def _window(self) -> int:
        """The number of positions from the first unsettled one to the last that was taken.

        The window itself, not only the number of uploads, is limited to k (`max_parallel_writes`).
        So an opener that finds a gap knows how far behind it an object can be, and the number of
        objects that landed behind a gap is bounded.
        """
        return self._next_position - min(self._in_flight, default=self._next_position)

    @property
    def objects_in_flight(self) -> int:
        """The number of groups in flight, those with an unknown outcome included."""
        return len(self._in_flight)

    @property
    def is_quorum(self) -> bool:
        """Whether a majority of safekeepers makes a commit durable."""
        return self._wal.is_quorum

    def check_available(self) -> None:
        """Raise `QuorumUnavailable` or `LogFull` while nothing can become durable."""
        self._wal.check_available()

    @property
    def stopped_by(self) -> ShaleError | None:
        """Why nothing more is accepted; None while the log is open."""
        return self._stopped_by

    def submit(
        self, changes: Iterable[Change], settle: OnSettled, *, claim: Claim | None = None
    ) -> Commit:
        """Order a commit behind all others; `settle` gets its outcome.

        REQUIRES: there is at least one change (an object without changes is a fence), no key occurs
        twice, and the bytes, with `claim` those of its record too, were admitted; the log releases
        them. Raises the error that stopped the log, and as `check_available`.
        """
        return self._enqueue(Commit(changes, self.next_seq, settle, claim=claim))

    def transact(
        self,
        transaction: Transaction,
        settle: OnSettled,
        *,
        size_bytes: int,
        read_set: ReadSet = EMPTY_READ_SET,
        claim: Claim | None = None,
    ) -> Commit:
        """Order a transaction behind all commits so far, as `submit`.

        `size_bytes`, and with `claim` the bytes of its record, were admitted. `read_set` holds what
        the current version says of the transaction's needs. `settle` gets a receipt or the refusal
        once everything that the decision depends on is durable.
        """
        commit = Commit.of(
            transaction,
            self.next_seq,
            settle,
            size_bytes=size_bytes,
            read_set=read_set,
            claim=claim,
        )
        commit.decide(self._state(self.pending_writes, read_set))
        self._admission.take_more(commit.account_reply())
        return self._enqueue(commit)

    def ingest(
        self, load: PendingLoad, settle: OnSettled, *, size_bytes: int, claim: Claim | None = None
    ) -> Commit:
        """Order a load of ready-made SSTs behind all commits so far, as `submit`.

        A load is alone in its object, and its object is alone in flight. Once durable, it is passed
        to `land_load` before `settle` is called. A transaction must not be ordered behind it until
        then (`wait_loaded`), since memory does not hold the contents of the load.

        REQUIRES: the load is pending in the manifest, and all its files are durable.
        """

        def settle_load(outcome: Receipt | ShaleError) -> None:
            self._loading_count -= 1
            if not self._loading_count:
                self._loaded.set()
            settle(outcome)

        commit = Commit.of_load(
            load, self.next_seq, settle_load, size_bytes=size_bytes, claim=claim
        )
        self._enqueue(commit)
        self._loading_count += 1
        self._loaded.clear()
        return commit

    @property
    def is_loading(self) -> bool:
        """Whether a load is not settled yet, so that memory does not hold all commits."""
        return self._loading_count > 0

    async def wait_loaded(self) -> None:
        """Wait until all loads are settled, whatever their outcome."""
        await self._loaded.wait()

    def _enqueue(self, commit: Commit) -> Commit:
        try:
            if self._stopped_by is not None:
                raise self._stopped_by.with_traceback(None)  # else the traceback would grow
            self._wal.check_available()
        except ShaleError:
            self._admission.release(commit.size_bytes)
            raise
        self.next_seq += 1
        had_enough = self._has_enough
        self._queue.append(commit)
        self.pending_writes.add(commit)
        self._settle_decided()
        if len(self._queue) == 1 or self._has_enough != had_enough:
            self._wake.set()
        return commit

    def _settle_decided(self) -> None:
        """Settle the front of the queue while it writes nothing and all before it is durable."""
        while not self._in_flight and (commit := self._queue.pop_decided()) is not None:
            self._admission.release(commit.size_bytes)
            commit.succeed(seq=self._watermark.landed_seq, wal_id=self._watermark.wal_id)

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
                    name = f"upload group {self._next_position}"
                    uploads.create_task(self._upload(self._take_group()), name=name)
        finally:
            self.end()

    def close(self) -> None:
        """Accept no more commits; `run` returns when all accepted ones are durable."""
        if self._stopped_by is None:
            self.is_closing = True
            self._refuse(Stopping("this writer is shutting down: nothing was applied"))

    def stop(self, error: ShaleError) -> None:
        """Accept and upload nothing more, because of `error`."""
        if self._stopped_by is not None and not self.is_closing:
            return
        self.is_closing = False
        self._refuse(error)
        for commit in self._queue.take_all():
            self._fail(commit, error)
        self._watermark.fail(error)

    def end(self) -> None:
        """Settle the remaining commits: each was either not sent, or its outcome is unknown.

        REQUIRES: `run` has returned, or never began.
        """
        if self._stopped_by is None or self._queue or self._in_flight:
            # This settles the queue, and records why `run` has ended; uploads end as unknown.
            self.stop(
                Stopping(
                    "this writer was stopped before all was durable: what it had not sent to the "
                    "store was not applied"
                )
            )
        for group in self._in_flight.values():
            for commit in group.commits:
                self._fail(commit, self._unknown())
        self._in_flight.clear()

    def _refuse(self, error: ShaleError) -> None:
        self._stopped_by = error
        self._admission.close(error)
        self.ended.set()
        self._wake.set()

    @property
    def _has_enough(self) -> bool:
        """Whether the queue is flushed without waiting for the flush interval."""
        return self._queue.size_bytes >= self._policy.flush_bytes

    async def _wait_until_due(self) -> bool:
        """Wait until the queue is to be flushed. Returns False when `run` should end."""
        while True:
            self._wake.clear()
            if self._stopped_by is not None and not self._queue and not self._in_flight:
                return False
            delay_ms = self._delay_ms() if self._queue else None
            if delay_ms == 0:
                return True
            try:
                async with asyncio.timeout(None if delay_ms is None else delay_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _delay_ms(self) -> float | None:
        if self._in_flight and self._queue.has_to_wait(is_ordered=self.is_quorum):
            return None
        if any(group.load for group in self._in_flight.values()):
            return None  # newer commits must not land before the load
        return self._policy.delay_ms(
            now_ms=self._clock.monotonic_ms(),
            last_flush_ms=self._last_flush_ms,
            window=self._window,
            queued_bytes=self._queue.size_bytes,
            is_hurried=self.is_closing,
        )

    def _take_group(self) -> Group:
        """Take the front of the queue as a group, and give it the next slot."""
        is_alone = self.is_quorum or not self._in_flight
        taken = self._queue.take(self._policy.flush_bytes, is_alone=is_alone)
        size_bytes = sum(commit.size_bytes for commit in taken)
        wal_id = self._wal.take(size_bytes, is_load=taken[0].load is not None)
        group = Group(wal_id, taken, position=self._next_position)
        self.next_wal_id = wal_id + 1
        self._next_position += 1
        self._in_flight[group.position] = group
        self._watermark.add(group)
        self._last_flush_ms = self._clock.monotonic_ms()
        return group

    async def _upload(self, group: Group) -> None:
        """Make one group durable, or settle it otherwise. Fatal errors stop the log."""
        try:
            occupant = await self._wal.create(
                group.wal_id, group.contents(), position=group.position
            )
        except ShaleError as error:  # a broken disk, a corrupt object in the slot
            self._end(group)
            self.stop(error)
            self._fail_group(group, self._unknown())
            return
        self._end(group)
        own = self._wal.own
        if occupant is None:
            self._land(group)
        elif judge(occupant, own) is SlotVerdict.OLDER_FENCE:
            self._displace(group)
        else:
            lost = lost_slot_error(occupant, own, f"WAL slot {group.wal_id}")
            self.stop(lost)
            self._fail_group(group, lost)
        self._settle_decided()

    def _end(self, group: Group) -> None:
        """Remove a group whose upload has ended, so that another may begin."""
        del self._in_flight[group.position]
        self._wake.set()

    def _land(self, group: Group) -> None:
        """Publish a group that is durable, then acknowledge its commits."""
        self._memtable.land(group.run)
        self.landed(group)
        self._watermark.settle(group, landed=True)
        if group.load is not None:
            self.land_load(group.load)
        self.objects_written += group.wal_id != self._last_wal_id
        self._last_wal_id = group.wal_id
        view_seq = group.commits[0].seq  # the first commit writes, else it was settled already
        for commit in group.commits:
            self.pending_writes.remove(commit)
            if commit.writes:
                self.commits_landed += 1
                view_seq = commit.seq
            # A commit that writes nothing was decided by the commits before it alone.
            commit.succeed(seq=view_seq, wal_id=group.wal_id)
        self._admission.release(group.size_bytes)

    def _displace(self, group: Group) -> None:
        """Move everything without a slot behind the fence of a slow opener, which took the slot.

        Slots after this one may be in flight or durable already with greater sequence numbers. Slot
        order must be sequence order (I4), so whatever has no slot gets numbers above all of these.
        """
        log.warning("displaced by an older writer's fence", wal_id=group.wal_id)
        if self._stopped_by is not None and not self.is_closing:
            self._fail_group(group, self._stopped_by)
            return
        self._watermark.settle(group, landed=False)
        self.next_seq = self._queue.put_back(group.commits, self.next_seq)
        in_flight = self._in_flight.values()
        self.pending_writes.rebuild(commit for group in in_flight for commit in group.commits)
        for commit in self._queue:
            # The groups that were in flight behind the slot precede this commit now.
            commit.decide(self._state(self.pending_writes, commit.read_set))
            self.pending_writes.add(commit)

    def _unknown(self) -> OutcomeUnknown:
        return outcome_unknown(self._storage_name)

    @property
    def _storage_name(self) -> str:
        return "a majority of the safekeepers" if self.is_quorum else "the object store"

    def _explain(self) -> str:
        """Say what keeps commits from becoming durable."""
        trouble = self._wal.trouble(after_ms=0.0)
        if trouble is None:
            return f"{self._storage_name} has not answered yet"
        return trouble.text(self._clock.monotonic_ms())

    def _fail_group(self, group: Group, error: ShaleError) -> None:
        """Settle a group that will not be acknowledged."""
        self._watermark.settle(group, landed=False)
        for commit in group.commits:
            self._fail(commit, error)

    def _fail(self, commit: Commit, error: ShaleError) -> None:
        """Report and settle a commit that was accepted and is lost."""
        report_lost(commit, error)
        self.pending_writes.remove(commit)
        self._admission.release(commit.size_bytes)
        commit.end(error)
