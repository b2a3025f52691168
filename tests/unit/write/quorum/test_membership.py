"""Changes of members: which nodes are asked, what is refused, and their effect on a writer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    QuorumUnavailable,
)
from shalekv.format import names
from shalekv.jobs.switch_wal import switch_to_quorum
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Member, begin_change, cancel_change, close_generation
from shalekv.protocol.quorum_records import LogHealth
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.write.quorum.links import DatabasePlace
from shalekv.write.quorum.membership import Reconfiguration, configuration_of, probe_members
from tests.kit.engine.databases import contents
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import QuorumDatabase, Writing, runtime, until
from tests.kit.store import HeldStore
from tests.kit.virtual_time import virtual_time


async def _created(*, members: int = 3, count: int = 6) -> QuorumDatabase:
    """A database whose members are the first nodes; the other nodes have nothing of it."""
    database = await QuorumDatabase.created(count=count)
    await database.edit(lambda m: replace(m, wal_members=m.wal_members[:members]))
    for node in [*database.nodes][members:]:
        node.wipe()
    return database


def _changing(database: QuorumDatabase) -> Reconfiguration:
    return Reconfiguration(database.cas(), database.links())


def _addresses(texts: tuple[str, ...]) -> list[str]:
    return [text.rpartition("@")[2] for text in texts]


async def _finished(database: QuorumDatabase, writing: Writing) -> list[str]:
    """The members after the serving writer has made the second edit."""
    await writing.opened.manifest.refresh()
    await until(lambda: not writing.opened.manifest.current.wal_members_next)
    return _addresses((await database.manifest()).wal_members)


@virtual_time(5)
async def test_members_are_added_and_removed() -> None:
    """A set grows from three to five and shrinks again; removed members cannot elect a writer."""
    database = await _created()
    async with database.writing() as writing:
        await writing.put(b"a")
        joint = await _changing(database).add(["n4:1", "n5:1"])
        assert _addresses(joint.wal_members_next) == [f"n{n}:1" for n in range(1, 6)]
        await writing.put(b"b")
        assert len(await _finished(database, writing)) == 5
        await writing.put(b"c")
        await _changing(database).remove(["n1:1", "n2:1"])
        assert await _finished(database, writing) == ["n3:1", "n4:1", "n5:1"]
        await writing.put(b"d")
    database.nodes["n4:1"].stop()
    database.nodes["n5:1"].stop()
    with pytest.raises(QuorumUnavailable, match="1 of 3"):
        await database.opened()
    database.nodes["n5:1"].start()
    assert len(contents(await database.opened())) == 4


@virtual_time(5)
async def test_a_wiped_node_is_refused_until_it_is_replaced() -> None:
    """A wiped node has another id, and is filled after `replace`; an intact one is not replaced."""
    database = await _created()
    async with database.writing() as writing:
        await writing.put(b"a")
        with pytest.raises(InvalidRequest, match="has its log: there is nothing to replace"):
            await _changing(database).replace("n2:1", "n2:1")
        for link in writing.links.links:
            if link.node.address == "n2:1":
                link.break_off()
        database.nodes["n2:1"].wipe()
        await writing.put(b"b")
        assert not database.nodes["n2:1"].logs
        database.nodes["n4:1"].logs = {**database.nodes["n1:1"].logs}
        with pytest.raises(DatabaseExists):  # whether its log is of use is decided by hand
            await _changing(database).replace("n2:1", "n4:1")
        await _changing(database).replace("n2:1", "n2:1")
        assert await _finished(database, writing) == ["n1:1", "n2:1", "n3:1"]
        database.nodes["n3:1"].stop()
        await writing.put(b"c")
        assert database.log("n2:1").state.health is LogHealth.SOUND
    database.nodes["n1:1"].stop()
    database.nodes["n3:1"].start()
    assert len(contents(await database.opened())) == 3


@virtual_time(1)
async def test_two_changes_at_once_are_refused() -> None:
    """A second change admits no node and names the first; it may begin once that is cancelled."""
    database = await _created()
    changing = _changing(database)
    with pytest.raises(InvalidRequest, match="no change is under way"):
        await changing.cancel()
    await changing.add(["n4:1"])
    for change in (
        changing.add(["n5:1"]),
        changing.remove(["n1:1"]),
        changing.replace("n1:1", "n5:1"),
    ):
        with pytest.raises(InvalidRequest, match=r"a change to .*n4:1 is under way"):
            await change
    assert not database.nodes["n5:1"].logs
    cancelled = await changing.cancel()
    assert cancelled.wal_members_next == ()
    await changing.replace("n1:1", "n4:1")
    async with database.writing() as writing:  # a writer that opens meanwhile ends it
        assert await _finished(database, writing) == ["n4:1", "n2:1", "n3:1"]


@virtual_time(5)
@pytest.mark.parametrize("cancels", [False, True])
async def test_a_late_retry_does_not_repeat_a_change(cancels: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A late retry of an edit does not repeat it after others have changed the members."""
    database = await _created()
    other = _changing(database)
    if cancels:
        await other.add(["n4:1"])
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    slow = Reconfiguration(CasStore(store, runtime(99), StoreSettings()), database.links())
    changing = asyncio.create_task(slow.cancel() if cancels else slow.add(["n4:1"]))
    held = await store.arrived(1)
    held.apply()
    await (other.add(["n4:1"]) if cancels else other.cancel())
    before = await database.manifest()
    held.release()
    with pytest.raises(InvalidRequest, match="changed since"):
        await changing
    assert await database.manifest() == before


@pytest.mark.parametrize("is_always", [False, True])
@virtual_time(5)
async def test_a_switch_admits_members_of_an_outdated_generation_again(is_always: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A switch whose generation is over admits its members again, some times, or ends.

    Admitted safekeepers may delete their logs, and then must not be named by the manifest. A switch
    that ends leaves the mode unchanged.
    """
    database = await QuorumDatabase.in_object_store()
    asked = 0

    class LateLinks(InProcessLinks):
        async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
            nonlocal asked
            member_id = await super().admit(address, place, request_id)
            if address == "n3:1":
                asked += 1
                if is_always or asked == 1:
                    await database.edit(partial(close_generation, generation=asked - 1))
                    database.nodes[address].wipe()
            return member_id

    switching = switch_to_quorum(
        database.cas(), LateLinks(database.nodes), ["n1:1", "n2:1", "n3:1"]
    )
    if is_always:
        with pytest.raises(InvalidRequest, match="dropped the new logs"):
            await switching
        assert (await database.manifest()).wal_mode is WalMode.OBJECT_STORE
        return
    named = configuration_of(await switching).members
    assert [each.id for each in named] == [log.state.member_id for log in database.logs()]


@virtual_time(1)
async def test_invalid_changes_are_refused() -> None:
    """Invalid changes are refused without an effect, and the message names the address."""
    database = await _created()
    changing, before = _changing(database), await database.manifest()
    for change, words in (
        (changing.remove(["n9:1"]), "n9:1 is not a member: the members are n1:1, n2:1, n3:1"),
        (changing.replace("n9:1", "n4:1"), "n9:1 is not a member"),
        (changing.replace("n1:1", "n2:1"), "n2:1 is a member already"),
        (changing.add(["n1:1"]), "n1:1 is a member already: if it was made anew, use `replace`"),
        (changing.add(["n4:1", "n4:1"]), "an address occurs twice"),
        (changing.remove(["n1:1", "n2:1", "n3:1"]), "0 of them"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await change
    database.nodes["n4:1"].stop()
    with pytest.raises(QuorumUnavailable, match=r"n4:1 does not answer.*Nothing was changed"):
        await changing.add(["n4:1"])
    assert await database.manifest() == before
    without = await QuorumDatabase.in_object_store()
    with pytest.raises(DatabaseMismatch, match="no safekeepers"):
        await _changing(without).add(["n1:1"])


@virtual_time(1)
async def test_a_survey_reports_the_state_of_each_member() -> None:
    """A probe distinguishes members that are down, were made anew, or have no log."""
    database = await _created()
    members = [database.member(f"n{n}:1") for n in (1, 2, 3)]
    database.nodes["n1:1"].stop()
    database.nodes["n2:1"].wipe()
    database.nodes["n2:1"].admit(database.place, b"again")
    database.nodes["n3:1"].wipe()
    probes = await probe_members(database.links(), database.database_id, members)
    down, anew, empty = (each.problem for each in probes)
    assert down.startswith("does not answer")
    assert "is another member by now" in anew
    assert "does not have this database" in empty


async def _admitted(*, first: int, count: int) -> QuorumDatabase:
    """A database whose members are the first nodes; all nodes have admitted it."""
    database = await QuorumDatabase.created(count=count)
    await database.edit(lambda m: replace(m, wal_members=m.wal_members[:first]))
    return database


def _members(database: QuorumDatabase, *numbers: int) -> tuple[Member, ...]:
    return tuple(database.member(f"n{number}:1") for number in numbers)


async def _see_manifest(writing: Writing) -> None:
    await writing.opened.manifest.refresh()


@virtual_time(5)
async def test_change_waits_for_a_majority_of_the_next_members() -> None:
    """Without a majority of the next members nothing is committed; cancelling resumes writes."""
    database = await _admitted(first=3, count=5)
    database.nodes["n4:1"].stop()
    database.nodes["n5:1"].stop()
    async with database.writing() as writing:
        await writing.put(b"a")
        next_members = _members(database, 3, 4, 5)
        await database.edit(partial(begin_change, members=next_members))
        await _see_manifest(writing)
        await until(lambda: _generation(writing) == 2)
        write = writing.write(b"b")
        await until(lambda: database.log("n1:1").state.log.last.lsn > writing.committed_lsn)
        assert not write.outcomes
        assert (await database.manifest()).wal_members_next
        await database.edit(cancel_change)
        await _see_manifest(writing)
        await write.receipt()
        assert _generation(writing) == 3


def _generation(writing: Writing) -> int:
    report = writing.slots.report()
    return report.generation


@virtual_time(5)
async def test_members_of_another_writer_are_not_followed() -> None:
    """A fenced writer ends before it follows the members that its successor has chosen.

    These may have promised nothing yet, and would accept what the fenced writer has in flight.
    """
    database = await _admitted(first=3, count=6)
    async with database.writing() as writing:
        await writing.put(b"a")
        database.nodes["n2:1"].stop()
        database.nodes["n3:1"].stop()
        in_flight = writing.write(b"b")
        await until(lambda: database.log("n1:1").state.log.last.lsn > writing.committed_lsn)
        others = tuple(map(str, _members(database, 4, 5, 6)))
        await database.edit(
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
    assert [database.log(f"n{n}:1").state.log.last.lsn for n in (4, 5, 6)] == [0, 0, 0]
