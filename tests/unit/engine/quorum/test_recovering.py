"""Recovery without a majority: what survivors have is kept, and it is refused where none is due."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shalekv.core.quorum.membership import begin_change
from shalekv.engine.quorum.recovering import Recovering, Recovery
from shalekv.errors import Fenced, InvalidRequest, QuorumUnavailable
from tests.kit.quorum.log import Ground, contents, until
from tests.kit.virtual_time import virtual_time


def _recovering(ground: Ground) -> Recovering:
    return Recovering(ground.cas(), ground.links())


def _stop(ground: Ground, *numbers: int) -> None:
    for number in numbers:
        ground.nodes[f"n{number}:1"].stop()


@virtual_time(5)
async def test_everything_is_kept_that_survivors_have() -> None:
    """The best of their logs decides, and who has less is no member: it could elect itself."""
    ground = await Ground.created(7)
    async with ground.writing() as writing:
        await writing.put(b"a")
        await until(lambda: _all_have(ground, writing.committed_lsn))
        _stop(ground, 1, 2)  # these have less
        await writing.put(b"b")
        await until(lambda: _all_have(ground, writing.committed_lsn, first=3))
        _stop(ground, 4, 5, 6, 7)
        ground.nodes["n1:1"].start()
        ground.nodes["n2:1"].start()
        writing.links.cut()
    recovering = _recovering(ground)
    planned = await recovering.plan()
    assert [member.address for member in planned.survivors] == ["n3:1"]
    assert planned.kept_lsn == ground.log("n3:1").state.log.last.lsn
    assert {member.address for member in planned.lost} == {f"n{n}:1" for n in (1, 2, 4, 5, 6, 7)}
    assert any("before others" in each for each in planned.problems)
    with pytest.raises(QuorumUnavailable):
        await ground.open()
    manifest = await recovering.recover(planned, [])
    assert len(manifest.wal_members) == 1
    found = {key for key, _ in contents(await ground.open())}
    assert found == {b"a", b"b"}


def _all_have(ground: Ground, lsn: int, *, first: int = 1) -> bool:
    """Whether all nodes from the first on have the log up to there."""
    return all(ground.log(f"n{n}:1").state.log.last.lsn >= lsn for n in range(first, 8))


@virtual_time(1)
async def test_it_is_refused_while_a_majority_answers() -> None:
    """Nothing has to be given up then; nor when a change of members is all that is in the way."""
    ground = await Ground.created(5)
    everyone = [ground.member(f"n{n}:1") for n in range(1, 6)]
    await ground.database.edit(lambda m: replace(m, wal_members=m.wal_members[:3]))
    _stop(ground, 1)
    with pytest.raises(InvalidRequest, match="a majority of the safekeepers answers"):
        await _recovering(ground).plan()
    _stop(ground, 4, 5)
    await ground.database.edit(partial(begin_change, members=everyone))
    with pytest.raises(InvalidRequest, match="shalekv safekeeper cancel"):
        await _recovering(ground).plan()
    _stop(ground, 2)
    assert (await _recovering(ground).plan()).survivors


async def _behind_the_archive() -> Ground:
    """All is archived, and the only member that is left has not followed."""
    ground = await Ground.created(3)
    async with ground.writing() as writing:
        await writing.put(b"a")
        await until(lambda: ground.log("n3:1").state.log.last.lsn >= writing.committed_lsn)
        _stop(ground, 3)
        await writing.put(b"b")
        await writing.put(b"c")
        await writing.slots.archive()
    _stop(ground, 1, 2)
    ground.nodes["n3:1"].start()
    return ground


@virtual_time(5)
async def test_a_log_behind_the_archive_is_not_used() -> None:
    """The archive alone is kept then, and new safekeepers go on behind it."""
    ground = await _behind_the_archive()
    recovering = _recovering(ground)
    planned = await recovering.plan()
    assert (planned.survivors, planned.kept_lsn) == ((), 0)
    assert planned.kept_wal_id == planned.archive_tip is not None
    with pytest.raises(InvalidRequest):
        await recovering.recover(planned, [])
    for number in (1, 2):
        ground.nodes[f"n{number}:1"].start()
        ground.nodes[f"n{number}:1"].wipe()
    await recovering.recover(planned, ["n1:1", "n2:1"])
    found = {key for key, _ in contents(await ground.open())}
    assert found == {b"a", b"b", b"c"}


@virtual_time(1)
async def test_a_plan_holds_for_what_it_was_made_for() -> None:
    """When a writer has opened the database since, nothing is changed."""
    ground = await Ground.created(3)
    _stop(ground, 1, 2)
    recovering = _recovering(ground)
    planned: Recovery = await recovering.plan()
    ground.nodes["n1:1"].start()
    await ground.open()
    before = await ground.database.manifest()
    with pytest.raises(InvalidRequest, match="look again"):
        await recovering.recover(planned, [])
    assert await ground.database.manifest() == before


@virtual_time(5)
async def test_the_writer_from_before_is_fenced_when_it_looks() -> None:
    """Even if the lost members come back to it."""
    ground = await Ground.created(3)
    async with ground.writing() as writing:
        await writing.put(b"a")
        await until(lambda: ground.log("n3:1").state.log.last.lsn >= writing.committed_lsn)
        _stop(ground, 1, 2)
        recovering = _recovering(ground)
        await recovering.recover(await recovering.plan(), [])
        ground.nodes["n1:1"].start()
        ground.nodes["n2:1"].start()
        with pytest.raises(Fenced):
            await writing.opened.manifest.refresh()
    _stop(ground, 1, 2)
    assert len(contents(await ground.open())) >= 1
