"""A dropped database is gone with its pins, and whatever stands in the way is told first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest

from shalekv.errors import DatabaseNotFound, IllegalState, InvalidRequest
from shalekv.format import names
from shalekv.jobs import collect
from shalekv.jobs.collect import CollectJob
from shalekv.jobs.drop import DropJob
from shalekv.jobs.pinned_clones import CloneState, check_clones
from shalekv.protocol.origins import clone_of_pin, pin_name
from shalekv.protocol.snapshot import NAME_CHARS_MAX
from shalekv.protocol.two_phase import Destination
from shalekv.server.database import create_database
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.engine.places import HOUR_MS, Place, everything
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.processes.in_process import put_at, real_runtime, running, serve_settings
from tests.kit.store import Died, FaultyStore, MortalProcess, at_each


async def drop(place: Place, *, is_forced: bool = False) -> Sequence[str]:
    with real_runtime(seed=place.seed()) as runtime:
        job = DropJob(place.cas(runtime))
        return await job.run(await job.plan(), is_forced=is_forced)


async def left(place: Place) -> list[str]:
    folders = (
        names.MANIFEST_FOLDER,
        names.WAL_FOLDER,
        names.LEVELS_FOLDER,
        names.ACCESS_FOLDER,
        names.ELECTION_FOLDER,
    )
    return [info.name for folder in folders async for info in place.store.list(folder)]


async def states(parent: Place) -> list[CloneState]:
    with real_runtime(seed=parent.seed()) as runtime:
        found = await check_clones(parent.cas(runtime), await parent.manifest())
        return [each.state for each in found]


async def test_a_dropped_clone_leaves_nothing() -> None:
    """Its objects and its pin are gone, the parent is as before, and its place is free again."""
    parent, clone = await everything(), Place("clone")
    expected = await parent.rows()
    for _ in range(2):
        await parent.clone_to(clone)
        assert await states(parent) == [CloneState.NEEDED]
        assert await drop(clone) == []
        assert (await left(clone), await parent.pins()) == ([], [])
        with pytest.raises(DatabaseNotFound):
            await drop(clone)
    assert await parent.rows() == expected
    assert await parent.damage() == []


async def test_a_clone_that_shares_nothing_keeps_nothing() -> None:
    """It pins its parent only while it is made, so that the parent can be dropped at once."""
    parent, clone = Place("parent"), Place("clone")
    await parent.put(b"key")
    await parent.clone_to(clone)
    assert await parent.pins() == []
    expected = await parent.rows()
    await drop(parent)
    assert await clone.rows() == expected


async def test_what_uses_a_database_is_told_and_nothing_deleted() -> None:
    """Clones, processes and jobs prevent it, by name, unless it is forced."""
    parent, clone = await everything(), Place("clone")
    await parent.clone_to(clone)
    before = await left(parent)
    with pytest.raises(InvalidRequest, match=f"needed by a clone .*{clone.url}"):
        await drop(parent)
    await drop(clone)
    with real_runtime(seed=1) as runtime:
        async with running(parent.store, serve_settings(), runtime):
            with pytest.raises(InvalidRequest, match="a server or a scan has not ended"):
                await drop(parent)
    assert {*before} <= {*await left(parent)}
    backup = await parent.snapshot("backup of today")
    with pytest.raises(InvalidRequest, match="backup of today is being made"):
        await drop(parent)
    assert backup.name


async def test_what_has_begun_to_use_it_since_the_plan_is_told() -> None:
    """While a user is asked, a clone may be made or a server started: neither is harmed."""
    parent, clone = await everything(), Place("clone")
    with real_runtime(seed=1) as runtime:
        job = DropJob(parent.cas(runtime))
        plan = await job.plan()
        async with running(parent.store, serve_settings(), runtime) as writer:
            with pytest.raises(InvalidRequest, match=r"in use .*a server .*a moment ago"):
                await job.run(plan)
            await put_at(writer, b"key", b"value")
        await writer.release()
        await parent.clone_to(clone)
        with pytest.raises(InvalidRequest, match=rf"needed by a clone .*{clone.url}.*a moment ago"):
            await job.run(plan)
    assert await clone.rows() == await parent.rows()


async def test_what_is_written_during_a_drop_is_deleted_too() -> None:
    """A compactor may create an SST after the others are deleted: nothing is left of it."""
    place = await everything()
    late = [names.level_name(bytes(6) + b"\x70" + bytes(1) + b"\x80" + bytes(7))]

    async def write_late() -> None:
        while late:
            await place.store.create(late.pop(), b"an SST")

    after = at_each("delete", names.LEVELS_FOLDER, write_late)
    with real_runtime(seed=1) as runtime:
        job = DropJob(place.cas(runtime, FaultyStore(place.store, after=after)))
        await job.run(await job.plan())
    assert (await left(place), late) == ([], [])


async def test_a_collection_does_not_go_on_in_another_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its database is dropped while it deletes, and another one has objects of the same names."""
    monkeypatch.setattr(collect, "BATCH_MAX", 2)
    place, deleted = await everything(), 0
    await place.compact()
    fewest = len(await left(place))

    async def replaced() -> None:
        nonlocal deleted
        deleted += 1
        if deleted == 1:
            await drop(place)
            await place.put(*[b"%d" % number for number in range(fewest)])

    ages = {"collect_age_s": 0, "foreign_file_age_s": 0, "wal_retention_s": 0}
    with real_runtime(seed=1) as runtime:
        store = FaultyStore(place.store_at(HOUR_MS), after=at_each("delete", "", replaced))
        job = CollectJob(place.cas(runtime, store), CollectorSettings.model_validate(ages))
        with pytest.raises(DatabaseNotFound, match="another was made in its place"):
            await job.collect()
    assert deleted == 1
    assert len(await place.rows()) == fewest


async def test_a_crash_at_any_request_leaves_a_whole_database_or_one_to_drop_again() -> None:
    """Before the mark everything can be read; from then on nothing opens it, but a drop ends it."""
    parent, at, marked = await everything(), 0, 0
    while True:
        clone = Place("clone")
        await parent.clone_to(clone)
        process = MortalProcess(at)
        with real_runtime(seed=at) as runtime:
            job = DropJob(clone.cas(runtime, process.store(clone.store)))

            async def run(job: DropJob = job) -> None:
                await job.run(await job.plan())

            is_crashed = not await process.run(run())
        if await left(clone):
            assert is_crashed
            try:
                await clone.manifest()
            except IllegalState:
                marked += 1
            else:
                assert await clone.damage() == []
            await drop(clone)
        assert (await left(clone), await parent.pins()) == ([], [])
        if not is_crashed:
            break
        at += 1
    assert marked > 5
    assert at > marked
    assert await parent.damage() == []


class _MortalRecords(MemoryRecords):
    """Records whose process dies at the deletion with this number, counted from 0."""

    def __init__(self, table: Table, dies_at: int) -> None:
        super().__init__(table=table)
        self._left = dies_at

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        self._left -= 1
        if self._left < 0:
            raise Died
        await super().delete_committed(destinations)


async def test_records_of_two_phase_creates_go_with_their_objects() -> None:
    """Whichever deletion of records a crash prevents, the next attempt leaves neither."""
    at = 0
    while True:
        place, table = Place("records"), Table()
        objects = place.store_at(0)
        with real_runtime(seed=at) as runtime:
            place.store = TwoPhaseStore(objects, MemoryRecords(table=table), runtime)
            await create_database(place.store, runtime, StoreSettings())
            await place.put(b"key")
            await place.compact()
            store = TwoPhaseStore(objects, _MortalRecords(table, at), runtime)
            job = DropJob(place.cas(runtime, store))
            try:
                await job.run(await job.plan())
            except Died:
                is_crashed = True
            else:
                is_crashed = False
        if is_crashed:
            assert table
            with suppress(DatabaseNotFound):  # only records were left
                await drop(place)
        assert (await left(place), table) == ([], {})
        if not is_crashed:
            break
        at += 1
    assert at == 3  # of what comes before the log, of the log, and of the marked manifest


async def test_a_damaged_database_is_dropped_by_force() -> None:
    """With its SSTs gone it is dropped as any other, with a hole in its log when it is forced."""
    place = await everything()
    await place.store.delete([info.name async for info in place.store.list(names.LEVELS_FOLDER)])
    manifest = await place.manifest()
    await place.store.delete([names.wal_name(manifest.first_uncompacted_wal_id)])
    with pytest.raises(IllegalState):
        await drop(place)
    await drop(place, is_forced=True)
    assert await left(place) == []


async def test_pins_tell_whether_their_clone_is_there() -> None:
    """A clone that was deleted by hand, or replaced, is gone; one whose place is unknown is not."""
    parent, clone, other = await everything(), Place("clone"), await everything("other")
    await parent.clone_to(clone)
    (pin,) = await parent.pins()
    told = clone_of_pin(pin.name)
    assert told is not None
    assert (told.database_id, told.url) == ((await clone.manifest()).database_id, clone.url)
    assert await states(parent) == [CloneState.NEEDED]
    await clone.store.delete(await left(clone))
    assert await states(parent) == [CloneState.GONE]
    await other.clone_to(clone)
    assert await states(parent) == [CloneState.GONE]
    current = await parent.manifest()
    for name in (pin_name(told.database_id), f"clone {told.database_id.hex()} at s3://x/y"):
        renamed = [each for each in current.snapshots if each.id != pin.id]
        renamed.append(type(pin)(pin.id, pin.manifest_id, 0, name, ssts_only=True))
        await parent.replace_manifest(snapshots=tuple(renamed))
        assert await states(parent) == [CloneState.UNKNOWN]


@pytest.mark.parametrize("url", ["", "s3://bucket/" + "x" * 100, "file:///a b", "file:///a\n"])
def test_a_url_that_a_name_cannot_hold_is_left_out(url: str) -> None:
    """The name of a pin always is a valid name of a snapshot, and tells the id of the clone."""
    name = pin_name(bytes(16), url, suffix="01234567")
    assert len(name) <= NAME_CHARS_MAX
    told = clone_of_pin(name)
    assert told is not None
    assert (told.database_id, told.url) == (bytes(16), "")
    for wrong in ("nightly", f"clone {'0' * 31}", f"a clone {'0' * 32}"):
        assert clone_of_pin(wrong) is None
