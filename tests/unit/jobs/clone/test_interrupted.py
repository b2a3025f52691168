"""An interrupted cloning leaves no clone or a complete one, and can be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shalekv.errors import DatabaseExists, DatabaseNotFound, InvalidRequest, OriginLost
from shalekv.format import names
from shalekv.jobs.clone import CloneJob, CloneReport
from shalekv.protocol.audit import FindingKind
from shalekv.protocol.manifest import Snapshot
from shalekv.protocol.origins import is_pin, is_pin_permanent, needed_pins
from shalekv.protocol.snapshot import NEVER, find_snapshot
from shalekv.write.snapshots import Snapshots
from tests.kit.engine.places import HOUR_MS, Place, Row, everything, puts
from tests.kit.processes.in_process import real_runtime
from tests.kit.store import Died, FaultyStore, MortalProcess, Request


async def _crash(at: int, parent: Place, target: Place) -> bool:
    """Clone with a crash at the request with this number; return whether there was such a one."""
    process = MortalProcess(at)
    with real_runtime(seed=at) as runtime:
        source = parent.cas(runtime, process.store(parent.store))
        return not await process.run(CloneJob(source, process.store(target.store)).run())


async def _assert_whole(clone: Place, parent: Place, expected: list[Row]) -> None:
    """Check that the clone holds the expected data, and that the pin stays."""
    manifest = await clone.manifest()
    pins = {pin.id: pin for pin in await parent.pins()}
    assert all(is_pin(pins[each]) for each in needed_pins(manifest))
    assert await clone.rows() == expected


async def test_a_crash_at_any_request_leaves_no_clone_or_a_whole_one() -> None:
    """After a crash at any request, the same command makes the clone, or finds that it exists.

    Only existing clones keep anything in the parent forever.
    """
    parent = await everything()
    expected = await parent.rows()
    at, made = 0, 0
    while True:
        target = Place("clone")
        fixed = {pin.id for pin in await parent.pins() if is_pin(pin)}
        is_crashed = await _crash(at, parent, target)
        is_there = True
        try:
            await target.manifest()
        except DatabaseNotFound:
            is_there = False
            assert fixed == {pin.id for pin in await parent.pins() if is_pin(pin)}
        if is_crashed:
            await parent.clone_to(target)  # it is not complete yet
        with pytest.raises(DatabaseExists):
            await parent.clone_to(target)
        made += is_there
        if is_there or at % 16 == 0:
            await _assert_whole(target, parent, expected)
        if not is_crashed:
            break
        at += 1
    assert at > 40
    assert made > 1
    assert await parent.damage() == []


@pytest.mark.parametrize("first", [0, 24, 48])
async def test_the_parent_goes_on_meanwhile(first: int) -> None:
    """Whenever the parent is overwritten, compacted and collected during the cloning, the clone
    holds the state of the parent before or after that.
    """
    parent, clone = await everything(), Place("clone")
    before = await parent.rows()
    requests, one_at_a_time = 0, asyncio.Lock()  # a second compactor would end the first

    async def go_on(_request: Request) -> None:
        nonlocal requests
        requests += 1
        if (number := requests) in (first, first + 6):
            async with one_at_a_time:
                await parent.write(puts([key for key, _, _ in before], b"%d" % number))
                await parent.compact()
                await parent.collect(ahead_ms=HOUR_MS // 2)

    with real_runtime(seed=first) as runtime:
        source = parent.cas(runtime, FaultyStore(parent.store, before=go_on))
        await CloneJob(source, FaultyStore(clone.store, before=go_on)).run()
    assert requests > first + 6
    values = {value for _, value, _ in await clone.rows()}
    overwritten = {value for _, value, _ in before}
    assert values in (overwritten, {b"%d" % first}, {b"%d" % (first + 6)})
    assert await clone.damage() == []


async def _unfinished(parent: Place, target: Place, pinned: Place | None = None) -> Snapshot:
    """Make a clone, and crash before its pin in `pinned` never expires; return the pin."""

    async def after(request: Request) -> None:
        if (request.operation, request.name) == ("create", names.manifest_name(0)):
            raise Died

    with real_runtime(seed=target.seed()) as runtime:
        cloning = CloneJob(parent.cas(runtime), FaultyStore(target.store, after=after))
        with pytest.raises(Died):
            await cloning.run()
    pin = await _pin(target, pinned or parent)
    assert not is_pin(pin)
    return pin


async def _pin(clone: Place, parent: Place) -> Snapshot:
    (snapshot_id,) = needed_pins(await clone.manifest())
    found = find_snapshot(await parent.manifest(), snapshot_id)
    assert found is not None
    return found


@pytest.mark.parametrize("process", [Place.open, Place.compact])
async def test_a_process_of_the_clone_completes_it(
    process: Callable[[Place], Awaitable[None]],
) -> None:
    """A process that opens an unfinished clone makes its pin permanent; before, a check reports the
    pin.
    """
    parent, clone = await everything(), Place("clone")
    pin = await _unfinished(parent, clone)
    (finding,) = await clone.damage()
    assert finding.kind is FindingKind.ORIGIN
    assert "may expire" in finding.problem
    await process(clone)
    assert is_pin_permanent(await parent.manifest(), pin.id)
    assert await clone.damage() == []


@pytest.mark.parametrize("is_expired", [False, True])
@pytest.mark.parametrize("is_opened", [False, True])
async def test_a_clone_whose_pin_is_gone_is_not_opened(
    *, is_expired: bool, is_opened: bool
) -> None:
    """A writer, a compactor and a check report that shared SSTs may be deleted, and where.

    Such a clone is left by a crash, or by a process that was stopped until the pin had expired. The
    same command makes it again, unless it may have been written to.
    """
    parent, clone = await everything(), Place("clone")
    pin = await _unfinished(parent, clone)
    if is_opened:
        await clone.open()
    others = [each for each in (await parent.manifest()).snapshots if each.id != pin.id]
    if is_expired:
        others.append(replace(pin, snapshot_expire_time_s=1))
    await parent.replace_manifest(snapshots=tuple(others))
    for process in (clone.open, clone.compact):
        with pytest.raises(OriginLost, match=parent.url):
            await process()
    kinds = {finding.kind for finding in await clone.damage()}
    assert FindingKind.ORIGIN in kinds
    await parent.put(b"key000", value=b"another")
    await parent.compact()
    await parent.collect()
    missing = [each for each in await clone.damage() if each.kind is FindingKind.MISSING]
    assert missing
    assert all(each.name.startswith(f"{parent.url}/{names.LEVELS_FOLDER}") for each in missing)
    if is_opened:
        with pytest.raises(OriginLost):
            await parent.clone_to(clone)
        return
    await parent.clone_to(clone)
    await _assert_whole(clone, parent, await parent.rows())
    assert await clone.damage() == []


async def test_of_two_that_make_a_lost_clone_again_one_does() -> None:
    """When two processes make a lost clone again, one succeeds; the other one, whose own pins may
    be gone by then, finds that the clone exists.
    """
    parent, clone = await everything(), Place("clone")
    await _unfinished(parent, clone)
    await parent.replace_manifest(snapshots=())

    async def before(request: Request) -> None:
        if (request.operation, request.name) == ("create", names.manifest_name(1)):
            await parent.clone_to(clone)

    with real_runtime() as runtime, pytest.raises(DatabaseExists):
        await CloneJob(parent.cas(runtime), FaultyStore(clone.store, before=before)).run()
    await _assert_whole(clone, parent, await parent.rows())


async def test_a_clone_that_has_nothing_of_its_parent_is_completed_by_the_same_command() -> None:
    """A clone is completed even if all SSTs of its parent belong to the parent of that one, so that
    only there are pins.
    """
    first, parent, clone = await everything(), Place("parent"), Place("clone")
    await first.compact()
    await first.clone_to(parent)
    pin = await _unfinished(parent, clone, pinned=first)
    manifest = await clone.manifest()
    assert {origin.url for origin in manifest.origins} == {first.url}
    await parent.clone_to(clone)
    assert is_pin_permanent(await first.manifest(), pin.id)
    with pytest.raises(DatabaseExists):
        await parent.clone_to(clone)


async def test_a_parent_that_is_damaged_ends_no_collection() -> None:
    """A damaged parent does not stop the clone's collection: the pin is left for later, and a check
    names the manifest and its database.
    """
    parent, clone = await everything(), Place("clone")
    await parent.clone_to(clone)
    await clone.write(puts([key for key, _, _ in await parent.rows()], b"other"))
    (pin,) = needed_pins(await clone.manifest())
    await clone.snapshot("kept")
    await clone.compact()
    damaged = names.manifest_name((await parent.manifest()).manifest_id + 1)
    await parent.store.create(damaged, b"no manifest")
    (finding,) = await clone.damage()
    assert (finding.name, finding.kind) == (f"{parent.url}/{damaged}", FindingKind.TRUNCATED)
    await clone.collect()
    assert [each.snapshot_id for each in (await clone.manifest()).origins] == [pin]
    await parent.store.delete([damaged])
    await clone.collect()
    assert (await clone.manifest()).origins == ()
    assert await parent.pins() == []


async def test_a_parent_that_is_gone_is_reported() -> None:
    """Without any object of the parent the clone is lost, and its check reports that and does not
    fail.
    """
    parent, clone = await everything(), Place("clone")
    await parent.clone_to(clone)
    for folder in (names.MANIFEST_FOLDER, names.LEVELS_FOLDER):
        await parent.store.delete([info.name async for info in parent.store.list(folder)])
    with pytest.raises(OriginLost, match=parent.url):
        await clone.open()
    kinds = {finding.kind for finding in await clone.damage()}
    assert kinds == {FindingKind.ORIGIN, FindingKind.MISSING}
    await clone.collect()


async def test_two_may_make_the_same_clone() -> None:
    """When two processes clone to one place at once, at least one succeeds, and the clone is
    complete.
    """
    parent, clone = await everything(), Place("clone")
    expected = await parent.rows()
    outcomes = await asyncio.gather(
        *(parent.clone_to(clone) for _ in range(4)), return_exceptions=True
    )
    assert {type(each) for each in outcomes} <= {CloneReport, DatabaseExists}
    assert any(isinstance(each, CloneReport) for each in outcomes)
    await _assert_whole(clone, parent, expected)
    others = [pin for pin in await parent.pins() if pin.id != (await _pin(clone, parent)).id]
    assert all(pin.snapshot_expire_time_s != NEVER for pin in others)
    assert await clone.damage() == []


async def test_a_pin_that_keeps_a_clone_is_not_deleted_by_mistake() -> None:
    """Deleting the pin of a clone, or setting its expiry, is refused unless forced."""
    parent, clone = await everything(), Place("clone")
    await parent.clone_to(clone)
    pin = await _pin(clone, parent)
    with real_runtime() as runtime:
        snapshots = Snapshots(parent.cas(runtime))
        with pytest.raises(InvalidRequest, match="without it the clone is lost"):
            await snapshots.delete(pin.name)
        with pytest.raises(InvalidRequest, match="without it the clone is lost"):
            await snapshots.renew(pin.id.hex(), ttl_ms=HOUR_MS)
        assert await snapshots.renew(pin.id.hex(), ttl_ms=None) == pin
        assert await snapshots.delete(pin.name, is_forced=True) == pin
    assert await parent.pins() == []
