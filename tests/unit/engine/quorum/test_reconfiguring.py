"""Changes of members under a writer that serves: both sets decide, then the next one does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shalekv.core.quorum.membership import Member, begin_change, cancel_change
from shalekv.errors import Fenced, OutcomeUnknown
from tests.kit.quorum.log import Ground, Writing, contents, until
from tests.kit.virtual_time import virtual_time


async def _ground(*, first: int, count: int) -> Ground:
    """A database with the first of the nodes as its members; all have made room."""
    ground = await Ground.created(count)
    await ground.database.edit(lambda m: replace(m, wal_members=m.wal_members[:first]))
    return ground


def _members(ground: Ground, *numbers: int) -> tuple[Member, ...]:
    return tuple(ground.member(f"n{number}:1") for number in numbers)


async def _see_manifest(writing: Writing) -> None:
    """As the watch for another writer does, sooner."""
    await writing.opened.manifest.refresh()


@virtual_time(5)
async def test_members_are_exchanged_while_writes_go_on() -> None:
    """Nothing is lost, and the old members are not needed afterwards."""
    ground = await _ground(first=3, count=6)
    async with ground.writing() as writing:
        for number in range(5):
            await writing.put(b"a%d" % number)
        await writing.slots.archive()
        next_members = _members(ground, 4, 5, 6)
        await ground.database.edit(partial(begin_change, members=next_members))
        await _see_manifest(writing)
        for number in range(5):
            await writing.put(b"b%d" % number)
        await until(lambda: writing.opened.manifest.current.wal_generation == 3)
        manifest = await ground.database.manifest()
        assert manifest.wal_members == tuple(map(str, next_members))
        assert manifest.wal_members_next == ()
        for node in [*ground.nodes][:3]:
            node.stop()
        await writing.put(b"c")
        report = writing.slots.report()
        assert report is not None
        assert {each.address for each in report.members} == {"n4:1", "n5:1", "n6:1"}
    assert len(contents(await ground.open())) == 11


@virtual_time(5)
async def test_change_waits_for_a_majority_of_the_next_members() -> None:
    """Without them nothing is committed and the change is not finished; cancelled, all goes on."""
    ground = await _ground(first=3, count=5)
    ground.nodes["n4:1"].stop()
    ground.nodes["n5:1"].stop()
    async with ground.writing() as writing:
        await writing.put(b"a")
        next_members = _members(ground, 3, 4, 5)
        await ground.database.edit(partial(begin_change, members=next_members))
        await _see_manifest(writing)
        await until(lambda: _generation(writing) == 2)
        write = writing.write(b"b")
        await until(lambda: ground.log("n1:1").state.log.last.lsn > writing.committed_lsn)
        assert not write.told
        assert (await ground.database.manifest()).wal_members_next
        await ground.database.edit(cancel_change)
        await _see_manifest(writing)
        await write.receipt()
        assert _generation(writing) == 3


def _generation(writing: Writing) -> int:
    report = writing.slots.report()
    assert report is not None
    return report.generation


@virtual_time(5)
async def test_members_of_another_writer_are_not_followed() -> None:
    """They may have promised nothing to anybody: they would take what a writer that was fenced has
    in flight. So it ends with the manifest that it finds, before it looks who is a member.
    """
    ground = await _ground(first=3, count=6)
    async with ground.writing() as writing:
        await writing.put(b"a")
        ground.nodes["n2:1"].stop()
        ground.nodes["n3:1"].stop()
        in_flight = writing.write(b"b")
        await until(lambda: ground.log("n1:1").state.log.last.lsn > writing.committed_lsn)
        others = tuple(map(str, _members(ground, 4, 5, 6)))
        await ground.database.edit(
            lambda m: replace(
                m,
                writer_epoch=m.writer_epoch + 1,
                writer_nonce=bytes(16),
                wal_members=others,
                wal_generation=m.wal_generation + 1,
            )
        )
        with pytest.raises(Fenced):
            await _see_manifest(writing)
        assert isinstance(await in_flight.refusal(), OutcomeUnknown)
        await until(lambda: writing.ended_by is not None)
        assert isinstance(writing.ended_by, Fenced)
    assert [ground.log(f"n{n}:1").state.log.last.lsn for n in (4, 5, 6)] == [0, 0, 0]
