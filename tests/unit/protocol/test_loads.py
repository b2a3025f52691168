"""Tests of loads: they are committed once, their files are kept, and memory of them is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.errors import LeaseLost, LoadUnknown
from shalekv.protocol.lease import leased_sst_id, new_lease_id, with_lease
from shalekv.protocol.loads import (
    CLOCK_MARGIN_MS,
    OWN_PREFIX,
    CommittedLoad,
    batch_of,
    drop_pending,
    drop_unrecorded,
    files_problem,
    find_load,
    is_pending,
    level_rows,
    load_version,
    register_load,
    with_committed,
)
from shalekv.protocol.manifest import L0, Lease, Manifest, PendingLoad, RecentLoad, Version
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.manifests import info

CUTOFF_MS = 1_000_000
MANIFEST = Manifest(
    database_id=bytes(16), manifest_id=7, write_id=bytes(16), gc_cutoff_ms=CUTOFF_MS
)


def pending(load_id: str, *infos: SstInfo) -> PendingLoad:
    return PendingLoad(load_id, SstTable.from_infos(infos or [info(1)]))


def registered(*loads: PendingLoad, manifest: Manifest = MANIFEST) -> Manifest:
    for load in loads:
        manifest = register_load(manifest, load, oldest_ms=CUTOFF_MS)
    return manifest


def committed(
    manifest: Manifest, load_id: str, seq: int, *, time_ms: int = 0, max_count: int = 3
) -> Manifest:
    """Return the manifest after the load was registered, committed and compacted."""
    sst = info(seq)
    load = CommittedLoad(load_id, SstTable.from_infos([sst]), seq, wal_id=seq)
    oldest_ms = max(CUTOFF_MS, time_ms)
    manifest = register_load(manifest, pending(load_id, sst), oldest_ms=oldest_ms)
    return with_committed(manifest, load, logical_time_ms=time_ms, max_count=max_count)


def ids(manifest: Manifest) -> list[str]:
    return [load.load_id for load in manifest.recent_loads]


def test_a_load_stays_pending_until_it_is_compacted() -> None:
    """Registering twice leaves one pending load; when its record is compacted, it is remembered."""
    manifest = registered(pending("x"), pending("y", info(2)), pending("x", info(3)))
    assert [load.load_id for load in manifest.pending_loads] == ["y", "x"]
    assert manifest.pending_loads[1].ssts[0] == info(3)
    load = CommittedLoad("x", SstTable.from_infos([info(3)]), 70, 9)
    after = with_committed(manifest, load, logical_time_ms=5, max_count=9)
    assert not is_pending(after, "x")
    assert is_pending(after, "y")
    assert after.recent_loads == (RecentLoad("x", 70, 5),)
    assert find_load(after.recent_loads, "x") == 70
    assert find_load(after.recent_loads, "y") is None


def test_files_must_be_young_or_leased() -> None:
    """Files that a collector may have deleted are refused, unless leases protect them all (F3)."""
    lease_id = new_lease_id(5, bytes(10))
    own = [replace(info(1), id=leased_sst_id(lease_id, bytes([n] * 8))) for n in (1, 2)]
    load = pending("x", replace(own[0], last_key=b"a"), replace(own[1], first_key=b"b"))
    old_ms = CUTOFF_MS - 1
    with pytest.raises(LeaseLost, match="no lease"):
        register_load(MANIFEST, load, oldest_ms=old_ms)
    leased = with_lease(MANIFEST, Lease(lease_id, 10, "spark"))
    assert is_pending(register_load(leased, load, oldest_ms=old_ms), "x")
    assert is_pending(register_load(MANIFEST, load, oldest_ms=CUTOFF_MS), "x")
    partly = pending("x", own[0], info(9, b"x", b"y"))
    with pytest.raises(LeaseLost):
        register_load(leased, partly, oldest_ms=old_ms)


def test_files_in_the_levels_are_not_loaded_again() -> None:
    """A file that is in the levels already is refused, whatever the id of the load is."""
    listed = replace(MANIFEST, leveled_ssts=SstTable.from_infos([replace(info(1), max_seq=5)]))
    with pytest.raises(LoadUnknown, match="already"):
        register_load(listed, pending("other"), oldest_ms=CUTOFF_MS)


def test_the_next_writer_drops_what_has_no_record() -> None:
    """Opening keeps the pending loads that a record commits, and no other."""
    manifest = registered(pending("x"), pending("y", info(2)), pending("z", info(3)))
    kept = drop_unrecorded(manifest, ["y", "never registered"])
    assert [load.load_id for load in kept.pending_loads] == ["y"]
    assert drop_pending(kept, {"x", "y"}).pending_loads == ()


@pytest.mark.parametrize(
    ("load_id", "batch"),
    [
        ("query-7", ("query", 7)),
        ("a-b-0", ("a-b", 0)),
        ("-5", None),
        ("query-", None),
        ("query-07", None),
        ("query-1x", None),
        ("query-\u0663", None),
        ("query-" + "9" * 21, None),
        ("line\nbreak-3", ("line\nbreak", 3)),
        ("plain", None),
    ],
)
def test_ids_of_batches(load_id: str, batch: tuple[str, int] | None) -> None:
    """The id of a stream's batch ends in a hyphen and a number that is spelled in one way."""
    assert batch_of(load_id) == batch


def test_the_last_batch_stands_for_its_stream() -> None:
    """One batch of each stream is remembered, and all earlier batches are known by it."""
    manifest = MANIFEST
    for n in range(50):
        manifest = committed(manifest, f"query-{n}", 100 + n)
    assert ids(manifest) == ["query-49"]
    assert find_load(manifest.recent_loads, "query-3") == 149
    assert find_load(manifest.recent_loads, "query-50") is None
    assert find_load(manifest.recent_loads, "other-3") is None
    assert manifest.loads_forgotten_ms == 0
    late = committed(manifest, "query-20", 200)
    assert find_load(late.recent_loads, "query-49") == 149


def test_others_are_bounded() -> None:
    """Beyond the bound the oldest single load is forgotten, no stream is, and its time is kept."""
    manifest = committed(MANIFEST, "query-1", 1, time_ms=5)
    for n in range(2, 7):
        manifest = committed(manifest, f"load {n}", n, time_ms=10 * n)
    assert ids(manifest) == ["query-1", "load 4", "load 5", "load 6"]
    assert manifest.loads_forgotten_ms == 30


def test_streams_are_bounded() -> None:
    """Beyond the bound the stream with the oldest commit is forgotten; its batches are refused."""
    manifest = MANIFEST
    for seq, stream in enumerate(["old", "busy", "third", "busy", "fourth", "busy"]):
        manifest = committed(manifest, f"{stream}-{seq}", seq, time_ms=CUTOFF_MS + seq)
    assert ids(manifest) == ["third-2", "fourth-4", "busy-5"]
    limit_ms = CUTOFF_MS + CLOCK_MARGIN_MS
    with pytest.raises(LoadUnknown, match="not remembered"):
        register_load(manifest, pending("old-0"), oldest_ms=limit_ms)
    with pytest.raises(LoadUnknown, match="not remembered"):
        register_load(manifest, pending("old-6"), oldest_ms=limit_ms)
    assert is_pending(register_load(manifest, pending("old-6"), oldest_ms=limit_ms + 1), "old-6")
    assert is_pending(register_load(manifest, pending("third-6"), oldest_ms=limit_ms), "third-6")


def test_loads_of_the_writer_itself_are_not_remembered() -> None:
    """A large batch of the writer has an id that never repeats, so it is not remembered."""
    manifest = committed(MANIFEST, f"{OWN_PREFIX}batch:1", 9)
    assert manifest.recent_loads == ()
    assert manifest.pending_loads == ()


def test_what_may_be_forgotten_is_not_applied_again() -> None:
    """A load with files as old as a forgotten load is refused; younger ones are accepted."""
    forgotten_ms = CUTOFF_MS * 2
    manifest = replace(MANIFEST, loads_forgotten_ms=forgotten_ms)
    limit_ms = forgotten_ms + CLOCK_MARGIN_MS
    with pytest.raises(LoadUnknown, match="not remembered"):
        register_load(manifest, pending("x"), oldest_ms=limit_ms)
    assert is_pending(register_load(manifest, pending("x"), oldest_ms=limit_ms + 1), "x")
    own = f"{OWN_PREFIX}batch:1"
    assert is_pending(register_load(manifest, pending(own), oldest_ms=limit_ms), own)


def test_the_commit_gives_the_number() -> None:
    """The rows of L0 and the version of a load have its sequence number; its files have none."""
    load = CommittedLoad(
        "x", SstTable.from_infos([info(1, b"a", b"b"), info(2, b"c", b"d")]), 70, 9
    )
    rows = level_rows(load)
    assert {(row.level, row.min_seq, row.max_seq) for row in rows} == {(L0, 70, 70)}
    assert [replace(row, min_seq=0, max_seq=0) for row in rows] == [*load.ssts]
    version = load_version(load)
    read = [each for run in version.runs for each in run.ssts]
    assert [replace(each, level=0, min_seq=0, max_seq=0) for each in read] == [*load.ssts]
    assert {each.max_seq for run in version.runs for each in run.ssts} == {70}
    assert [each.id for each in version.sources_of(b"c")] == [info(2).id]
    newer = replace(info(9, b"", b"z"), min_seq=71, max_seq=80)
    older = replace(info(8, b"", b"z"), min_seq=60, max_seq=69)
    table = SstTable.from_infos([older, *rows, newer])
    found = Version.of(replace(MANIFEST, leveled_ssts=table))
    assert [each.max_seq for each in found.l0] == [80, 70, 70, 69]


@pytest.mark.parametrize(
    ("infos", "at"),
    [
        ([info(1)], None),
        ([info(1, b"a", b"b"), info(2, b"b\x00", b"c")], None),
        ([info(1, b"a", b"b"), info(2, b"b", b"c")], 1),
        ([info(1, b"c", b"d"), info(2, b"a", b"b")], 1),
        ([info(1, b"a", b"b"), info(1, b"c", b"d")], 1),
        ([info(1), replace(info(2), level=1)], 1),
        ([replace(info(1), min_seq=1)], 0),
        ([replace(info(1), max_seq=1)], 0),
        ([replace(info(1), entry_count=0)], 0),
        ([replace(info(1), size_bytes=0)], 0),
        ([info(1, b"b", b"a")], 0),
        ([info(1, b"", b"")], 0),
    ],
)
def test_files_of_a_load_stand_in_order(infos: list[SstInfo], at: int | None) -> None:
    """Files that overlap, are out of order, or have levels or sequence numbers are found."""
    problem = files_problem(infos)
    assert (None if problem is None else problem[0]) == at
