"""A clone holds what its parent did, and later changes of either do not affect the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.errors import DatabaseExists, IllegalState, InvalidRequest
from shalekv.format import names
from shalekv.jobs.collect import FENCE_BYTES
from shalekv.protocol.origins import foreign_ids, is_pin, pin_name
from shalekv.store.policies import StoredPolicy
from shalekv.v1 import kv_pb2
from tests.kit.engine.places import HOUR_MS, Place, everything, puts
from tests.kit.policies import POLICY
from tests.kit.processes.in_process import real_runtime


async def test_what_is_written_stays_where_it_was_written() -> None:
    """Parent and clone go on independently from the same state."""
    parent, clone = await everything(), Place("clone")
    before, cloned_from = await parent.rows(), await parent.manifest()
    await parent.clone_to(clone)
    await parent.put(b"key002", b"parent", value=b"of the parent")
    await clone.put(b"key003", b"clone", value=b"of the clone")
    in_parent, in_clone = await parent.rows(), await clone.rows()
    assert max(seq for _, _, seq in in_clone) > max(seq for _, _, seq in before)  # I5
    manifest = await clone.manifest()
    assert manifest.writer_epoch > cloned_from.writer_epoch
    assert manifest.logical_time_ms >= cloned_from.logical_time_ms
    assert manifest.database_id != cloned_from.database_id
    for rows, own in ((in_parent, (b"key002", b"parent")), (in_clone, (b"key003", b"clone"))):
        others = [row for row in rows if row[0] not in own]
        assert others == [row for row in before if row[0] not in own]
        assert {key for key, value, _ in rows if value.startswith(b"of the ")} == {*own}


async def test_a_clone_has_the_access_policy_of_its_parent() -> None:
    """With a secret of its own, before it can be opened; later changes concern one of them."""
    parent, clone = await everything(), Place("clone")
    with real_runtime() as runtime:
        parents = StoredPolicy(parent.cas(runtime), (await parent.manifest()).database_id)
        original = await parents.replace(replace(POLICY, version=0))
        await parent.clone_to(clone)
        clones = StoredPolicy(clone.cas(runtime), (await clone.manifest()).database_id)
        cloned = await clones.refresh()
        assert cloned == replace(original, secret=cloned.secret)
        assert cloned.secret != original.secret
        await clones.replace(replace(cloned, is_enforced=False))
        assert await parents.refresh() == original
    assert await clone.damage() == []


async def test_what_has_expired_in_the_parent_is_not_in_the_clone() -> None:
    """Expired values are not in the clone, even if nothing was written since and the clock of the
    new place is far behind (I2).
    """
    parent, clone = await everything(), Place("clone")
    dead = kv_pb2.PutChange(key=b"key003", value=b"dead", ttl_ms=HOUR_MS // 2)
    await parent.write([kv_pb2.Change(put=dead)])
    parent.store = parent.store_at(HOUR_MS)
    await parent.clone_to(clone)
    rows = await clone.rows()
    assert b"key003" not in {key for key, _, _ in rows}
    assert await parent.rows() == rows
    assert await clone.damage() == []


async def test_the_parent_keeps_what_a_clone_reads() -> None:
    """Whatever the parent deletes, compacts and collects, the clone reads everything as before
    (I8).
    """
    parent, clone = await everything(), Place("clone")
    expected = await parent.rows()
    cloned = await parent.clone_to(clone)
    assert cloned.shared_ssts > 1
    assert cloned.own_ssts == 2  # of the log before and behind the load, which is shared
    assert cloned.wal_objects >= 4
    shared = foreign_ids((await clone.manifest()).origins)
    assert not shared & await clone.ssts()
    for round_number in range(3):
        await parent.write(puts([key for key, _, _ in expected], b"%d" % round_number))
        await parent.compact()
        await parent.collect()
    assert not shared & {info.id for info in (await parent.manifest()).leveled_ssts}
    assert shared <= await parent.ssts()
    assert await clone.rows() == expected
    assert await clone.damage() == await parent.damage() == []


async def test_a_pin_keeps_no_log() -> None:
    """The parent's log is collected as without a clone; the pin can be neither read nor cloned."""
    parent, clone = await everything(), Place("clone")
    await parent.clone_to(clone)
    (pin,) = await parent.pins()
    assert is_pin(pin)
    assert await parent.rows_at(pin.id) is None
    with pytest.raises(InvalidRequest, match="keeps SSTs for a clone"):
        await parent.clone_to(Place("second"), pin.name)
    assert pin.name == pin_name((await clone.manifest()).database_id, clone.url)
    pinned = (await parent.manifest()).first_uncompacted_wal_id
    await parent.put(b"another")
    await parent.compact()
    await parent.collect()
    last = (await parent.manifest()).wal_id_last_compacted or 0
    data = [
        (await parent.store.get(info.name)).data
        async for info in parent.store.list(names.WAL_FOLDER)
        if pinned <= (names.parse_wal_name(info.name) or 0) < last
    ]
    assert last - pinned > len(data)
    assert all(len(each) == FENCE_BYTES for each in data)


async def test_a_pin_goes_when_nothing_is_shared() -> None:
    """When the clone has merged all shared SSTs, its collector removes the pin, and the parent's
    collector deletes what is not read any more; the clone holds the same data.
    """
    parent, clone = await everything(), Place("clone")
    expected = await parent.rows()
    await parent.clone_to(clone)
    shared = foreign_ids((await clone.manifest()).origins)
    await clone.collect()
    assert await parent.pins()
    await parent.write(puts([key for key, _, _ in expected], b"other"))
    await clone.write(puts([key for key, _, _ in expected], b"other"))
    await clone.compact()
    (origin,) = (await clone.manifest()).origins
    assert origin.sst_ids == b""
    await clone.collect()  # by now the writers' snapshots of older trees have expired
    assert await parent.pins() == []
    assert (await clone.manifest()).origins == ()
    await parent.compact()
    await parent.collect()
    assert not shared & await parent.ssts()
    assert [value for _, value, _ in await clone.rows()] == [b"other"] * len(expected)
    assert await clone.damage() == await parent.damage() == []


async def test_a_snapshot_of_the_clone_keeps_the_pin() -> None:
    """While a snapshot of the clone needs shared SSTs, the pin stays, and the snapshot can be
    cloned.
    """
    parent, clone, later = await everything(), Place("clone"), Place("later")
    expected = await parent.rows()
    await parent.clone_to(clone)
    kept = await clone.snapshot("kept")
    await clone.write(puts([key for key, _, _ in expected], b"other"))
    await clone.compact()
    await clone.collect(ahead_ms=0)
    assert await clone.rows_at(kept.id) == expected
    await parent.write(puts([key for key, _, _ in expected], b"other"))
    await parent.compact()
    await parent.collect()
    assert len(await parent.pins()) == 1
    await clone.clone_to(later, "kept")
    assert await later.rows() == expected
    assert len(await parent.pins()) == 2
    await clone.collect()  # "kept" has expired; the later clone has a pin of its own
    assert [pin.name for pin in await parent.pins()] == [
        pin_name((await later.manifest()).database_id, later.url)
    ]
    await parent.collect()
    assert await later.rows() == expected
    assert await later.damage() == []


async def test_no_database_is_overwritten() -> None:
    """No clone is made where a database, or remains of one, exist."""
    parent, other = await everything(), await everything("other")
    before = await other.rows()
    with pytest.raises(DatabaseExists):
        await parent.clone_to(other)
    with pytest.raises(DatabaseExists):
        await parent.clone_to(parent)
    assert await other.rows() == before
    lost = [info.name async for info in other.store.list("manifest/")]
    await other.store.delete(lost)
    with pytest.raises(IllegalState, match="no manifest"):
        await parent.clone_to(other)
    assert await parent.pins() == []
