"""How the SSTs of L0 hang together."""

from __future__ import annotations

from dataclasses import replace

from shalekv.core.audit.levels import level_findings
from shalekv.core.compaction.jobs import MergeJob, WalJob
from shalekv.core.compaction.l0_runs import l0_runs, l0_sources
from shalekv.core.compaction.policy import LeveledPolicy
from shalekv.core.compaction.range_job import pick_range
from shalekv.core.compaction.state import CompactionState, WalState
from shalekv.core.key_range import KeyRange
from shalekv.core.manifest import Manifest
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.core.tree import L0, Tree, newest_first
from shalekv.settings.compactor import CompactorSettings
from shalekv.settings.levels import LevelSettings
from shalekv.settings.model import MIB

SETTINGS = CompactorSettings()
POLICY = LeveledPolicy(SETTINGS, LevelSettings())
BACKLOG = WalState(7, 1, SETTINGS.wal_trigger_bytes, 0)


def sst(number: int, seqs: tuple[int, int], keys: tuple[bytes, bytes]) -> SstInfo:
    return SstInfo(number.to_bytes(16, "big"), L0, *keys, 1, 1, 2, 1, *seqs, 2, 0, 32 * MIB, 1)


def outputs(first: int, count: int, seqs: tuple[int, int]) -> list[SstInfo]:
    """What one merge of keys in no order leaves: nearly the same numbers in each SST."""
    low, high = seqs
    return [
        sst(first + at, (low + at, high - at), (b"%04d" % (2 * at), b"%04d" % (2 * at + 1)))
        for at in range(count)
    ]


def tree_of(*ssts: SstInfo) -> Tree:
    return Tree(1, 6, 9_999, newest_first(ssts), (), ())


def test_what_one_job_made_is_one_source() -> None:
    """Its numbers interleave; those of another job are all below or above."""
    young, old = outputs(0, 5, (200, 300)), outputs(10, 5, (100, 199))
    load = [replace(info, min_seq=301, max_seq=301) for info in outputs(20, 5, (0, 0))]
    tree = tree_of(*old, *load, *young)
    assert l0_sources(tree.l0) == [load, young, old]
    job = pick_range(tree, KeyRange(b"", b""), reserved_seq=9_999)
    assert job is not None
    assert job.sources == [load, young, old]


def test_what_overlaps_is_never_one_source() -> None:
    """Whatever the numbers say: a source is read as one run."""
    wide, narrow = sst(1, (5, 90), (b"a", b"z")), sst(2, (1, 50), (b"c", b"d"))
    assert l0_sources([wide, narrow]) == [[wide], [narrow]]
    endless = sst(3, (5, 90), (b"a", b""))
    assert l0_sources([endless, narrow]) == [[endless], [narrow]]


def test_what_one_job_made_is_not_divided() -> None:
    """Merged with newer ones, a part of it would have numbers below those of the rest, over the
    same keys: whoever checks the levels could not tell which is newer.
    """
    newest = sst(1, (101, 120), (b"a", b"c"))
    left, right = sst(2, (1, 50), (b"a", b"m")), sst(3, (40, 100), (b"n", b"z"))
    assert l0_runs([newest, right, left]) == [[newest], [left, right]]


def test_the_wal_is_merged_after_a_job_as_before() -> None:
    """What was merged inside of L0 is a few runs, though of many SSTs: L0 is not full, so writes
    need not wait until GiBs have gone down.
    """
    merged = [*outputs(0, 32, (1_000, 2_000)), *outputs(100, 32, (100, 999))]
    state = CompactionState(tree_of(*merged), BACKLOG, is_hurried=True, now_ms=1)
    assert isinstance(POLICY.pick(state), WalJob)
    idle = replace(state, wal=WalState(7, 0, 0, 0), is_hurried=False)
    assert isinstance(POLICY.pick(idle), MergeJob)


def test_jobs_one_after_the_other_do_not_let_l0_grow() -> None:
    """Each reserves all that came before it. When that is too much, no more is added to it."""
    limit = 6 * SETTINGS.l0_trigger_count
    old = [sst(number, (number, number), (b"a", b"b")) for number in range(1, limit + 1)]
    state = CompactionState(tree_of(*old), BACKLOG, is_hurried=True, now_ms=1, reserved_seq=limit)
    job = POLICY.pick(state)
    assert isinstance(job, MergeJob)
    assert job.target_level > L0
    fewer = replace(state, tree=tree_of(*old[1:]))
    assert isinstance(POLICY.pick(fewer), WalJob)
    assert POLICY.pick(replace(state, wal=WalState(7, 0, 0, 0), is_hurried=False)) is None


def test_neighbours_that_share_a_border_are_in_order() -> None:
    """One ends with a range tombstone where the next begins: no key is in both."""
    row = [
        replace(sst(1, (5, 90), (b"a", b"m")), tombstone_count=1),
        sst(2, (4, 80), (b"m", b"z")),
    ]
    manifest = Manifest(
        database_id=bytes(16),
        manifest_id=1,
        write_id=bytes(16),
        wal_id_last_compacted=6,
        last_compacted_seq=90,
        leveled_ssts=SstTable.from_infos(row),
    )
    assert [*level_findings("manifest", manifest)] == []
