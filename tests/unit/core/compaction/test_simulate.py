"""The simulator: its sizes are those of real SSTs, and its figures follow from what was written."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shalekv.core.compaction.bill import MONTH_S, Prices, Requests, monthly_bill
from shalekv.core.compaction.outcome import Setup
from shalekv.core.compaction.rehearsal import overhead_bytes
from shalekv.core.compaction.simulate import predict, simulate
from shalekv.core.compaction.workload import KeyOrder, Workload, operations
from shalekv.core.entry import Entry, Kind
from shalekv.format.footer import SstProperties
from shalekv.format.sst_encode import encode_sst
from shalekv.settings.compactor import CompactorSettings
from shalekv.settings.levels import LevelSettings
from shalekv.settings.model import GIB, KIB, MIB

SMALL = Setup(
    compactor=CompactorSettings(
        wal_trigger_bytes=2 * MIB, base_level_bytes=16 * MIB, compaction_bytes_max=64 * MIB
    ),
    levels=LevelSettings(sst_bytes=4 * MIB),
    uncompacted_bytes_max=32 * MIB,
)
PROPERTIES = SstProperties(
    name="levels/00000000-0000-7000-8000-000000000000.sst",
    database_id=bytes(16),
    writer_epoch=1,
    writer_nonce=bytes(16),
    write_id=bytes(16),
)


def workload(order: KeyOrder = KeyOrder.UNIFORM, *, written_mib: int = 64) -> Workload:
    """A small one."""
    return Workload(order=order, written_bytes=written_mib * MIB)


@pytest.mark.parametrize("value_bytes", [100, 1_000, 5_000])
@pytest.mark.parametrize(("block_bytes", "filter_bits"), [(16 * KIB, 10), (64 * KIB, 0)])
def test_sizes_are_those_of_real_ssts(value_bytes: int, block_bytes: int, filter_bits: int) -> None:
    """What the simulator adds to keys and values is what the format adds, within 2%."""
    draw = random.Random(1)
    keys = sorted(draw.randbytes(16) for _ in range(2_000))
    entries = [
        Entry(key, seq, Kind.PUT, bytes(draw.randint(value_bytes // 2, value_bytes * 3 // 2)))
        for seq, key in enumerate(keys, 1)
    ]
    logical = sum(len(entry.key) + len(entry.value) for entry in entries)
    stored = len(
        encode_sst(
            PROPERTIES, entries, block_bytes=block_bytes, filter_bits_per_key=filter_bits or None
        )
    )
    overhead = overhead_bytes(
        logical / len(entries), key_bytes=16, block_bytes=block_bytes, filter_bits=filter_bits
    )
    assert logical + len(entries) * overhead == pytest.approx(stored, rel=0.02)


@pytest.mark.parametrize("order", KeyOrder)
def test_operations_are_what_the_workload_says(order: KeyOrder) -> None:
    """Bytes and deletes are about what was asked for; live bytes are those that are left."""
    asked = replace(workload(order), delete_share=0.2, overwrite_share=0.2)
    ops = operations(asked)
    assert int(ops.logical_bytes.sum()) == pytest.approx(asked.written_bytes, rel=0.03)
    assert float(ops.deletes.mean()) == pytest.approx(0.2, abs=0.03)
    live: dict[int, int] = {}
    for key, size, is_delete in zip(ops.keys, ops.logical_bytes, ops.deletes, strict=True):
        live[int(key)] = 0 if is_delete else int(size)
    assert int(ops.live_bytes[-1]) == sum(live.values())
    assert (ops.live_bytes >= 0).all()


def test_the_same_workload_gives_the_same_figures() -> None:
    """Everything that is random comes from the seed; another seed gives other figures."""
    one = simulate(workload(), SMALL)
    assert simulate(workload(), SMALL) == one
    assert predict(workload(), SMALL) == one.amplification
    assert predict(replace(workload(), seed=2), SMALL) != one.amplification


def test_sequential_keys_are_written_to_the_wal_and_to_l0() -> None:
    """Nothing else is written: everything below L0 is a move."""
    asked = replace(workload(KeyOrder.SEQUENTIAL), value_bytes_min=4_000, value_bytes_max=4_000)
    found = simulate(asked, SMALL).amplification
    assert found.write == pytest.approx(2, rel=0.1)
    assert found.space == pytest.approx(1, rel=0.02)


def test_what_is_written_at_random_is_written_more_often() -> None:
    """Random keys cost merges; the tree stays within what the multiplier allows."""
    found = predict(replace(workload(), overwrite_share=0.2, delete_share=0.1), SMALL)
    assert 3 < found.write < 12
    assert 1 <= found.space < 1.2
    assert found.space <= found.space_max < 1.6


def test_writes_that_are_too_fast_wait() -> None:
    """What is not compacted stays within its bound, L0 as well; the rest is waiting."""
    asked = replace(workload(written_mib=256), write_bytes_per_s=200e6)
    found = simulate(asked, SMALL)
    assert found.stalled_s > 1
    assert found.wal_bytes_max <= SMALL.uncompacted_bytes_max
    assert found.l0_count_max <= 3 * SMALL.compactor.l0_trigger_count + 1
    assert simulate(replace(asked, write_bytes_per_s=1e6), SMALL).stalled_s == 0


def test_the_bill_is_requests_and_bytes_times_prices() -> None:
    """A month of one PUT in a second, one GET in a second and 10 GiB costs what S3 lists."""
    bill = monthly_bill(
        Requests(put=60, get=60), elapsed_s=60, stored_bytes=10 * GIB, prices=Prices()
    )
    assert bill.requests_usd == pytest.approx(MONTH_S / 1_000 * (0.005 + 0.0004))
    assert bill.storage_usd == pytest.approx(0.23)


def test_every_wal_object_and_every_edit_is_paid_for() -> None:
    """Twice the WAL objects are so many more PUTs and GETs, and deletes of them later."""
    unread = replace(workload(), gets_per_s=0, scans_per_s=0)
    one = simulate(unread, SMALL).requests
    two = simulate(unread, replace(SMALL, flush_interval_ms=25)).requests
    objects = 64 * MIB / 5e6 / 0.05
    assert two.put - one.put == pytest.approx(objects, rel=0.15)
    assert two.get - one.get == pytest.approx(objects, rel=0.3)
    assert one.list > 0
