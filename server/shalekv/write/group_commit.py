"""Group commit: from submitted changes to durable WAL objects (protocol, "Writes and reads").

The queue holds commits without a slot. A flush gives the front of the queue the next slot and
starts its upload; at most `max_parallel_writes` uploads are in flight, those with an unknown
outcome included. An upload ends in one of four ways: it lands; the slot holds an older writer's
empty fence, so its commits get new numbers and go back to their place in the queue, where
transactions are decided again; the slot belongs to a newer writer, so this one is fenced; or the
state is illegal. Uploads are never cancelled by their callers, and a commit is settled exactly
once.

With a quorum a group is a record that a majority gets, several in one object. They land in their
order, and none is displaced. While no majority answers nothing more is accepted; what had been goes
on, without those who waited for it (`PendingReplies`).

A transaction is decided when it is submitted, by the newest state in memory. Since it rests on
commits that are not durable yet, it is not uploaded, or answered, before they are; with a quorum
the order of the log sees to that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import structlog

from shalekv.clock import Clock
from shalekv.errors import OutcomeUnknown, ShaleError, Stopping
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.opening import SlotVerdict, judge, loss_of_slot
from shalekv.protocol.transaction import Change, DatabaseState, Transaction
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import NOTHING_BELOW, ReadSet
from shalekv.write.admission import Admission, FlushPolicy
from shalekv.write.commit import Claim, Commit, Group, Receipt, Settled, outcome_unknown
from shalekv.write.pending_replies import PendingReplies
from shalekv.write.pending_writes import PendingWrites
from shalekv.write.wal import WriteAheadLog
from shalekv.write.watermark import DurableWatermark

# --- lost_writes
# The log line of each write that was accepted and will not be acknowledged.


log = structlog.get_logger()


def report_lost(commit: Commit, error: ShaleError) -> None:
    """Log that the commit is lost because of `error`; of one that writes nothing, nothing is."""
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


# --- commit_queue
# The queue of the log: commits that have no slot yet, in the order of their submission.


_PLACE = attrgetter("place")


class CommitQueue:
    """Commits in order, and the bytes that they hold."""

    def __init__(self) -> None:
        """An empty queue."""
        self._commits: deque[Commit] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._commits)

    def has_to_wait(self, *, is_ordered: bool) -> bool:
        """Whether the front has to wait until all before it is durable.

        `is_ordered`: nothing lands without what was taken before it. Even then a load waits, since
        it stands above all that memory holds, and what writes nothing is only to be answered.
        """
        if not self._commits:
            return False
        front = self._commits[0]
        if is_ordered and front.load is None:
            return not front.writes
        return front.rests_on_state or not front.writes

    def append(self, commit: Commit) -> None:
        """A new commit, behind all others."""
        self._commits.append(commit)
        self.size_bytes += commit.size_bytes

    def pop_decided(self) -> Commit | None:
        """The front of the queue, if it writes nothing."""
        if not self._commits or self._commits[0].writes:
            return None
        commit = self._commits.popleft()
        self.size_bytes -= commit.size_bytes
        return commit

    def take(self, bytes_max: int, *, is_alone: bool) -> list[Commit]:
        """The front of the queue: at least one commit, and no more of them than `bytes_max` hold.

        What rests on the commits before it is only taken if `is_alone`: no other object is in
        flight, so it lands together with them or after them, never without them. A load has an
        object of its own.

        REQUIRES: the queue is not empty, its front may be taken.
        """
        commits = self._commits
        taken = [commits.popleft()]
        taken_bytes = taken[0].size_bytes
        while commits and taken_bytes + commits[0].size_bytes <= bytes_max:
            if (not is_alone and commits[0].rests_on_state) or taken[0].load or commits[0].load:
                break
            taken.append(commits.popleft())
            taken_bytes += taken[-1].size_bytes
        self.size_bytes -= taken_bytes
        return taken

    def put_back(self, taken: Sequence[Commit], next_seq: int) -> int:
        """Put commits back to their place, and give all numbers from `next_seq` on.

        Returns the next free number. With several objects in flight, commits may come back after
        younger ones: order goes by place, so that it stays as it was submitted. Only what has a
        slot already, or is durable, now comes before what was submitted earlier.
        """
        self._commits = deque(sorted([*taken, *self._commits], key=_PLACE))
        self.size_bytes += sum(commit.size_bytes for commit in taken)
        for commit in self._commits:
            commit.resequence(next_seq)
            next_seq += 1
        return next_seq

    def take_all(self) -> list[Commit]:
        """Empty the queue."""
        taken = list(self._commits)
        self._commits.clear()
        self.size_bytes = 0
        return taken


# --- group_commit


class GroupCommit:
    """The log of one writer."""

    def __init__(
        self,
        *,
        slots: WriteAheadLog,
        memtable: Memtable,
        admission: Admission,
        prefix: DurableWatermark,
        policy: FlushPolicy,
        state: Callable[[PendingWrites, ReadSet], DatabaseState],
        clock: Clock,
        next_seq: int,
    ) -> None:
        """The first object takes the slot after `prefix.wal_id`, the first commit `next_seq`.

        `state` is what a transaction meets that comes after all commits in the overlay.
        """
        self._slots = slots
        self._memtable = memtable
        self._admission = admission
        self._prefix = prefix
        self._policy = policy
        self._state = state
        self._clock = clock
        self._loading_count = 0  # loads that were submitted and are not settled
        self._loaded = asyncio.Event()  # there are none
        self._loaded.set()
        self._queue = CommitQueue()
        self._in_flight: dict[int, Group] = {}  # by position, in their order
        self._next_position = 0
        self._last_flush_ms: float | None = None
        self._wake = asyncio.Event()
        self._stopped_by: ShaleError | None = None
        self.is_closing = False  # closed by its owner, not stopped by an error
        self.ended = asyncio.Event()  # nothing more is accepted
        self.overlay = PendingWrites(memtable)
        self.next_seq = next_seq
        self.next_wal_id = prefix.next_wal_id  # after the last object that a group went into
        slots.begin(self.next_wal_id)
        self.patience = PendingReplies(self._explain)  # those who wait for commits
        slots.on_unavailable = self.patience.lose
        self.land_load: Callable[[CommittedLoad], None] = lambda _: None  # to be set by its owner
        self.landed: Callable[[Group], None] = lambda _: None  # the same: the memtable has it
        self.objects_written = 0
        self._last_wal_id: int | None = None  # that something has landed in
        self.commits_landed = 0

    @property
    def _window(self) -> int:
        """Positions from the first that is not settled to the last that was taken.

        No more than k of them may there be, not only k uploads: so an opener that finds a gap knows
        how far behind it an object can be, and what has landed behind it is bounded.
        """
        return self._next_position - min(self._in_flight, default=self._next_position)

    @property
    def objects_in_flight(self) -> int:
        """Groups in flight, those with an unknown outcome included."""
        return len(self._in_flight)

    @property
    def is_quorum(self) -> bool:
        """Whether a majority of safekeepers makes a commit durable."""
        return self._slots.is_quorum

    def check_available(self) -> None:
        """Raise `QuorumUnavailable` or `LogFull` while nothing can become durable."""
        self._slots.check_available()

    @property
    def stopped_by(self) -> ShaleError | None:
        """Why nothing more is accepted; None while the log is open."""
        return self._stopped_by

    def submit(
        self, changes: Iterable[Change], settle: Settled, *, claim: Claim | None = None
    ) -> Commit:
        """Order a commit behind all others; `settle` tells what became of it.

        REQUIRES: there is a change, since an object without any is a fence; each key stands once;
        and the bytes (with a claim, of its record too) were admitted: the log releases them. Raises
        what stopped the log, and as `check_available`.
        """
        return self._enqueue(Commit(changes, self.next_seq, settle, claim=claim))

    def transact(
        self,
        transaction: Transaction,
        settle: Settled,
        *,
        size_bytes: int,
        below: ReadSet = NOTHING_BELOW,
        claim: Claim | None = None,
    ) -> Commit:
        """Order a transaction behind all commits so far, as `submit`.

        `size_bytes`, and those of a record, were admitted; `below` is what the current tree says of
        its needs. `settle` gets a receipt or its refusal, when all that it rests on is durable.
        """
        commit = Commit.of(
            transaction, self.next_seq, settle, size_bytes=size_bytes, below=below, claim=claim
        )
        commit.decide(self._state(self.overlay, below))
        self._admission.take_more(commit.account_reply())
        return self._enqueue(commit)

    def ingest(
        self, load: PendingLoad, settle: Settled, *, size_bytes: int, claim: Claim | None = None
    ) -> Commit:
        """Order a load of ready-made SSTs behind all commits so far, as `submit`.

        It is alone in its object and in flight. When it is durable, it is given to `land_load`
        before anybody is told. What `transact` would order behind it must wait for that
        (`wait_loaded`): memory does not have what is in it.

        REQUIRES: the load is pending in the manifest, all its files are durable.
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
        """Whether a load is on its way: memory does not hold all commits."""
        return self._loading_count > 0

    async def wait_loaded(self) -> None:
        """Wait until no load is on its way, whatever becomes of them."""
        await self._loaded.wait()

    def _enqueue(self, commit: Commit) -> Commit:
        try:
            if self._stopped_by is not None:
                raise self._stopped_by.with_traceback(None)  # or it would grow with each call
            self._slots.check_available()
        except ShaleError:
            self._admission.release(commit.size_bytes)
            raise
        self.next_seq += 1
        had_enough = self._has_enough
        self._queue.append(commit)
        self.overlay.add(commit)
        self._settle_decided()
        if len(self._queue) == 1 or self._has_enough != had_enough:
            self._wake.set()
        return commit

    def _settle_decided(self) -> None:
        """Answer the front of the queue as long as it writes nothing and all before is durable."""
        while not self._in_flight and (commit := self._queue.pop_decided()) is not None:
            self._admission.release(commit.size_bytes)
            commit.succeed(seq=self._prefix.landed_seq, wal_id=self._prefix.wal_id)

    async def run(self) -> None:
        """Flush until the log is closed or stopped and all uploads have come to their end.

        `stopped_by` tells why it returned; `is_closing` is left only if all that was accepted is
        durable. Cancelled: what is in flight ends as unknown.
        """
        try:
            async with asyncio.TaskGroup() as uploads:
                while await self._wait_until_due():
                    # No name for the group: it would live, and what it rests on, until the next.
                    name = f"upload group {self._next_position}"
                    uploads.create_task(self._upload(self._take_group()), name=name)
        finally:
            self.end()

    def close(self) -> None:
        """Accept nothing more; `run` returns when all that was accepted is durable."""
        if self._stopped_by is None:
            self.is_closing = True
            self._refuse(Stopping("this writer is shutting down: nothing was applied"))

    def stop(self, error: ShaleError) -> None:
        """Accept nothing more and upload nothing more, because of `error`."""
        if self._stopped_by is not None and not self.is_closing:
            return
        self.is_closing = False
        self._refuse(error)
        for commit in self._queue.take_all():
            self._fail(commit, error)
        self._prefix.fail(error)

    def end(self) -> None:
        """Settle what is still here: it was either not sent, or nobody knows.

        REQUIRES: `run` has returned, or never began.
        """
        if self._stopped_by is None or self._queue or self._in_flight:
            # It answers the queue, and also says how `run` has ended: uploads end as unknown.
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
        """Whether the queue is flushed without waiting for its spacing."""
        return self._queue.size_bytes >= self._policy.flush_bytes

    async def _wait_until_due(self) -> bool:
        """Wait until the queue is to be flushed; False: nothing will be any more."""
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
            return None  # what is newer than the load must not land before it
        return self._policy.delay_ms(
            now_ms=self._clock.monotonic_ms(),
            last_flush_ms=self._last_flush_ms,
            window=self._window,
            queued_bytes=self._queue.size_bytes,
            is_hurried=self.is_closing,
        )

    def _take_group(self) -> Group:
        """The front of the queue, in the next slot."""
        is_alone = self.is_quorum or not self._in_flight
        taken = self._queue.take(self._policy.flush_bytes, is_alone=is_alone)
        size_bytes = sum(commit.size_bytes for commit in taken)
        wal_id = self._slots.take(size_bytes, is_load=taken[0].load is not None)
        group = Group(wal_id, taken, position=self._next_position)
        self.next_wal_id = wal_id + 1
        self._next_position += 1
        self._in_flight[group.position] = group
        self._prefix.add(group)
        self._last_flush_ms = self._clock.monotonic_ms()
        return group

    async def _upload(self, group: Group) -> None:
        """Bring one group to its end. Stops the log, and returns, on errors of the protocol."""
        try:
            occupant = await self._slots.create(
                group.wal_id, group.contents(), position=group.position
            )
        except ShaleError as error:  # a broken disk, a corrupt object in the slot
            self._end(group)
            self.stop(error)
            self._fail_group(group, self._unknown())
            return
        self._end(group)
        own = self._slots.own
        if occupant is None:
            self._land(group)
        elif judge(occupant, own) is SlotVerdict.OLDER_FENCE:
            self._displace(group)
        else:
            lost = loss_of_slot(occupant, own, f"WAL slot {group.wal_id}")
            self.stop(lost)
            self._fail_group(group, lost)
        self._settle_decided()

    def _end(self, group: Group) -> None:
        """The upload has ended, somehow: another may begin."""
        del self._in_flight[group.position]
        self._wake.set()

    def _land(self, group: Group) -> None:
        """The object is durable: show it, then acknowledge it."""
        self._memtable.land(group.run)
        self.landed(group)
        self._prefix.settle(group, landed=True)
        if group.load is not None:
            self.land_load(group.load)
        self.objects_written += group.wal_id != self._last_wal_id
        self._last_wal_id = group.wal_id
        view_seq = group.commits[0].seq  # the first writes, or it had been answered already
        for commit in group.commits:
            self.overlay.remove(commit)
            if commit.writes:
                self.commits_landed += 1
                view_seq = commit.seq
            # What writes nothing was decided by what stands before it, and by nothing after it.
            commit.succeed(seq=view_seq, wal_id=group.wal_id)
        self._admission.release(group.size_bytes)

    def _displace(self, group: Group) -> None:
        """A slow opener's fence took the slot: everything without a slot moves behind it.

        Slots after this one may be in flight or durable already with greater sequence numbers;
        slot order must be sequence order (I4), so what has no slot gets numbers above all.
        """
        log.warning("displaced by an older writer's fence", wal_id=group.wal_id)
        if self._stopped_by is not None and not self.is_closing:
            self._fail_group(group, self._stopped_by)
            return
        self._prefix.settle(group, landed=False)
        self.next_seq = self._queue.put_back(group.commits, self.next_seq)
        in_flight = self._in_flight.values()
        self.overlay.rebuild(commit for group in in_flight for commit in group.commits)
        for commit in self._queue:
            # What was in flight behind the slot comes before it now.
            commit.decide(self._state(self.overlay, commit.below))
            self.overlay.add(commit)

    def _unknown(self) -> OutcomeUnknown:
        return outcome_unknown(self._keeper)

    @property
    def _keeper(self) -> str:
        return "a majority of the safekeepers" if self.is_quorum else "the object store"

    def _explain(self) -> str:
        """Tell what keeps commits from becoming durable."""
        trouble = self._slots.trouble(after_ms=0.0)
        if trouble is None:
            return f"{self._keeper} has not answered yet"
        return trouble.text(self._clock.monotonic_ms())

    def _fail_group(self, group: Group, error: ShaleError) -> None:
        """A group will not be acknowledged."""
        self._prefix.settle(group, landed=False)
        for commit in group.commits:
            self._fail(commit, error)

    def _fail(self, commit: Commit, error: ShaleError) -> None:
        """Report a commit that was accepted and is lost."""
        report_lost(commit, error)
        self.overlay.remove(commit)
        self._admission.release(commit.size_bytes)
        commit.end(error)
