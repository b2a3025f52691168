"""A database: what pins what, the work that waits, safekeepers; read from a real one as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.cli.doctor.database import (
    judge_debt,
    judge_garbage,
    judge_leases,
    judge_manifest,
    judge_records,
    judge_safekeepers,
    judge_snapshots,
    judge_wal,
    judge_writer,
)
from shalekv.cli.doctor.database_facts import DatabaseExamination
from shalekv.cli.doctor.diagnosis import Diagnosis, Severity
from shalekv.jobs.collect import Amount
from shalekv.protocol.manifest import CasMode, Lease, Snapshot
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum_records import Ballot, LogHealth, LogShape
from shalekv.protocol.retention import PinnedBytes
from shalekv.settings import AnyConfig, CompactorSettings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.write.quorum.links import DatabasePlace, MemberStatus
from shalekv.write.quorum.membership import MemberProbe
from tests.kit.processes.in_process import put_at, real_runtime, running, serve_settings
from tests.kit.retention import manifest_of

WHERE = "--url file:///db"
GIB = 1 << 30
SETTINGS = CompactorSettings(wal_trigger_bytes=1 << 20)
NOW_S = 1_700_000_000


def severities(found: Sequence[Diagnosis]) -> dict[str, str]:
    return {each.check: each.severity.value for each in found}


def test_the_mode_of_creates_must_be_that_of_the_settings() -> None:
    """A database of two phases without records can only be read; the other way is a problem."""
    native = manifest_of(3, 1)
    two_phase = replace(native, cas_mode=CasMode.TWO_PHASE)
    assert severities([*judge_manifest(native, is_two_phase=False, where=WHERE)]) == {
        "manifest": "ok"
    }
    for manifest, is_two_phase, expected in (
        (two_phase, False, "warning"),
        (native, True, "problem"),
    ):
        found = [*judge_manifest(manifest, is_two_phase=is_two_phase, where=WHERE)]
        assert severities(found)["creates"] == expected


def test_a_long_wal_is_warned_of() -> None:
    """What is not compacted counts, in bytes; what is kept of the compacted WAL does not."""
    manifest = manifest_of(3, 9)
    short = judge_wal(manifest, {3: 8 << 20, 10: 1 << 20}, SETTINGS, where=WHERE)
    assert short.severity is Severity.OK
    assert "1 object with 1.0 MiB not compacted, 2 objects with 9.0 MiB in all" in short.evidence
    long = judge_wal(manifest, {10: 3 << 20, 11: 2 << 20}, SETTINGS, where=WHERE)
    assert (long.severity, long.fix) == (
        Severity.WARNING,
        "shalekv compactor --url file:///db --once",
    )


def test_a_debt_is_warned_of_when_it_exceeds_what_is_stored() -> None:
    """A debt is normal up to the size of the levels, or some WAL jobs."""
    manifest = manifest_of(3, 9, 1, 2)
    assert judge_debt(manifest, 4 << 20, SETTINGS, where=WHERE).severity is Severity.OK
    assert judge_debt(manifest, 5 << 20, SETTINGS, where=WHERE).severity is Severity.WARNING


def pinned(name: str, size: int | None, alone: int | None, **fields: object) -> PinnedBytes:
    snapshot = Snapshot(name.encode().ljust(16, b"-")[:16], 2, NOW_S + 60, name)
    return PinnedBytes(replace(snapshot, **fields), size, alone)  # type: ignore[arg-type] # a table


def test_pins_are_told_by_kind_with_the_largest() -> None:
    """Snapshots of users, servers, backups and clones are findings of their own, with the fix."""
    found = judge_snapshots(
        [
            pinned("", 100, 0),
            pinned("it's old", 3 * GIB, 2 * GIB, created_ms=1_700_000_000_000),
            pinned("new", GIB, 0),
            pinned("backup 7", 5, 5),
            pinned("clone 12", 2 * GIB, GIB, ssts_only=True, snapshot_expire_time_s=0),
        ],
        expired=1,
        where=WHERE,
    )
    by_check = {each.check: each for each in found}
    assert severities([*by_check.values()]) == {
        "snapshots": "warning",
        "snapshots for clones": "warning",
        "snapshots of backups": "ok",
        "snapshots of servers": "ok",
    }
    named = by_check["snapshots"]
    assert named.evidence == (
        "2 snapshots keep 3.0 GiB beyond the current state, it's old alone 2.0 GiB; the oldest was "
        "made at 2023-11-14 22:13:20Z"
    )
    assert named.fix == "shalekv snapshot delete 'it'\"'\"'s old' --url file:///db"
    assert "--force" in by_check["snapshots for clones"].fix


def test_a_snapshot_whose_manifest_is_missing_is_a_problem() -> None:
    """What such a snapshot was to keep is lost."""
    found = severities([*judge_snapshots([pinned("a", None, None)], 0, where=WHERE)])
    assert found == {"snapshots": "problem"}
    assert severities([*judge_snapshots([], 2, where=WHERE)]) == {"snapshots": "ok"}


def test_consumers_that_keep_much_are_warned_of() -> None:
    """A consumer is named with the compacted WAL that it keeps; the retention is no fault."""
    leases = (
        Lease(bytes(16), NOW_S - 5, "consumer mirror\ttoken:ann", wal_id_min=2),
        Lease(b"1" * 16, 0, "wal retention", wal_id_min=1),
    )
    manifest = manifest_of(3, 9, leases=leases)
    found = [*judge_leases(manifest, {1: GIB, 2: GIB, 8: GIB, 9: GIB}, NOW_S, where=WHERE)]
    assert severities(found) == {"consumers": "warning", "wal retention": "ok"}
    assert found[0].evidence.startswith("mirror keeps 2 objects with 2.0 GiB of compacted WAL")
    assert "expired" in found[0].evidence
    assert found[0].fix == "shalekv consumers delete mirror --url file:///db"


def test_leases_of_jobs_from_the_future_are_warned_of() -> None:
    """A lease made by a clock that was ahead protects objects for as long."""
    now = Lease((NOW_S * 1_000).to_bytes(6, "big") + bytes(10), NOW_S + 60, "compactor")
    late = replace(now, id=((NOW_S + 86_400) * 1_000).to_bytes(6, "big") + bytes(10))
    for lease, expected in ((now, "ok"), (late, "warning")):
        found = judge_leases(manifest_of(3, 9, leases=(lease,)), {}, NOW_S, where=WHERE)
        assert severities([*found]) == {"jobs": expected}


@pytest.mark.parametrize(
    ("garbage", "total", "expected"),
    [
        (Amount(5, 5), Amount(9, 9), "ok"),
        (Amount(10_001, 5), Amount(20_000, 9), "warning"),
        (Amount(5, 2 * GIB), Amount(9, 3 * GIB), "warning"),
        (Amount(5, 2 * GIB), Amount(9, 30 * GIB), "ok"),
    ],
)
def test_garbage_is_warned_of(garbage: Amount, total: Amount, expected: str) -> None:
    """Garbage is normal between two collections, up to a share of the database."""
    assert judge_garbage(garbage, total, where=WHERE).severity.value == expected


def test_interrupted_creates_are_counted() -> None:
    """Some creates are in progress at any time; many were interrupted."""
    assert judge_records(3, where=WHERE).severity is Severity.OK
    assert judge_records(500, where=WHERE).severity is Severity.WARNING


MEMBERS = tuple(Member(bytes([n]) * 16, f"10.0.0.{n}:7661") for n in (1, 2, 3))


def probe(member: Member, **status: object) -> MemberProbe:
    found = MemberStatus(
        DatabasePlace(bytes(16), "file:///db"),
        member.id,
        Ballot(1, bytes(16)),
        LogHealth.SOUND,
        LogShape(),
        1,
        0,
        10,
        is_archiver=True,
    )
    return MemberProbe(member, replace(found, **status))  # type: ignore[arg-type] # a table


def test_safekeepers() -> None:
    """One that is missing is warned of; without a majority writes fail; archiving must not."""
    all_three = [probe(each) for each in MEMBERS]
    silent = [MemberProbe(each, None, "no answer") for each in MEMBERS]
    cases = [
        (all_three, "ok", "ok"),
        ([*all_three[:2], silent[2]], "warning", "ok"),
        ([all_three[0], *silent[1:]], "problem", "ok"),
        (silent, "problem", "not checked"),
        ([*all_three[:2], probe(MEMBERS[2], log_bytes=2 * GIB)], "ok", "warning"),
        ([*all_three[:2], probe(MEMBERS[2], archive_problem="403")], "ok", "problem"),
        ([*all_three[:2], probe(MEMBERS[2], full_problem="disk full")], "ok", "problem"),
    ]
    for probes, members, archive in cases:
        found = judge_safekeepers(Configuration(1, MEMBERS), probes, where=WHERE)
        assert severities([*found]) == {"safekeepers": members, "archive": archive}


def test_who_claims_to_be_the_writer() -> None:
    """The manifest says who opened the database, and the election who holds it."""
    opened = manifest_of(3, 9, writer_nonce=b"1" * 16, writer_address="10.0.0.5:7654")
    assert "10.0.0.5:7654" in judge_writer(opened, "").evidence
    assert "no writer" in judge_writer(manifest_of(3, 9), "").evidence


async def test_a_real_database_is_read(tmp_path: Path) -> None:
    """All checks of a database pass; without leave to ask for the time, no file is touched."""
    url = f"file://{tmp_path}/db"
    with real_runtime() as runtime:
        store = open_store(url, runtime, StoreSettings())
        async with running(store, serve_settings(), runtime) as writer:
            await put_at(writer, b"k", b"v")
        config = AnyConfig.model_validate({"database": {"url": url}})
        cas = CasStore(store, runtime, config.store)
        before = touched(tmp_path)
        found = severities(await examined(store, cas, config, may_ask_time=False))
        assert touched(tmp_path) == before
        asked = severities(await examined(store, cas, config, may_ask_time=True))
        await store.close()
    names = ("manifest", "writer", "wal", "compaction", "snapshots of servers")
    assert found == {**dict.fromkeys(names, "ok"), "garbage": "not checked"}
    assert asked == {**found, "garbage": "ok"}


def touched(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


async def examined(
    store: ObjectStore, cas: CasStore, config: AnyConfig, *, may_ask_time: bool
) -> list[Diagnosis]:
    it = DatabaseExamination(store, cas, config, where=WHERE, may_ask_time=may_ask_time)
    found = await it.manifest()
    assert it.facts is not None
    for check in (it.writer, it.work, it.pins, it.garbage, it.safekeepers, it.records):
        found += await check(it.facts)
    return found


async def test_a_folder_without_a_database_is_a_warning(tmp_path: Path) -> None:
    """Nothing else is asked of it, and the fix creates one."""
    url = f"file://{tmp_path}/db"
    with real_runtime() as runtime:
        store = open_store(url, runtime, StoreSettings())
        config = AnyConfig.model_validate({"database": {"url": url}})
        cas = CasStore(store, runtime, config.store)
        it = DatabaseExamination(store, cas, config, where=WHERE, may_ask_time=True)
        (found,) = await it.manifest()
        await store.close()
    assert found.severity is Severity.WARNING
    assert found.fix == "shalekv serve --create --url file:///db"
    assert it.facts is None
