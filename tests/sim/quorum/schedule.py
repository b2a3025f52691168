"""A simulated database with safekeepers, and a schedule that is drawn from a seed.

Each step is one event: a writer and some members exchange messages for a while, a message arrives
late, a process ends or starts, a disk is exchanged or damaged, an operator changes the members,
another writer opens. Parts that are not drawn for long are slow, or stalled. At the end faults
stop, and one more writer must be able to open, and to commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shalekv.errors import Fenced, InvalidRequest
from shalekv.protocol.membership import Member, begin_change, cancel_change
from shalekv.protocol.quorum.acceptor import Flush, Truncate
from shalekv.protocol.quorum_records import Append, LogHealth
from tests.sim.quorum.judge import Violation
from tests.sim.quorum.parts import THEMES, Parts
from tests.sim.quorum.safekeeper import Safekeeper, archive, trim
from tests.sim.quorum.writer import Writer
from tests.sim.simulation import Simulation

STEPS = 160
WRITERS_MAX = 10
QUIET_ROUNDS = 400
EVENTS_NOTED = 60

_CRASHING = ("disks", "everything")
_CRASHES_BEFORE: Mapping[type, float] = {Truncate: 0.4, Flush: 0.06}


class QuorumSchedule(Parts):
    """Events that may happen to the parts."""

    def __init__(self, seed: int, theme: str | None = None) -> None:
        """With the theme that the seed chooses, or with this one."""
        super().__init__(seed)
        drawn = self.random.choice(list(THEMES))
        self._theme = theme or drawn
        self._relayed: list[Append] = []  # on their way from member to member
        self._note("the theme is", self._theme)

    def run(self, steps: int = STEPS) -> None:
        """Run this many events, then check the end."""
        weights = THEMES[self._theme]
        actions: list[Callable[[], None]] = [getattr(self, f"_{name}") for name in weights]
        for action in self.random.choices(actions, list(weights.values()), k=steps):
            action()
        self._end_well()

    def _burst(self) -> None:
        """Deliver messages between one writer and some members for a while."""
        writer = self._some_writer([writer for writer in self.writers if writer.is_live])
        if writer is None:
            return
        names = self._some_names()
        for member in writer.configuration.everyone:
            if member.address in names and writer.stream_to(member.id) is None:
                self._connect_to(writer, member)
        streams = [s for s in writer.streams if s.is_open and s.member.address in names]
        nodes = [node for node in self.nodes if node.name in names]
        self._note("between", writer.name, "and", *names)
        was_leading = writer.leader is not None
        for _ in range(self.random.choice((3, 10, 30, 80))):
            ready: list[tuple[Callable[..., object], object]] = [
                *((self._deliver_on, each) for each in streams if each.there),
                *((self._answer_on, each) for each in streams if each.back),
                *((Safekeeper.work, each) for each in nodes if each.jobs),
            ]
            if not ready:
                break
            act, on = self.random.choice(ready)
            act(on)
            if not was_leading and writer.leader is not None and self.random.random() < 0.5:
                break  # it is elected, and whom it meets first is open
            if self._theme in _CRASHING:
                self._crash_at_work(nodes)

    def _crash_at_work(self, nodes: Sequence[Safekeeper]) -> None:
        """The power goes where it matters: before what was asked for is on disk."""
        for node in nodes:
            likely = _CRASHES_BEFORE.get(type(node.jobs[0][0]), 0.0) if node.jobs else 0.0
            if likely and self.random.random() < likely:
                self._stop(node)
                self._note(node.name, "crashes at its work")

    def _some_writer(self, writers: Sequence[Writer]) -> Writer | None:
        """The latest as a rule: those before it are stalled."""
        if writers and self.random.random() < 0.7:
            return writers[-1]
        return self._some(writers)

    def _some_names(self) -> list[str]:
        """Some of the members that the manifest names, or all; seldom others."""
        texts = (*self.bucket.manifest.wal_members, *self.bucket.manifest.wal_members_next)
        names = sorted({Member.parse(text).address for text in texts})
        if self.random.random() < 0.1:
            names = [node.name for node in self.nodes]
        return self.random.sample(names, self.random.randint(1, len(names)))

    def _arrive_late(self) -> None:
        """A message arrives that was on its way for long, on a stream that was given up maybe."""
        streams = [s for s in self._streams() if s.there or s.back]
        given_up = [s for s in streams if not s.is_open]
        stream = self._some(given_up if given_up and self.random.random() < 0.5 else streams)
        if stream is not None and stream.there:
            self._deliver_on(stream)
        elif stream is not None:
            self._answer_on(stream)

    def _work(self) -> None:
        node = self._some([node for node in self.nodes if node.jobs])
        if node is not None:
            node.work()

    def _write(self) -> None:
        """A leader makes a record, and sends what there is."""
        writer = self._some_writer(self._leaders())
        if writer is None:
            return
        for _ in range(self.random.choice((1, 1, 3))):
            self._append(writer)
        for stream in writer.streams:
            if stream.is_open:
                writer.send(stream)

    def _append(self, writer: Writer) -> None:
        last = writer.log.last
        wal_id = last.next_wal_id
        if not last.ends_object and self.random.random() < 0.8:
            wal_id = last.wal_id or 0
        self._payloads += 1
        ends_object = self.random.random() < 0.5
        record = writer.append(wal_id, b"%d" % self._payloads, ends_object=ends_object)
        self._note(writer.name, "writes", record)

    def _open(self) -> None:
        live = [writer for writer in self.writers if writer.is_live]
        if len(self.writers) < WRITERS_MAX and (not live or self.random.random() < 0.5):
            self._new_writer()

    def _connect(self) -> None:
        """A writer connects, to one it is connected to perhaps: what is on its way may be late."""
        writer = self._some_writer([writer for writer in self.writers if writer.is_live])
        if writer is None:
            return
        members = writer.configuration.everyone
        streams = [writer.stream_to(member.id) for member in members]
        waiting = [s.member for s in streams if s is not None and s.has_answered and s.there]
        member = self._some(waiting or members)
        if member is not None:
            self._connect_to(writer, member)

    def _connect_to(self, writer: Writer, member: Member) -> None:
        self._note(writer.name, "connects to", member.address)
        stream = writer.connect(member)
        if writer.leader is not None and self.random.random() < 0.3:
            writer.tell_commit(stream)

    def _relay(self) -> None:
        """A member passes an append on to another one, or what was passed on arrives, some day."""
        writer = self._some_writer(self._leaders())
        if writer is not None and writer.leader is not None and writer.log.base != writer.log.last:
            first = self.random.randint(writer.log.base.lsn + 1, writer.log.last.lsn)
            last = min(writer.log.last.lsn, first + self.random.choice((0, 2)))
            records = tuple(writer.records[lsn] for lsn in range(first, last + 1))
            leader = writer.leader
            self._relayed.append(Append(leader.ballot, records, leader.committed_lsn))
        for message in self.random.sample(self._relayed, min(3, len(self._relayed))):
            node = self._some([node for node in self.nodes if node.is_up])
            if node is not None:
                self._note(node.name, "is passed", message)
                node.receive_relayed(message)

    def _break_stream(self) -> None:
        """One side gives up; what is on its way to the other may arrive all the same, or not."""
        stream = self._some(self._streams())
        if stream is None:
            return
        self._note(
            f"stream {stream.number} of {stream.writer.name} to {stream.member.address} ends"
        )
        stream.is_open = False
        if self.random.random() < 0.5:
            self._end_there(stream)

    def _broadcast(self) -> None:
        """Have a leader send its commit point on any stream."""
        writer = self._some(self._leaders())
        streams = [s for s in self._streams() if s.writer is writer and s.is_open]
        stream = self._some([s for s in streams if not s.is_joined] or streams)
        if writer is not None and stream is not None:
            writer.tell_commit(stream)

    def _poll_manifest(self) -> None:
        writer = self._some(self._leaders())
        if writer is not None:
            writer.reconfigure(self.bucket.manifest)
            self._note(f"{writer.name} looks at the manifest")

    def _stop_writer(self) -> None:
        writer = self._some([writer for writer in self.writers if writer.is_live])
        if writer is not None:
            writer.ended = "killed"
            self._note(f"{writer.name} is killed")

    def _crash(self) -> None:
        running = [node for node in self.nodes if node.is_up]
        cutting = [node for node in running if node.jobs and isinstance(node.jobs[0][0], Truncate)]
        node = self._some(cutting if cutting and self.random.random() < 0.7 else running)
        if node is not None:
            self._stop(node)
            self._note(f"{node.name} crashes")

    def _start(self) -> None:
        node = self._some([node for node in self.nodes if not node.is_up])
        if node is not None:
            self._start_one(node)

    def _damage(self) -> None:
        """Damage a record on some disk, and restart the node."""
        node = self._some(self.nodes)
        assert node is not None
        if not node.disk.stored or self._lossy_count(node) > 0:
            return
        if node.is_up:
            self._stop(node)
        lsn = self._some(sorted(node.disk.stored))
        if lsn is not None:
            node.damage(lsn)
            self._bad.add(node.name)
            self._note(f"record {lsn} of {node.name} goes bad")

    def _wipe(self) -> None:
        node = self._some(self.nodes)
        assert node is not None
        if self._lossy_count(node) > 0:
            return
        self._arrived = {key: s for key, s in self._arrived.items() if key[0] != node.name}
        node.wipe(self._new_id())
        self._note(f"{node.name} has a new disk and is member {node.member_id!r}")

    def _fill_disk(self) -> None:
        node = self._some(self.nodes)
        assert node is not None
        node.has_space = not node.has_space

    def _archive(self) -> None:
        node = self._some([node for node in self.nodes if node.is_up])
        if node is not None:
            archive(node, self.bucket, count_max=self.random.choice((1, 2, 9)))

    def _archive_all(self) -> None:
        """Quiet phase: some members get the commit point, archive everything, and trim."""
        names = self._some_names()
        writer = self._some_writer(self._leaders())
        for stream in writer.streams if writer is not None else ():
            if stream.is_joined and stream.is_open and stream.member.address in names:
                stream.writer.tell_commit(stream)
                while stream.there:
                    self._deliver_on(stream)
        for node in self.nodes:
            if node.is_up and node.name in names:
                node.sync()
                archive(node, self.bucket)
                trim(node, self.bucket)
        self._note("all is archived and trimmed by", *names)
        if writer is not None and self.random.random() < 0.3:
            writer.ended = "killed"

    def _trim(self) -> None:
        if self.random.random() < 0.3:
            self._trim_leader()
            return
        node = self._some([node for node in self.nodes if node.is_up])
        if node is not None and trim(node, self.bucket):
            assert node.state is not None
            self._note(f"{node.name} is trimmed to {node.state.log.base}")

    def _trim_leader(self) -> None:
        writer = self._some(self._leaders())
        if writer is None or writer.leader is None:
            return
        tip = self.bucket.archive_tip
        bases = [
            record.mark
            for record in writer.records.values()
            if record.ends_object
            and record.lsn <= writer.leader.committed_lsn
            and tip is not None
            and record.wal_id <= tip
        ]
        if bases:
            self._note(f"{writer.name} lets go of records up to {bases[-1].lsn}")
            writer.trim(bases[-1])

    def _change_members(self) -> None:
        """An operator begins or cancels a change, or a writer ends one."""
        manifest = self.bucket.manifest
        if not manifest.wal_members_next:
            members = list(map(Member.parse, manifest.wal_members))
            self.random.shuffle(members)
            gone = members[: self.random.choice((0, 1, 1, 2, 3))]
            kept = [member for member in members if member not in gone]
            addresses = {member.address for member in kept}
            fresh = [node.member for node in self.nodes if node.name not in addresses]
            self.random.shuffle(fresh)
            wanted = (*kept, *fresh)[: self.random.choice((len(members), 3, 5))]
            try:
                self.bucket.edit(lambda m: begin_change(m, wanted))
            except InvalidRequest:
                return
        elif self.random.random() < 0.3:
            self.bucket.edit(cancel_change)
        else:
            self._finish_change()
            return
        self._note(f"members: {self.bucket.manifest.wal_members}")
        self._note(f"and next: {self.bucket.manifest.wal_members_next}")

    def _finish_change(self) -> None:
        leaders = [
            w for w in self._leaders() if w.leader is not None and w.leader.may_finish_change
        ]
        writer = self._some(leaders)
        if writer is None:
            return
        try:
            self.bucket.edit(writer.finish_change)
        except (Fenced, InvalidRequest):
            return
        self._note(f"{writer.name} finishes the change: {self.bucket.manifest.wal_members}")

    def _end_well(self) -> None:
        """I13: when faults stop, a writer opens and commits, and what was acknowledged is there."""
        for node in self.nodes:
            if not node.is_up:
                self._start_one(node)
            node.has_space = True
            node.sync()
        for writer in self.writers:
            writer.ended = writer.ended or "killed"
        self._is_wild = False
        self._note("faults stop")
        last = self._last_writer()
        if last is None:
            return
        for node in self.nodes:
            archive(node, self.bucket)
        self.judge.reached(last.records)

    def _last_writer(self) -> Writer | None:
        """One that has committed; None: too many members have no sound log."""
        why = ""
        for _ in range(3):
            writer = self._new_writer()
            for member in writer.configuration.everyone:
                writer.connect(member)
            sound = {n.member_id for n in self.nodes if n.disk.health is LogHealth.SOUND}
            if not writer.configuration.is_majority(sound):
                return None
            for _ in range(QUIET_ROUNDS):
                self._quiet_round(writer)
                leader = writer.leader
                if leader is not None and leader.committed_lsn >= leader.first_own_lsn:
                    return writer
                if not writer.is_live:
                    break
            why = writer.ended or "it waits"
        raise Violation(f"I13: no writer can open: {why}")

    def _quiet_round(self, writer: Writer) -> None:
        for stream in writer.streams:
            if stream.there:
                self._deliver_on(stream)
            if stream.back:
                self._answer_on(stream)
            if writer.leader is not None:
                writer.send(stream)
        for node in self.nodes:
            node.sync()


async def quorum_core(sim: Simulation) -> QuorumSchedule:
    """A profile of the simulation: what breaks a rule is raised, with the last events noted."""
    core = QuorumSchedule(sim.seed)
    try:
        core.run()
    finally:
        for line in core.timeline(EVENTS_NOTED).splitlines():
            sim.note(line)
    return core
