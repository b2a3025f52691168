"""A simulated safekeeper: the shipped acceptor on a simulated disk.

Effects are carried out one at a time and in order, when the schedule says so; a promise is saved
beside the log and waits only for earlier effects of its own list. A reply is sent when all earlier
effects of its list were carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from shalekv.protocol import membership
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import LogObject, Member
from shalekv.protocol.quorum import acceptor
from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Effect,
    Flush,
    Reply,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import (
    Append,
    LogEnd,
    LogHealth,
    Record,
    ToAcceptor,
    ToProposer,
)
from tests.sim.quorum.judge import Disk, Judge

Send = Callable[[int, ToProposer], None]


_ON_LOG = (Truncate, Reset, Write, Flush)  # carried out one after the other, across all lists


class Safekeeper:
    """One node, with at most one member at a time."""

    def __init__(self, name: str, member_id: bytes, judge: Judge, send: Send) -> None:
        """A member that was admitted just now. `send` takes a reply for a stream."""
        self.name = name
        self.judge = judge
        self._send = send
        self.wipe(member_id)

    def wipe(self, member_id: bytes) -> None:
        """The disk is a new one, and the node is admitted as another member."""
        self.member_id = member_id
        self.disk = Disk()
        self.state: AcceptorState | None = None
        self.jobs: deque[deque[Effect]] = deque()
        self.streams = 0
        self.has_space = True
        self.start()

    @property
    def member(self) -> Member:
        return Member(self.member_id, self.name)

    @property
    def is_up(self) -> bool:
        return self.state is not None

    def open_stream(self) -> int:
        self.streams += 1
        return self.streams

    def receive(self, stream: int, message: ToAcceptor) -> None:
        """Step the message, and queue its effects for the disk."""
        assert self.state is not None
        before = self.state
        self.state, effects = acceptor.step(before, stream, message, has_space=self.has_space)
        self.judge.stepped(self.name, before, self.state)
        self._submit(effects)

    def receive_relayed(self, message: Append) -> None:
        """Step an append that another member has passed on."""
        assert self.state is not None
        before = self.state
        step = acceptor.step_relayed(before, message, has_space=self.has_space)
        if step is not None:
            self.state, effects = step
            self.judge.stepped(self.name, before, self.state)
            self._submit(effects)

    def disconnected(self, stream: int) -> None:
        if self.state is not None:
            self.state = acceptor.disconnected(self.state, stream)

    def work(self) -> bool:
        if not self.jobs:
            return False
        effect = self.jobs[0].popleft()
        self.disk.perform(effect)
        if isinstance(effect, Flush):
            self._flushed()
        self._release()
        return True

    def sync(self) -> None:
        while self.work():
            pass

    def crash(self, random: Random | None = None, *, is_power_lost: bool = True) -> None:
        """The process ends; with the power the disk loses what it was not made to keep."""
        interrupted = self.jobs[0][0] if self.jobs else None
        self.state = None
        self.jobs.clear()
        if is_power_lost:
            self.disk.lose_power(random, interrupted=interrupted)
        else:
            self.disk.stored = dict(self.disk.cached)

    def start(self) -> None:
        self.state = self.disk.start(self.member_id)
        self.streams = 0

    def damage(self, lsn: int) -> None:
        """A record can't be read any more. REQUIRES: the process does not run."""
        self.disk.stored[lsn] = None

    def note_archived(self, wal_id: int, base: LogEnd) -> None:
        """This node has seen all objects up to `wal_id`, and drops its log up to `base`."""
        assert self.state is not None
        self.sync()
        self.state = acceptor.archived(self.state, wal_id, base)
        self.disk.trim(self.state.log.base)

    def readable(self) -> Sequence[Record]:
        """The records of the log, durable ones and others, as another node would be sent them."""
        assert self.state is not None
        if self.state.health is LogHealth.DAMAGED:
            return ()
        lsns = range(self.state.log.base.lsn + 1, self.state.log.last.lsn + 1)
        found = [self.disk.cached.get(lsn) for lsn in lsns]
        return [record for record in found if record is not None]

    def _submit(self, effects: Sequence[Effect]) -> None:
        self.jobs.append(deque(effects))
        self._release()

    def _flushed(self) -> None:
        assert self.state is not None
        self.state, effects = acceptor.flushed(self.state, self.disk.synced_lsn)
        self._submit(effects)

    def _release(self) -> None:
        """Send what may be sent now, and save promises that wait for nothing of their own list."""
        is_saving = False
        for job in list(self.jobs):
            while job and not isinstance(job[0], _ON_LOG):
                if isinstance(job[0], Save) and is_saving:
                    break
                self._carry_out(job.popleft())
            is_saving = is_saving or any(isinstance(each, Save) for each in job)
        self.jobs = deque(job for job in self.jobs if job)

    def _carry_out(self, effect: Effect) -> None:
        assert self.state is not None
        match effect:
            case Save():
                self.disk.perform(effect)
            case CommittedUpTo():
                self.disk.committed_lsn = effect.lsn
            case Reply():
                self.judge.replied(self.name, self.disk, effect.message)
                self._send(effect.stream, effect.message)
            case _:
                pass


class Bucket:
    """Edits of the manifest happen at once, and one after the other."""

    def __init__(
        self, members: Sequence[Member], judge: Judge, mode: WalMode = WalMode.QUORUM
    ) -> None:
        self.judge = judge
        self.manifest = Manifest(
            database_id=bytes(16),
            manifest_id=0,
            write_id=bytes(16),
            wal_mode=mode,
            wal_members=tuple(map(str, members)),
        )

    def edit(self, change: Callable[[Manifest], Manifest]) -> None:
        """Replace the manifest. Raises what `change` does."""
        changed = change(self.manifest)
        self.manifest = replace(changed, manifest_id=self.manifest.manifest_id + 1)

    def claim(self, epoch: int, nonce: bytes) -> None:
        self.judge.claimed(epoch)
        self.edit(lambda m: replace(m, writer_epoch=epoch, writer_nonce=nonce))

    @property
    def archive_tip(self) -> int | None:
        return membership.archive_tip(self.judge.archive, self.manifest.wal_id_last_compacted)


def complete(safekeeper: Safekeeper) -> Sequence[tuple[LogObject, Sequence[Record]]]:
    """The objects of a member's log that may be archived, with their records."""
    assert safekeeper.state is not None
    records = safekeeper.readable()
    objects = membership.complete_objects(records, safekeeper.state.committed_lsn)
    by_lsn = {record.lsn: record for record in records}
    return [
        (each, [by_lsn[lsn] for lsn in range(each.first_lsn, each.last.lsn + 1)])
        for each in objects
    ]


def archive(safekeeper: Safekeeper, bucket: Bucket, *, count_max: int = 1_000) -> int:
    """Put objects that are complete and missing; how many."""
    tip = bucket.archive_tip
    found = [(o, r) for o, r in complete(safekeeper) if not membership.is_archived(o.wal_id, tip)]
    for each, records in found[:count_max]:
        bucket.judge.put(safekeeper.name, each.wal_id, records)
    return len(found[:count_max])


def trim(safekeeper: Safekeeper, bucket: Bucket) -> bool:
    """Drop what the member sees in the archive; whether there was anything."""
    assert safekeeper.state is not None
    tip = bucket.archive_tip
    mark = membership.trim_mark(
        (each for each, _ in complete(safekeeper)),
        seen_wal_id=tip,
        committed_lsn=safekeeper.state.committed_lsn,
    )
    if mark is None or tip is None:
        return False
    safekeeper.note_archived(tip, mark)
    return True
