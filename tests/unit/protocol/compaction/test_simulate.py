"""Tests of the simulator: sizes, reproducibility, workloads, stalls and bills."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shalekv.cli.commands.compaction import variations
from shalekv.format.footer import SstProperties
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.compaction.outcome import (
    MONTH_S,
    Prices,
    Setup,
    SimulatedRequests,
    monthly_bill,
)
from shalekv.protocol.compaction.simulate import overhead_bytes, simulate
from shalekv.protocol.compaction.workload import KeyOrder, Workload, operations
from shalekv.protocol.entry import Entry, Kind
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.model import GIB, KIB, MIB
from shalekv.settings.store import LevelSettings

SMALL = Setup(
    compactor=CompactorSettings(wal_trigger_bytes=2 * MIB, base_level_bytes=16 * MIB),
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
    return Workload(order=order, written_bytes=written_mib * MIB)


@pytest.mark.parametrize("value_bytes", [100, 1_000, 5_000])
@pytest.mark.parametrize(("block_bytes", "filter_bits"), [(16 * KIB, 10), (64 * KIB, 0)])
def test_sizes_are_those_of_real_ssts(value_bytes: int, block_bytes: int, filter_bits: int) -> None:
    """The simulated overhead of keys and values is that of the format, within 2%."""
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


def test_the_same_workload_gives_the_same_figures() -> None:
    """A workload gives the same figures again, and other figures with another seed."""
    one = simulate(workload(), SMALL)
    assert simulate(workload(), SMALL) == one
    assert simulate(replace(workload(), seed=2), SMALL).amplification != one.amplification


@pytest.mark.parametrize("order", [KeyOrder.SEQUENTIAL, KeyOrder.TIME_ORDERED])
def test_keys_ascend_but_for_late_ones(order: KeyOrder) -> None:
    """Keys ascend except for late ones; deletes take the lowest keys, overwrites any known key."""
    deleting = operations(replace(workload(order), delete_share=0.2))
    ordinals = deleting.keys[~deleting.deletes] >> 26
    late = np.arange(1, len(ordinals) + 1) - ordinals.astype(np.int64)
    assert late.min() == 0
    assert bool(late.any()) == (order is KeyOrder.TIME_ORDERED)
    oldest = deleting.keys[deleting.deletes] >> 26
    assert oldest.max() < ordinals.max() / 2
    overwriting = operations(replace(workload(order), overwrite_share=0.4)).keys
    above_all = float((overwriting == np.maximum.accumulate(overwriting)).mean())
    assert above_all == pytest.approx(0.6, abs=0.03) or order is KeyOrder.TIME_ORDERED


def test_a_setting_is_varied_alone() -> None:
    """A variation of a setting of the levels keeps all others at their defaults."""
    default, varied = variations({"sst_bytes": ["64MiB"]})
    assert default.setup == Setup()
    assert varied.setup == replace(Setup(), levels=LevelSettings(sst_bytes=64 * MIB))


def test_writes_that_are_too_fast_wait() -> None:
    """Uncompacted bytes and L0 stay within their bounds, and writes that are too fast wait."""
    asked = replace(workload(written_mib=256), write_bytes_per_s=200e6)
    found = simulate(asked, SMALL)
    assert found.stalled_s > 1
    assert found.wal_bytes_max <= SMALL.uncompacted_bytes_max
    assert found.l0_count_max <= 3 * SMALL.compactor.l0_trigger_count + 1
    assert simulate(replace(asked, write_bytes_per_s=1e6), SMALL).stalled_s == 0


def test_the_bill_is_requests_and_bytes_times_prices() -> None:
    """A month of one PUT in a second, one GET in a second and 10 GiB costs what S3 lists."""
    bill = monthly_bill(
        SimulatedRequests(put=60, get=60), elapsed_s=60, stored_bytes=10 * GIB, prices=Prices()
    )
    assert bill.requests_usd == pytest.approx(MONTH_S / 1_000 * (0.005 + 0.0004))
    assert bill.storage_usd == pytest.approx(0.23)
