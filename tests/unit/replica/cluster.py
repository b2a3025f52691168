"""A quorum database with replicas in virtual time; the test drives writer, archive and members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.wal_record import make_record
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum.proposer import Candidacy, Leader
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Ballot,
    Joined,
    Record,
    ToAcceptor,
    ToProposer,
    Vote,
    VoteRequest,
)
from shalekv.replica.engine import ReplicaEngine
from shalekv.settings import StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from shalekv.write.commit import Commit, WalContents
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.links import DatabasePlace
from shalekv.write.quorum.wal import object_bytes
from shalekv.write.wal import encode_wal
from tests.kit.engine.commits import group_of
from tests.kit.engine.replica import ReplicatedDatabase, store_now_ms
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.nodes import UPLOAD_TIMEOUT_MS, KeptLog, Node, Nodes

Reply = TypeVar("Reply", bound=ToProposer)
STREAM = 0  # of the writer; those of others have greater numbers
STEPS_MAX = 100  # steps of the loop within which a commit is seen


@dataclass(slots=True, eq=False)
class Safekeeper:
    """One safekeeper of the cluster."""

    node: Node
    kept: KeptLog
    hears: bool = True  # the writer reaches it

    @property
    def member(self) -> Member:
        return Member(self.kept.state.member_id, self.node.address)

    def receive(self, message: ToAcceptor, wanted: type[Reply]) -> Reply:
        """Pass a message of the writer to the safekeeper; returns the reply of this kind."""
        replies: list[ToProposer] = []
        self.kept.replies[STREAM] = replies.append
        self.kept.receive(STREAM, message)
        return [each for each in replies if isinstance(each, wanted)][-1]


class QuorumCluster(ReplicatedDatabase):
    """The database, and its safekeepers; the first three are members at first."""

    safekeepers: list[Safekeeper]
    others: list[Safekeeper]
    links: InProcessLinks
    leader: Leader
    database_id: bytes

    @classmethod
    async def opened(cls, seed: int = 0, *, is_quorum: bool = True) -> QuorumCluster:
        """A new database with a writer; its log is still in the bucket unless `is_quorum`."""
        cluster = await cls.created(seed)
        nodes = Nodes(6)
        cluster.database_id = (await cluster.manifest()).database_id
        nodes.admit_all(DatabasePlace(cluster.database_id, cluster.store.url))
        all_safekeepers = [Safekeeper(node, node.log(cluster.database_id)) for node in nodes]
        cluster.safekeepers, cluster.others = all_safekeepers[:3], all_safekeepers[3:]
        cluster.links = InProcessLinks(nodes)
        if is_quorum:
            await cluster.switch()
        return cluster

    def tails(self, safekeeper: Safekeeper) -> int:
        return self.links.tails[safekeeper.node.address]

    async def switch(self) -> None:
        """Switch the log to the safekeepers, as another writer, after a fence in the bucket."""
        await self.take_over()
        self.slot += 1
        await self.fill_with(self.slot, self.writer)
        await self.edit(
            lambda m: replace(
                m,
                wal_mode=WalMode.QUORUM,
                wal_generation=1,
                wal_members=tuple(str(safekeeper.member) for safekeeper in self.safekeepers),
            )
        )
        await self.elect()

    def safekeeper(self, member_id: bytes) -> Safekeeper:
        return next(each for each in self.safekeepers if each.member.id == member_id)

    async def elect(self) -> None:
        """Open the database as another writer: gather votes, fill the members, and fence."""
        await self.take_over()
        manifest = await self.manifest()
        ballot = Ballot(self.writer.epoch, self.writer.nonce)
        candidacy = Candidacy(ballot, Configuration.of(manifest))
        for safekeeper in self._connected():
            vote = safekeeper.receive(VoteRequest(safekeeper.member.id, ballot), Vote)
            candidacy = candidacy.voted(safekeeper.member.id, vote)
        assert candidacy.is_won
        self.leader = Leader.of(candidacy)
        donor = self.safekeeper(candidacy.donor_id)
        self._log = {record.lsn: record for record in donor.kept.records}
        for safekeeper in self._connected():
            safekeeper.receive(self.leader.elected(safekeeper.member.id), Joined)
        wal_id = max(self.leader.log.last.next_wal_id, self.slot + 1)
        self.append(self._sst(wal_id, WalContents()), wal_id=wal_id, ends_object=True)

    async def put(self, **values: bytes) -> int:
        """Commit one put in the open object; returns its sequence number."""
        return self.write(self.commit(**values))

    def write(self, commit: Commit, *, ends_object: bool = False) -> int:
        wal_id = self.open_wal_id
        contents = group_of(wal_id, commit).contents()
        self.append(self._sst(wal_id, contents), ends_object=ends_object)
        return commit.seq

    @property
    def open_wal_id(self) -> int:
        last = self.leader.log.last
        return last.next_wal_id if last.ends_object or last.wal_id is None else last.wal_id

    def seal(self) -> None:
        """End the open object, if there is one."""
        if not self.leader.log.last.ends_object:
            self.append(b"", ends_object=True)

    def append(self, payload: bytes, *, ends_object: bool, wal_id: int | None = None) -> Record:
        record = make_record(
            self.leader.log.last,
            epoch=self.leader.ballot.epoch,
            wal_id=self.open_wal_id if wal_id is None else wal_id,
            ends_object=ends_object,
            payload=payload,
        )
        self._log[record.lsn] = record
        self.leader = self.leader.appended(record)
        for safekeeper in self._connected():
            self._send(safekeeper)
        self.tell_commit()
        return record

    def tell_commit(self) -> None:
        """Send the commit point, and missing records, to all members that are connected."""
        for safekeeper in self._connected():
            self._send(safekeeper)
            safekeeper.kept.receive(
                STREAM, Append(self.leader.ballot, (), self.leader.committed_lsn)
            )

    async def archive(self, *, trims: bool = False) -> int:
        """Archive all complete objects; with `trims` safekeepers drop them. Returns the next."""
        committed = [r for lsn, r in sorted(self._log.items()) if lsn <= self.leader.committed_lsn]
        by_object: dict[int, list[Record]] = {}
        for record in committed:
            by_object.setdefault(record.wal_id, []).append(record)
        filled = await self.wal()
        for wal_id, records in by_object.items():
            is_complete = records[-1].ends_object or wal_id < committed[-1].wal_id
            if is_complete and wal_id not in filled:
                name = names.wal_name(wal_id)
                assert await self.store.create(name, object_bytes(name, records)) == Created()
        if trims:
            cas = CasStore(self.another_store(), self.local_runtime(), StoreSettings())
            archive = Archive(cas, self.database_id, upload_timeout_ms=UPLOAD_TIMEOUT_MS)
            for safekeeper in self._connected():
                await safekeeper.kept.see(archive)
        return max(await self.wal(), default=-1) + 1

    async def set_members(self, safekeepers: Sequence[Safekeeper]) -> Manifest:
        """Replace the members by others that have the whole log."""
        for safekeeper in safekeepers:
            if safekeeper not in self.safekeepers:
                safekeeper.receive(self.leader.elected(safekeeper.member.id), Joined)
        self.safekeepers = [*safekeepers]
        manifest = await self.edit(
            lambda m: replace(
                m,
                wal_generation=m.wal_generation + 1,
                wal_members=tuple(str(safekeeper.member) for safekeeper in safekeepers),
            )
        )
        self.leader = self.leader.reconfigured(Configuration.of(manifest))
        self.tell_commit()
        return manifest

    def _connected(self) -> list[Safekeeper]:
        return [safekeeper for safekeeper in self.safekeepers if safekeeper.hears]

    def _send(self, safekeeper: Safekeeper) -> None:
        state = safekeeper.kept.state
        if state.leader is None or state.promise != self.leader.ballot:
            safekeeper.receive(self.leader.elected(safekeeper.member.id), Joined)
        last_lsn = safekeeper.kept.state.log.last.lsn
        missing = tuple(r for lsn, r in sorted(self._log.items()) if lsn > last_lsn)
        if missing:
            append = Append(self.leader.ballot, missing, self.leader.committed_lsn)
            last_lsn = safekeeper.receive(append, Appended).flushed_lsn
        self.leader = self.leader.acknowledged(safekeeper.member.id, last_lsn)

    def _sst(self, wal_id: int, contents: WalContents) -> bytes:
        properties = SstProperties(
            name=names.wal_name(wal_id),
            database_id=self.database_id,
            writer_epoch=self.writer.epoch,
            writer_nonce=self.writer.nonce,
            write_id=self.runtime().random.randbytes(16),
            logical_time_ms=store_now_ms(),
        )
        return encode_wal(properties, contents, 64)


async def steps(until: Callable[[], bool]) -> int:
    """Let other tasks run until the condition holds, without advancing time; returns the count."""
    began_s = asyncio.get_running_loop().time()
    for count in range(STEPS_MAX):
        if until():
            assert asyncio.get_running_loop().time() == began_s
            return count
        await asyncio.sleep(0)
    raise AssertionError(f"not within {STEPS_MAX} steps")


async def shown(engine: ReplicaEngine, seq: int) -> None:
    """The replica shows this commit, and no newer one, without advancing time."""
    await steps(lambda: engine.watermark.seq == seq)
