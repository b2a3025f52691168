"""Slots that commit loads of ready-made SSTs."""

from __future__ import annotations

from dataclasses import replace

from shalekv.core.compaction.jobs import WalResult
from shalekv.core.lease import RANDOM_BYTES, leased_sst_id, new_lease_id
from shalekv.core.loads import is_pending, register_load
from shalekv.core.manifest import PendingLoad
from shalekv.core.sst_table import SstTable
from shalekv.core.tree import L0, Tree
from shalekv.format.footer import SstProperties
from shalekv.format.load_record import load_entry
from shalekv.format.names import level_name, wal_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from tests.kit.engine.compaction import STORE_NOW_MS, CompactedDatabase, put, small_settings


def properties(database: CompactedDatabase, name: str) -> SstProperties:
    return SstProperties(
        name=name,
        database_id=database.stored.current.database_id,
        writer_epoch=1,
        writer_nonce=bytes(16),
        write_id=bytes(16),
        logical_time_ms=STORE_NOW_MS,
    )


async def loaded(database: CompactedDatabase, load_id: str, *keys: bytes) -> None:
    """Load a file with these keys, whose record fills the next slot."""
    lease_id = new_lease_id(1, bytes(RANDOM_BYTES))
    sst_id = leased_sst_id(lease_id, len(database.written).to_bytes(8, "big"))
    name = level_name(sst_id)
    data = encode_sst(
        properties(database, name), [put(key, b"load") for key in keys], block_bytes=99
    )
    await database.store.create(name, data)
    info = open_sst(name, data, database_id=None).footer.info(0)
    unnumbered = replace(info, min_seq=0, max_seq=0)
    load = PendingLoad(load_id, SstTable.from_infos([unnumbered]))
    await database.stored.edit(
        lambda current: register_load(current, load, oldest_ms=STORE_NOW_MS),
        lambda current: is_pending(current, load_id),
    )
    database.last_seq += 1
    slot = wal_name(len(database.written))
    control = [load_entry(load, database.last_seq)]
    await database.store.create(
        slot, encode_sst(properties(database, slot), (), (), (), control, block_bytes=99)
    )
    database.written.append([put(key, b"load")._replace(seq=database.last_seq) for key in keys])


async def test_a_slot_with_a_load_stands_alone() -> None:
    """No SST of L0 holds what is older and what is newer than a load, which becomes one itself."""
    database = await CompactedDatabase.begun(small_settings(sst_bytes=10_000))
    await database.write([put(b"a", b"before"), put(b"b", b"before")])
    await loaded(database, "load", b"a", b"c")
    await database.write([put(b"c", b"after")])
    for slots in (range(1), range(1, 2), range(2, 3)):
        result = await database.compact_wal()
        assert isinstance(result, WalResult)
        assert result.job.slots == slots
    manifest = await database.stored.refresh()
    assert manifest.pending_loads == ()
    assert [load.load_id for load in manifest.recent_loads] == ["load"]
    tree = Tree.of(manifest)
    assert [(info.min_seq, info.max_seq) for info in tree.l0] == [(3, 3), (2, 2), (1, 1)]
    expected = {b"a": (2, b"load"), b"b": (1, b"before"), b"c": (3, b"after")}
    naive = await database.read()
    assert naive.answers(expected, STORE_NOW_MS) == expected
    await database.merge(L0, 1)
    naive = await database.read()
    assert naive.answers(expected, STORE_NOW_MS) == expected
