"""Tests of the edits of range jobs, and of compactors that leave reserved SSTs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shalekv.errors import LeaseLost, ManifestConflict
from shalekv.protocol.compaction.jobs import (
    CompactionState,
    MergeJob,
    MergeResult,
    WalJob,
    WalResult,
    WalState,
    applied,
)
from shalekv.protocol.compaction.policy import LeveledPolicy, new_runs, runs_to_merge
from shalekv.protocol.compaction.publish import (
    check_not_reserved,
    is_range_published,
    publish_range,
    reservations,
    reserve,
    reserved_seq,
)
from shalekv.protocol.compaction.range_job import RangeJob, RangeResult
from shalekv.protocol.lease import (
    RANDOM_BYTES,
    leased_sst_id,
    new_lease_id,
    renew_lease,
    with_lease,
)
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Lease, Manifest, Version, newest_first
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.store import LevelSettings

LEASE_ID = new_lease_id(5, bytes(RANDOM_BYTES))
OTHER_ID = new_lease_id(6, bytes(RANDOM_BYTES))
NOW_MS = 50_000
LEASE = Lease(LEASE_ID, 99, "a job")


def info(
    number: int,
    level: int,
    seq: int,
    keys: tuple[bytes, bytes] = (b"a", b"z"),
    *,
    lease_id: bytes = OTHER_ID,
    size_bytes: int = 1,
) -> SstInfo:
    sst_id = leased_sst_id(lease_id, number.to_bytes(8, "big"))
    return SstInfo(sst_id, level, *keys, 1, 1, 1, 1, seq, seq, 1, 0, size_bytes, 1)


OLD = [info(0, 0, 50), info(1, 0, 40), info(2, 7, 10, (b"a", b"m")), info(3, 7, 11, (b"n", b"z"))]
EMPTY = Manifest(
    database_id=bytes(16),
    manifest_id=8,
    write_id=bytes(16),
    wal_id_last_compacted=6,
    last_compacted_seq=50,
    leveled_ssts=SstTable.from_infos(OLD),
)
MANIFEST = reserve(EMPTY, LEASE, now_ms=NOW_MS)
JOB = RangeJob([[OLD[0]], [OLD[1]], OLD[2:]], 7)
OUTPUTS = [
    info(10, 7, 50, (b"a", b"k"), lease_id=LEASE_ID),
    info(11, 7, 40, (b"l", b"z"), lease_id=LEASE_ID),
]
RESULT = RangeResult(JOB, OUTPUTS)


def test_a_lease_reserves_what_the_levels_hold() -> None:
    """A lease reserves the entries of the levels at its creation, also after a renewal."""
    assert reserved_seq(MANIFEST, LEASE_ID) == 50
    later = renew_lease(replace(MANIFEST, last_compacted_seq=70), LEASE_ID, 120)
    assert reserved_seq(later, LEASE_ID) == 50
    assert [lease.id for lease in reservations(later, NOW_MS)] == [LEASE_ID]
    with pytest.raises(LeaseLost):
        reserved_seq(EMPTY, LEASE_ID)
    rewritten = replace(MANIFEST, leases=(LEASE,))  # by a version that has no such field
    with pytest.raises(ManifestConflict, match="reserves nothing"):
        reserved_seq(rewritten, LEASE_ID)


def test_one_job_at_a_time_reserves() -> None:
    """A second reservation is refused, unless it repeats the first or that has expired."""
    other = Lease(OTHER_ID, 99, "another job")
    with pytest.raises(ManifestConflict, match="a job merges the levels already"):
        reserve(MANIFEST, other, now_ms=NOW_MS)
    assert len(reserve(MANIFEST, LEASE, now_ms=NOW_MS).leases) == 1
    assert len(reserve(MANIFEST, other, now_ms=99_000).leases) == 2
    assert reserve(with_lease(EMPTY, other), LEASE, now_ms=NOW_MS).leases[0] == other


def test_the_result_replaces_its_inputs_and_reserves_nothing_any_more() -> None:
    """A published result replaces its inputs and keeps SSTs added meanwhile, and the lease."""
    added = [info(20, 0, 60), info(21, SYSTEM_LEVEL, 60)]
    meanwhile = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace((), added))
    after = publish_range(meanwhile, RESULT, LEASE_ID)
    assert [*after.leveled_ssts] == [*added, *OUTPUTS]
    assert after.leases == (LEASE,)
    assert replace(after, leveled_ssts=MANIFEST.leveled_ssts, leases=MANIFEST.leases) == MANIFEST


def test_without_its_lease_nothing_is_published() -> None:
    """Nothing is published without the lease, or of SSTs written under another one (F3)."""
    with pytest.raises(LeaseLost):
        publish_range(EMPTY, RESULT, LEASE_ID)
    stranger = RangeResult(JOB, [info(12, 7, 50)])
    with pytest.raises(LeaseLost, match="was not written under"):
        publish_range(MANIFEST, stranger, LEASE_ID)


@pytest.mark.parametrize("at", range(4))
def test_every_input_must_be_where_it_was(at: int) -> None:
    """An input that is gone or in another level was merged by another process: refused (I9)."""
    levels = MANIFEST.leveled_ssts
    for there in ([], [replace(OLD[at], level=5)]):
        manifest = replace(MANIFEST, leveled_ssts=levels.replace([OLD[at].id], there))
        with pytest.raises(ManifestConflict, match="is not in level"):
            publish_range(manifest, RESULT, LEASE_ID)


@pytest.mark.parametrize("level", [7, 8])
def test_nothing_may_stand_beside_or_below_the_outputs(level: int) -> None:
    """An SST added beside or below the outputs could be newer and be read after them (I2)."""
    between = info(30, level, 60, (b"b", b"c"))
    manifest = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace((), [between]))
    with pytest.raises(ManifestConflict, match="where an output would go"):
        publish_range(manifest, RESULT, LEASE_ID)


def test_what_is_published_is_seen() -> None:
    """A published result is recognised, even without outputs or after these were merged (F2)."""
    for result in (RESULT, RangeResult(JOB, [])):
        after = publish_range(MANIFEST, result, LEASE_ID)
        assert is_range_published(after, result, LEASE_ID)
        assert not is_range_published(MANIFEST, result, LEASE_ID)
        assert not is_range_published(EMPTY, result, LEASE_ID)
        gone = after.leveled_ssts.replace([each.id for each in after.leveled_ssts], ())
        assert is_range_published(replace(after, leveled_ssts=gone), result, LEASE_ID)
        assert not is_range_published(replace(MANIFEST, leveled_ssts=gone), result, LEASE_ID), (
            "another job merged the same inputs"
        )


def test_a_merge_of_the_compactor_gives_way_to_a_reservation() -> None:
    """A merge with reserved inputs is refused, unless it was picked in spite of the reservation."""
    merge = MergeResult(MergeJob(0, 7, OLD[:2], OLD[2:], is_move=False, reason=""), ())
    with pytest.raises(ManifestConflict, match="a job has reserved an input meanwhile"):
        check_not_reserved(MANIFEST, merge, ())
    check_not_reserved(MANIFEST, merge, [LEASE_ID])
    check_not_reserved(EMPTY, merge, ())
    check_not_reserved(MANIFEST, WalResult(WalJob(range(7, 8), ""), (), 60, 0), ())
    published = publish_range(MANIFEST, RESULT, LEASE_ID)
    with pytest.raises(ManifestConflict, match="has merged an input meanwhile"):
        check_not_reserved(published, merge, [LEASE_ID])
    new = [info(20, 0, 60)]
    later = replace(MANIFEST, leveled_ssts=MANIFEST.leveled_ssts.replace((), new))
    of_new = MergeResult(MergeJob(0, 0, new, (), is_move=False, reason=""), ())
    check_not_reserved(later, of_new, ())


def version_of(new: Sequence[SstInfo]) -> Version:
    """Return the levels with these SSTs in L0 beside the reserved ones."""
    manifest = replace(EMPTY, leveled_ssts=EMPTY.leveled_ssts.replace((), new))
    return Version.of(manifest)


def test_new_ssts_without_overlaps_are_one_run() -> None:
    """New SSTs that at most share a bound are one run; one without a bound overlaps later ones."""
    disjoint = [info(20, 0, 60, (b"a", b"c")), info(21, 0, 61, (b"c", b"f"))]
    assert [len(run) for run in new_runs(version_of(disjoint), 50)] == [2]
    endless = [info(20, 0, 60, (b"a", b"")), info(21, 0, 61, (b"c", b"f"))]
    assert [len(run) for run in new_runs(version_of(endless), 50)] == [1, 1]
    assert new_runs(version_of([]), 50) == []
    assert len(new_runs(version_of([]), 40)) == 1


def test_new_runs_of_one_size_are_merged() -> None:
    """New runs of similar size are merged, if they are enough and within the limit of bytes."""
    runs = [[info(number, 0, 90 - number, size_bytes=10)] for number in range(20, 24)]
    large = [info(30, 0, 55, size_bytes=1_000)]
    assert len(runs_to_merge([*runs, large], count_min=4, limit_bytes=10_000)) == 4
    assert runs_to_merge([*runs, large], count_min=5, limit_bytes=10_000) == ()
    assert runs_to_merge(runs, count_min=4, limit_bytes=35) == ()


SETTINGS = CompactorSettings(l0_trigger_count=2, wal_trigger_bytes=1_024)
POLICY = LeveledPolicy(SETTINGS, LevelSettings())


def state(new: Sequence[SstInfo], *, wal: int = 0, is_hurried: bool = False) -> CompactionState:
    backlog = WalState(7, wal, wal * 2_000, 0)
    return CompactionState(version_of(new), backlog, is_hurried, now_ms=NOW_MS, reserved_seq=50)


def test_a_compactor_merges_the_wal_and_what_is_new() -> None:
    """Beside a range job a compactor merges only the WAL and new SSTs."""
    assert POLICY.pick(replace(state([]), reserved_seq=None)) is not None
    assert POLICY.pick(state([])) is None
    assert isinstance(POLICY.pick(state([], wal=1)), WalJob)
    new = [info(20, 0, 60), info(21, 0, 61)]
    job = POLICY.pick(state(new))
    assert isinstance(job, MergeJob)
    assert (job.source_level, job.target_level, job.overlapped) == (L0, L0, ())
    assert {each.id for each in job.sources} == {each.id for each in new}
    after = applied(state(new), MergeResult(job, [info(30, 0, 61, (b"a", b"z"))]))
    assert after.version.l0 == newest_first([info(30, 0, 61, (b"a", b"z")), *OLD[:2]])
    assert POLICY.pick(after) is None


def test_writes_that_wait_override_a_reservation() -> None:
    """Reserved SSTs are merged if L0 is full of new SSTs that cannot be merged, and WAL waits."""
    sizes = [10**9 * 3**at for at in range(6)]  # each too large for the ones before it
    new = [info(20 + at, 0, 90 - at, size_bytes=size) for at, size in enumerate(sizes)]
    waiting = POLICY.pick(state(new[:5], wal=1))
    assert isinstance(waiting, WalJob)
    job = POLICY.pick(state(new, wal=1, is_hurried=True))
    assert isinstance(job, MergeJob)
    assert any(each.min_seq <= 50 for each in job.inputs)
    assert POLICY.pick(state(new)) is None
