"""Safekeepers in the process of a test: real acceptors and records, on disks that are lists.

They answer at once, unless they are held. They archive into a real store, in the real way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from shalekv.errors import DatabaseExists, NotAMember
from shalekv.protocol.membership import (
    MEMBER_ID_BYTES,
    Member,
    complete_objects,
    is_archived,
    trim_mark,
)
from shalekv.protocol.quorum import acceptor
from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Flush,
    Reply,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import (
    NO_BALLOT,
    Append,
    Appended,
    Archived,
    Joined,
    LogHealth,
    LogShape,
    Record,
    RelayTarget,
    ToAcceptor,
    ToProposer,
)
from shalekv.store.cas import CasStore
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.links import DatabasePlace, MemberStatus

UPLOAD_TIMEOUT_MS = 60_000
PassOn = Callable[[RelayTarget, Append], None]


def _pass_nothing_on(target: RelayTarget, append: Append) -> None:
    del target, append


class KeptLog:
    """A member: the log of one database on one node."""

    def __init__(self, place: DatabasePlace, member_id: bytes, request_id: bytes) -> None:
        self.place = place
        self.request_id = request_id
        self.state = AcceptorState(member_id)
        self.records: list[Record] = []  # records after the base
        self.replies: dict[int, Callable[[ToProposer], None]] = {}  # by stream
        self.moved = asyncio.Event()  # set and replaced when anything has happened
        self.is_archiver = False
        self.has_space = True
        self.can_archive = True
        self.appends: list[Append] = []  # all that came
        self.relayed: list[Append] = []  # all that others have passed on, and was taken
        self.pass_on: PassOn = _pass_nothing_on
        self._reported_archive: dict[int, int | None] = {}  # end of the archive, by joined stream

    def receive(self, stream: int, message: ToAcceptor) -> None:
        if isinstance(message, Append):
            self.appends.append(message)
            self.is_archiver = message.archiver_id == self.state.member_id
        committed_lsn = self.state.committed_lsn
        self._perform(acceptor.step(self.state, stream, message, has_space=self.has_space))
        self._perform(acceptor.flushed(self.state, self.state.log.last.lsn))
        if isinstance(message, Append) and acceptor.has_taken(self.state, stream, message):
            self._pass_on(message)
            if self.state.committed_lsn > committed_lsn:
                for peer in message.commit_peers:
                    self.pass_on(peer, Append(message.ballot, (), message.committed_lsn))
        self._check()
        self.tell_moved()

    def receive_relayed(self, message: Append) -> None:
        """Take what another member has passed on, if it counts."""
        stepped = acceptor.step_relayed(self.state, message, has_space=self.has_space)
        if stepped is None:
            return
        self.relayed.append(message)
        self._perform(stepped)
        self._pass_on(message)
        self._check()
        self.tell_moved()

    def _pass_on(self, message: Append) -> None:
        if message.relays:
            target, *others = message.relays
            self.pass_on(target, replace(message, relays=tuple(others), commit_peers=()))

    def disconnected(self, stream: int) -> None:
        self.replies.pop(stream, None)
        self._reported_archive.pop(stream, None)
        self.state = acceptor.disconnected(self.state, stream)

    def after(self, lsn: int, up_to_lsn: int | None = None) -> Sequence[Record]:
        """The records behind `lsn`, which is not below the base."""
        found = self.records[lsn - self.state.log.base.lsn :]
        return [each for each in found if up_to_lsn is None or each.lsn <= up_to_lsn]

    def first_lsn_of(self, wal_id: int) -> int | None:
        """The LSN at which an object begins, or will; None: it was trimmed."""
        base = self.state.log.base
        if is_archived(wal_id, base.wal_id):
            return None
        return next(
            (r.lsn for r in self.records if r.wal_id >= wal_id), self.state.log.last.lsn + 1
        )

    def status(self) -> MemberStatus:
        state = self.state
        return MemberStatus(
            self.place,
            state.member_id,
            state.promise,
            state.health,
            state.log,
            state.committed_lsn,
            state.archived_wal_id,
            sum(len(record.payload) for record in self.records),
            self.is_archiver,
        )

    async def archive(self, store: CasStore) -> int | None:
        """Archive all complete objects, poll the archive, and trim."""
        archive = Archive(store, self.place.database_id, upload_timeout_ms=UPLOAD_TIMEOUT_MS)
        tip = await archive.find_tip()
        committed_lsn = self.state.committed_lsn
        objects = complete_objects(self.records, committed_lsn)
        for each in objects:
            if not is_archived(each.wal_id, tip):
                records = [r for r in self.records if each.first_lsn <= r.lsn <= each.last.lsn]
                await archive.add(each.wal_id, records)
        return await self.see(archive)

    async def see(self, archive: Archive) -> int | None:
        """Poll the archive, and trim what it has."""
        seen = await archive.find_tip()
        if seen is None:
            return None
        state = self.state
        objects = complete_objects(self.records, state.committed_lsn)
        mark = trim_mark(objects, seen_wal_id=seen, committed_lsn=state.committed_lsn)
        base = mark or state.log.base
        self.state = acceptor.archived(state, seen, base)
        self.records = [record for record in self.records if record.lsn > base.lsn]
        for stream in [*self._reported_archive]:
            self._tell_archived(stream)
        self._check()
        self.tell_moved()
        return seen

    def damage(self) -> None:
        log = LogShape(self.state.log.base)
        self.records.clear()
        self.state = AcceptorState(
            self.state.member_id, self.state.promise, log, log.base.lsn, health=LogHealth.DAMAGED
        )

    def _perform(self, step: acceptor.Step) -> None:
        self.state, effects = step
        for effect in effects:
            match effect:
                case Reply():
                    self.replies[effect.stream](effect.message)
                    self._note(effect.stream, effect.message)
                case Truncate():
                    self.records = [r for r in self.records if r.lsn <= effect.last.lsn]
                case Reset():
                    self.records.clear()
                case Write():
                    self.records += effect.records
                case Save() | Flush() | CommittedUpTo():
                    pass  # in memory all is durable at once, and tails poll by themselves

    def _note(self, stream: int, reply: ToProposer) -> None:
        match reply:
            case Joined():
                self._reported_archive[stream] = None
                self._tell_archived(stream)
            case Appended():
                self._reported_archive[stream] = reply.archived_wal_id
            case Archived():
                self._reported_archive[stream] = reply.wal_id

    def _tell_archived(self, stream: int) -> None:
        notification = acceptor.archive_notification(
            self.state, stream, self._reported_archive[stream]
        )
        if notification is not None:
            self._perform((self.state, [Reply(stream, notification)]))

    def _check(self) -> None:
        """Check that the records match the state."""
        mark = self.state.log.base
        for record in self.records:
            assert record.follows(mark)
            mark = record.mark
        assert mark == self.state.log.last

    def tell_moved(self) -> None:
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()


class Node:
    """One safekeeper, which may have the logs of several databases."""

    def __init__(self, address: str, random: Random) -> None:
        self.address = address
        self.logs: dict[bytes, KeptLog] = {}  # by database
        self.is_up = True
        self.is_held = False  # replies are not let out
        self.wakes: set[asyncio.Event] = set()  # of those that wait for replies
        self.on_admitted: Callable[[KeptLog], None] = lambda _: None
        self._random = random
        self._stream_count = 0

    def admit(self, place: DatabasePlace, request_id: bytes) -> bytes:
        found = self.logs.get(place.database_id)
        if found is not None:
            is_untouched = found.state.promise == NO_BALLOT and not found.state.log.last.lsn
            if found.request_id != request_id and not is_untouched:
                raise DatabaseExists(f"{self.address} has a log of this database")
            return found.state.member_id
        member_id = self._random.randbytes(MEMBER_ID_BYTES)
        self.logs[place.database_id] = KeptLog(place, member_id, request_id)
        self.on_admitted(self.logs[place.database_id])
        return member_id

    def log(self, database_id: bytes) -> KeptLog:
        """Return the log of a database. Raises `NotAMember`."""
        found = self.logs.get(database_id)
        if found is None:
            raise NotAMember(f"{self.address} does not have this database")
        return found

    def new_stream(self) -> int:
        self._stream_count += 1
        return self._stream_count

    def stop(self) -> None:
        self.is_up = False
        self._wake_all()

    def start(self) -> None:
        self.is_up = True

    def hold(self) -> None:
        self.is_held = True

    def release_all(self) -> None:
        """Let all replies out, and answer at once from now on."""
        self.is_held = False
        self._wake_all()

    def wipe(self) -> None:
        self.logs.clear()

    def _wake_all(self) -> None:
        for wake in self.wakes:
            wake.set()
        for kept in self.logs.values():
            kept.tell_moved()


class Nodes:
    """All safekeepers of a test, by address."""

    def __init__(self, count: int = 3, seed: int = 0) -> None:
        random = Random(f"{seed}/nodes")
        self.nodes = {f"n{n}:1": Node(f"n{n}:1", random) for n in range(1, count + 1)}
        self.cut_ways: set[tuple[str, str]] = set()  # from one node to another
        # held messages between nodes; None: they are delivered at once
        self.late: list[Callable[[], None]] | None = None
        for node in self:
            node.on_admitted = self._connect(node)

    def __getitem__(self, address: str) -> Node:
        return self.nodes[address]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def _connect(self, node: Node) -> Callable[[KeptLog], None]:
        """Let a node pass on to the others what its members take."""

        def connect(kept: KeptLog) -> None:
            def pass_on(target: RelayTarget, append: Append) -> None:
                other = self.nodes[target.address]
                found = other.logs.get(kept.place.database_id)
                is_cut = (node.address, target.address) in self.cut_ways
                if is_cut or found is None or found.state.member_id != target.member_id:
                    return
                if self.late is not None:
                    self.late.append(lambda: found.receive_relayed(append))
                elif node.is_up and other.is_up:
                    found.receive_relayed(append)

            kept.pass_on = pass_on

        return connect

    def admit_all(self, place: DatabasePlace, request_id: bytes = b"r" * 16) -> list[Member]:
        return [Member(node.admit(place, request_id), node.address) for node in self]

    def logs(self, database_id: bytes) -> list[KeptLog]:
        return [node.logs[database_id] for node in self if database_id in node.logs]

    async def archive(self, store: CasStore, database_id: bytes) -> None:
        """Let the appointed nodes that are up archive, and the others see it."""
        for node in self:
            kept = node.logs.get(database_id)
            if kept is not None and node.is_up and kept.is_archiver and kept.can_archive:
                await kept.archive(store)
        for node in self:
            kept = node.logs.get(database_id)
            if kept is not None and node.is_up and not kept.is_archiver:
                await kept.see(Archive(store, database_id, upload_timeout_ms=UPLOAD_TIMEOUT_MS))
