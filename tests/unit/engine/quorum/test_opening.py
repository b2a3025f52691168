"""Opening a database with its log in safekeepers: who is asked, what is taken over or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from shalekv.core.quorum.messages import VoteRequest
from shalekv.core.quorum.record import Ballot, Record
from shalekv.engine.quorum.archive import Archive
from shalekv.engine.quorum.links import DatabasePlace, Link
from shalekv.errors import QuorumUnavailable
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import Ground, contents, until
from tests.kit.virtual_time import virtual_time


@pytest.mark.parametrize("is_archived", [False, True])
@virtual_time(5)
async def test_what_was_acknowledged_is_there_after_an_opening(*, is_archived: bool) -> None:
    """The next writer has it, from the archive what is there and from the safekeepers the rest."""
    ground = await Ground.created()
    async with ground.writing() as first:
        for number in range(5):
            await first.put(b"k%d" % number, b"%d" % number)
        await first.slots.archive()
        for number in range(5, 10):
            await first.put(b"k%d" % number, b"%d" % number)
        if is_archived:
            await first.slots.archive()
    opened = await ground.open()
    assert contents(opened) == [(b"k%d" % n, b"%d" % n) for n in range(10)]
    assert opened.manifest.own.epoch == 2
    async with ground.writing() as third:
        assert len(await third.contents()) == 10
        await third.put(b"more")


@virtual_time(5)
async def test_what_members_have_not_seen_in_the_archive_is_read_there() -> None:
    """Records of objects that are in the archive already are not applied a second time."""
    ground = await Ground.created()
    for kept in ground.logs():
        kept.can_archive = False
    async with ground.writing(archive_interval_ms=0) as writing:
        for key in (b"a", b"b", b"c"):
            await writing.put(key)
    ahead = max(ground.logs(), key=lambda kept: kept.state.log.last.lsn)
    archive = Archive(ground.cas(), ground.database_id, upload_timeout_ms=1_000)
    await archive.look()
    for wal_id in (0, 1, 2):
        await archive.add(wal_id, [each for each in ahead.records if each.wal_id == wal_id])
    opened = await ground.open()
    assert contents(opened) == [(b"a", b"v"), (b"b", b"v"), (b"c", b"v")]
    assert opened.slots.report().archived_wal_id == 2  # type: ignore[union-attr]


@virtual_time(5)
async def test_who_does_not_answer_is_named() -> None:
    """Without a majority nothing is claimed, and the error says who is missing and why."""
    ground = await Ground.created()
    ground.nodes["n1:1"].stop()
    ground.nodes["n3:1"].hold()
    with pytest.raises(QuorumUnavailable, match=r"1 of 3 .*n1:1 \(.*\); n3:1 \(.*500 ms\)"):
        await ground.open()
    assert (await ground.database.manifest()).writer_epoch == 0


@virtual_time(5)
async def test_epoch_is_above_all_promises() -> None:
    """Safekeepers may have promised more than the manifest knows of (CE14)."""
    ground = await Ground.created()
    for kept in ground.logs():
        _promise(kept.state.member_id, ground, Ballot(7, b"x" * 16))
    assert (await ground.open()).manifest.own.epoch == 8


class _Disturbing(InProcessLinks):
    """Something happens between the votes and the first fetch."""

    def __init__(self, ground: Ground, *, what: str) -> None:
        super().__init__(ground.nodes)
        self._ground = ground
        self._what = what
        self._connects = 0
        self.is_trimmed = False
        self.donors: list[str] = []

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        self._connects += 1
        all_count = 2 * len(self._ground.logs())  # greeted, and asked for votes
        if self._what == "trim" and self._connects == all_count + 1:  # it has listed the archive
            self.is_trimmed = True
            await self._archive()
        return await super().connect(address, place)

    async def _archive(self) -> None:
        cas = self._ground.cas()
        for kept in self._ground.logs():
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


@pytest.mark.parametrize("what", ["archive", "stop", "trim"])
@virtual_time(5)
async def test_donor_may_change_after_its_vote(what: str) -> None:
    """What it has archived and trimmed since is read there; if it is lost, another one is asked."""
    ground = await Ground.created()
    opened = await ground.open()
    async with ground.writing(is_killed=True) as writing:
        for key in (b"a", b"b", b"c"):
            await writing.put(key)
    async with ground.writing(
        is_killed=True
    ) as writing:  # its fence completes the object before it
        await writing.put(b"d")
    links = _Disturbing(ground, what=what)
    opened = await ground.open(links)
    assert [key for key, _ in contents(opened)] == [b"a", b"b", b"c", b"d"]
    assert links.is_trimmed == (what == "trim")
    assert len(links.donors) >= {"archive": 1, "stop": 2, "trim": 0}[what]


@virtual_time(5)
async def test_damaged_member_is_filled_and_votes_again() -> None:
    """It counts for nothing, is emptied and filled by the next writer, and is sound after that."""
    ground = await Ground.created()
    async with ground.writing() as writing:
        await writing.put(b"a")
    ground.log("n2:1").damage()
    async with ground.writing() as writing:
        await writing.put(b"b")
        last_lsn = writing.committed_lsn
        await until(lambda: ground.log("n2:1").state.log.last.lsn >= last_lsn)
    ground.nodes["n1:1"].stop()
    assert await _reopened(ground) == [(b"a", b"v"), (b"b", b"v")]


async def _reopened(ground: Ground) -> list[tuple[bytes, bytes]]:
    return contents(await ground.open())


def _promise(member_id: bytes, ground: Ground, ballot: Ballot) -> None:
    for kept in ground.logs():
        if kept.state.member_id == member_id:
            kept.replies[0] = lambda _: None
            kept.receive(0, VoteRequest(member_id, ballot))
