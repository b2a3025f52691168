"""Opening a database with its log in safekeepers, and recovery of one without a majority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from shalekv.errors import (
    Fenced,
    IllegalState,
    InvalidRequest,
    ManifestVersionExists,
    NotAMember,
    QuorumUnavailable,
)
from shalekv.format.names import MANIFEST_FOLDER
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.membership import Configuration, begin_change
from shalekv.protocol.quorum_records import Ballot, Record, VoteRequest
from shalekv.settings import QuorumSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.commit import WalContents
from shalekv.write.opening import open_log
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.electing import gather_votes
from shalekv.write.quorum.links import DatabasePlace, Link
from shalekv.write.quorum.membership import ForcedRecovery, Recovery
from shalekv.write.quorum.peer import QuorumContext
from shalekv.write.wal import ObjectStoreWal
from tests.kit.engine.databases import contents
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import TIMES, QuorumDatabase, runtime, until
from tests.kit.store import HeldStore
from tests.kit.virtual_time import virtual_time


@virtual_time(5)
async def test_archived_records_are_not_applied_twice() -> None:
    """Records of objects that are archived already are not applied a second time."""
    database = await QuorumDatabase.created()
    for kept in database.logs():
        kept.can_archive = False
    async with database.writing(archive_interval_ms=0) as writing:
        for key in (b"a", b"b", b"c"):
            await writing.put(key)
    ahead = max(database.logs(), key=lambda kept: kept.state.log.last.lsn)
    archive = Archive(database.cas(), database.database_id, upload_timeout_ms=1_000)
    await archive.find_tip()
    for wal_id in (0, 1, 2):
        await archive.add(wal_id, [each for each in ahead.records if each.wal_id == wal_id])
    opened = await database.opened()
    assert contents(opened) == [(b"a", b"v"), (b"b", b"v"), (b"c", b"v")]
    assert opened.safekeepers is not None
    assert opened.safekeepers.report().archived_wal_id == 2


@virtual_time(3)
async def test_open_once_does_not_fence_the_first_opener() -> None:
    """With `open_once`, the loser of a race gets no promise of a member."""
    database = await QuorumDatabase.created()
    store = HeldStore(database.objects, folder=MANIFEST_FOLDER)
    losing = asyncio.create_task(
        open_log(
            CasStore(store, runtime(1), StoreSettings()),
            WriterSettings(open_once=True),
            address="there:1",
            links=database.links(),
            quorum=QuorumSettings.model_validate(TIMES),
        )
    )
    await store.arrived(1)
    async with database.writing() as writing:
        store.release_all()
        with pytest.raises(ManifestVersionExists):
            await losing
        await writing.put(b"a")
    assert {kept.state.promise.epoch for kept in database.logs()} == {1}


async def _nothing() -> None:
    """No object is compacted."""


@pytest.mark.parametrize("is_compacted", [False, True])
@virtual_time(1)
async def test_a_foreign_object_in_the_archive_is_not_accepted(
    is_compacted: bool,  # noqa: FBT001 - a parameter
) -> None:
    """A foreign object under a name of the log stops archiving and opening (CE17).

    It may be an older writer's fence, compacted or not. No member archives over it.
    """
    database = await QuorumDatabase.created()
    database.let_archive(False)
    async with database.writing(archive_interval_ms=0, is_killed=True) as writing:
        for key in (b"a", b"b"):
            await writing.put(key)
    ahead = max(database.logs(), key=lambda kept: kept.state.log.last.lsn)
    cas = database.cas()
    archive = Archive(cas, database.database_id, upload_timeout_ms=1_000)
    await archive.find_tip()
    await archive.add(0, ahead.records[:1])
    slots = ObjectStoreWal(
        cas,
        WriterId(0, bytes(16)),
        database_id=database.database_id,
        block_bytes=4_096,
        now_ms=lambda: 0,
        last_compacted=_nothing,
    )
    assert await slots.create(1, WalContents()) is None
    if is_compacted:
        await database.edit(lambda m: replace(m, wal_id_last_compacted=1, wal_id_last_seen=1))
    with pytest.raises(IllegalState, match="is of epoch 0, and not what the log"):
        await database.opened()
    for call in (archive.add, archive.check):
        with pytest.raises(IllegalState, match="Two histories"):
            await call(1, [each for each in ahead.records if each.wal_id == 1])


@virtual_time(5)
async def test_members_that_do_not_answer_are_named() -> None:
    """Without a majority no epoch is claimed, and the error names each missing member and why."""
    database = await QuorumDatabase.created()
    database.nodes["n1:1"].stop()
    database.nodes["n3:1"].hold()
    with pytest.raises(QuorumUnavailable, match=r"1 of 3 .*n1:1 \(.*\); n3:1 \(.*3000 ms\)"):
        await database.opened()
    assert (await database.manifest()).writer_epoch == 0


@virtual_time(5)
async def test_epoch_is_above_all_promises() -> None:
    """A new epoch is above all promises of members, and a duplicate epoch is fenced (CE14)."""
    database = await QuorumDatabase.created()
    for kept in database.logs():
        kept.replies[0] = lambda _: None
        kept.receive(0, VoteRequest(kept.state.member_id, Ballot(7, b"x" * 16)))
    context = QuorumContext(database.links(), database.place, QuorumSettings(), runtime(1))
    with pytest.raises(Fenced, match="the promise of the safekeeper"):
        await gather_votes(
            context, Configuration.of(await database.manifest()), Ballot(7, b"twin" * 4)
        )
    assert (await database.opened()).manifest.own.epoch == 8


class _Disturbing(InProcessLinks):
    """Links that disturb a member between the votes and the first fetch."""

    def __init__(self, database: QuorumDatabase, *, what: str) -> None:
        super().__init__(database.nodes)
        self._database = database
        self._what = what
        self._connects = 0
        self.is_trimmed = False
        self.donors: list[str] = []

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        self._connects += 1
        all_count = 2 * len(self._database.logs())  # greeted, and asked for votes
        if self._what == "trim" and self._connects == all_count + 1:  # it has listed the archive
            self.is_trimmed = True
            await self._archive()
        if self._what == "anew" and self._connects == all_count + 1:  # it asks who has the log
            self.nodes[address].wipe()
            self.nodes[address].admit(place, b"again")
        if self._what == "retire" and self._connects == all_count // 2 + 1:  # all were greeted
            await self._database.edit(lambda m: replace(m, writer_epoch=m.writer_epoch + 1))
            for node in self.nodes:
                node.wipe()
        return await super().connect(address, place)

    async def _archive(self) -> None:
        cas = self._database.cas()
        for kept in self._database.logs():
            await kept.archive(cas)

    async def fetch(
        self, address: str, database_id: bytes, member_id: bytes, first_lsn: int
    ) -> AsyncIterator[Sequence[Record]]:
        self.donors.append(address)
        if len(self.donors) == 1 and self._what == "archive":
            await self._archive()
        elif len(self.donors) == 1 and self._what == "stop":
            self.nodes[address].stop()
        async for piece in super().fetch(address, database_id, member_id, first_lsn):
            yield piece


@pytest.mark.parametrize("what", ["archive", "stop", "trim", "anew"])
@virtual_time(5)
async def test_donor_may_change_after_its_vote(what: str) -> None:
    """A donor that has trimmed its log is read up to the archive; a lost one is replaced."""
    database = await QuorumDatabase.created()
    opened = await database.opened()
    async with database.writing(is_killed=True) as writing:
        for key in (b"a", b"b", b"c"):
            await writing.put(key)
    async with database.writing(
        is_killed=True
    ) as writing:  # its fence completes the object before it
        await writing.put(b"d")
    links = _Disturbing(database, what=what)
    opened = await database.opened(links)
    assert [key for key, _ in contents(opened)] == [b"a", b"b", b"c", b"d"]
    assert links.is_trimmed == (what == "trim")
    assert len(links.donors) >= {"archive": 1, "stop": 2, "trim": 0, "anew": 1}[what]


@virtual_time(5)
async def test_opener_whose_members_were_retired_is_fenced() -> None:
    """An opener whose members were retired meanwhile ends with `Fenced`, not with lost logs."""
    database = await QuorumDatabase.created()
    with pytest.raises(Fenced):
        await database.opened(_Disturbing(database, what="retire"))
    for node in database.nodes:
        node.wipe()
        node.admit(database.place, b"again")
    with pytest.raises(NotAMember, match=r"n\d:1 \(is another member by now.*n\d:1 \("):
        await database.opened()


@virtual_time(5)
async def test_damaged_member_is_filled_and_votes_again() -> None:
    """A damaged member does not vote; the next writer refills it, and then it is sound."""
    database = await QuorumDatabase.created()
    async with database.writing() as writing:
        await writing.put(b"a")
    database.log("n2:1").damage()
    async with database.writing() as writing:
        await writing.put(b"b")
        last_lsn = writing.committed_lsn
        await until(lambda: database.log("n2:1").state.log.last.lsn >= last_lsn)
    database.nodes["n1:1"].stop()
    assert contents(await database.opened()) == [(b"a", b"v"), (b"b", b"v")]


def _recovering(database: QuorumDatabase) -> ForcedRecovery:
    return ForcedRecovery(database.cas(), database.links())


def _stop(database: QuorumDatabase, *numbers: int) -> None:
    for number in numbers:
        database.nodes[f"n{number}:1"].stop()


@virtual_time(5)
async def test_recovery_keeps_the_best_surviving_log() -> None:
    """A recovery keeps the best log; members with a lesser log are dropped."""
    database = await QuorumDatabase.created(count=7)
    async with database.writing() as writing:
        await writing.put(b"a")
        await until(lambda: _all_have(database, writing.committed_lsn))
        _stop(database, 1, 2)  # these have less
        await writing.put(b"b")
        await until(lambda: _all_have(database, writing.committed_lsn, first=3))
        _stop(database, 4, 5, 6, 7)
        database.nodes["n1:1"].start()
        database.nodes["n2:1"].start()
        writing.links.cut()
    recovering = _recovering(database)
    planned = await recovering.plan()
    assert [member.address for member in planned.survivors] == ["n3:1"]
    assert planned.kept_lsn == database.log("n3:1").state.log.last.lsn
    assert {member.address for member in planned.lost} == {f"n{n}:1" for n in (1, 2, 4, 5, 6, 7)}
    assert any("before others" in each for each in planned.problems)
    with pytest.raises(QuorumUnavailable):
        await database.opened()
    manifest = await recovering.recover(planned, [])
    assert len(manifest.wal_members) == 1
    found = {key for key, _ in contents(await database.opened())}
    assert found == {b"a", b"b"}


def _all_have(database: QuorumDatabase, lsn: int, *, first: int = 1) -> bool:
    """Return whether all nodes from the first on have the log up to this record."""
    return all(database.log(f"n{n}:1").state.log.last.lsn >= lsn for n in range(first, 8))


@virtual_time(1)
async def test_recovery_is_refused_while_a_majority_answers() -> None:
    """A recovery is refused when a writer can open, or could after cancelling a change."""
    database = await QuorumDatabase.created(count=5)
    everyone = [database.member(f"n{n}:1") for n in range(1, 6)]
    await database.edit(lambda m: replace(m, wal_members=m.wal_members[:3]))
    _stop(database, 1)
    with pytest.raises(InvalidRequest, match="a majority of the safekeepers answers"):
        await _recovering(database).plan()
    _stop(database, 4, 5)
    await database.edit(partial(begin_change, members=everyone))
    with pytest.raises(InvalidRequest, match="shalekv safekeeper cancel"):
        await _recovering(database).plan()
    _stop(database, 2)
    assert (await _recovering(database).plan()).survivors


async def _behind_the_archive() -> QuorumDatabase:
    """All is archived, and the only remaining member has not followed."""
    database = await QuorumDatabase.created(count=3)
    async with database.writing() as writing:
        await writing.put(b"a")
        await until(lambda: database.log("n3:1").state.log.last.lsn >= writing.committed_lsn)
        _stop(database, 3)
        await writing.put(b"b")
        await writing.put(b"c")
        await writing.slots.archive()
    _stop(database, 1, 2)
    database.nodes["n3:1"].start()
    return database


@virtual_time(5)
async def test_a_log_behind_the_archive_is_not_used() -> None:
    """When the surviving log is behind the archive, new safekeepers continue behind the archive."""
    database = await _behind_the_archive()
    recovering = _recovering(database)
    planned = await recovering.plan()
    assert (planned.survivors, planned.kept_lsn) == ((), 0)
    assert planned.kept_wal_id == planned.archive_tip is not None
    with pytest.raises(InvalidRequest):
        await recovering.recover(planned, [])
    for number in (1, 2):
        database.nodes[f"n{number}:1"].start()
        database.nodes[f"n{number}:1"].wipe()
    await recovering.recover(planned, ["n1:1", "n2:1"])
    found = {key for key, _ in contents(await database.opened())}
    assert found == {b"a", b"b", b"c"}


@virtual_time(1)
async def test_an_outdated_plan_is_refused() -> None:
    """A plan is refused when a writer has opened the database since."""
    database = await QuorumDatabase.created(count=3)
    _stop(database, 1, 2)
    recovering = _recovering(database)
    planned: Recovery = await recovering.plan()
    database.nodes["n1:1"].start()
    await database.opened()
    before = await database.manifest()
    with pytest.raises(InvalidRequest, match="look again"):
        await recovering.recover(planned, [])
    assert await database.manifest() == before


@virtual_time(5)
async def test_the_previous_writer_is_fenced_after_a_recovery() -> None:
    """After a recovery, the previous writer is fenced even if the lost members return to it."""
    database = await QuorumDatabase.created(count=3)
    async with database.writing() as writing:
        await writing.put(b"a")
        await until(lambda: database.log("n3:1").state.log.last.lsn >= writing.committed_lsn)
        _stop(database, 1, 2)
        recovering = _recovering(database)
        await recovering.recover(await recovering.plan(), [])
        database.nodes["n1:1"].start()
        database.nodes["n2:1"].start()
        with pytest.raises(Fenced):
            await writing.opened.manifest.refresh()
    _stop(database, 1, 2)
    assert len(contents(await database.opened())) >= 1
