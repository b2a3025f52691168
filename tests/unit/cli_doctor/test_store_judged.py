"""A store: requests that were tried, its clock, rules of the bucket, and file systems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.cli.doctor.diagnosis import Diagnosis
from shalekv.cli.doctor.store import (
    DatabaseFolder,
    judge_clock,
    judge_folder,
    judge_rules,
    judge_trials,
)
from shalekv.errors import StoreRefused
from shalekv.store.api import ObjectStore
from shalekv.store.bucket_rules import BucketRules, LifecycleRule, NoncurrentVersions, NotTold
from shalekv.store.memory import MemoryObjects
from shalekv.store.verify.operations import Trial, try_all
from tests.kit import careless_stores as careless
from tests.kit.careless_stores import Careful, Kind
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.store import FaultyStore, Lost, Request

WHERE = "--url s3://bucket/db"
PLAIN = BucketRules(versioning="", noncurrent=None, lifecycle=(), lock="")
RULE = LifecycleRule("r", "", is_narrowed=False)


def severities(found: list[Diagnosis]) -> dict[str, str]:
    return {each.check: each.severity.value for each in found}


def ruled(rules: BucketRules, folder: str = "db") -> dict[str, str]:
    return severities([*judge_rules(rules, bucket="bucket", folder=folder)])


@pytest.mark.parametrize(
    ("offset_ms", "expected"),
    [(0, "ok"), (-9_000, "ok"), (10_400, "ok"), (12_000, "warning"), (-400_000, "problem")],
)
def test_a_clock_is_judged_by_its_offset(offset_ms: int, expected: str) -> None:
    """What may be an error of the measure is no fault; minutes are a problem."""
    assert judge_clock(offset_ms, precision_ms=500).severity.value == expected


def test_a_plain_bucket_is_well() -> None:
    """A bucket without rules has no warning."""
    assert set(ruled(PLAIN).values()) == {"ok"}


@pytest.mark.parametrize(
    ("prefix", "folder", "is_concerned"),
    [
        ("", "db", True),
        ("db/", "db", True),
        ("db/wal/", "db", True),
        ("d", "db", True),
        ("db2/", "db", False),
        ("logs/", "db", False),
        ("logs/", "", True),
    ],
)
def test_a_rule_that_expires_objects_of_the_database_is_a_problem(
    prefix: str, folder: str, *, is_concerned: bool
) -> None:
    """A rule is a problem exactly if its prefix has keys of the database's folder."""
    rule = replace(RULE, prefix=prefix, expires="after 30 days")
    found = ruled(replace(PLAIN, lifecycle=[rule]), folder)
    assert (found["lifecycle"] == "problem") == is_concerned


def test_archives_are_a_problem_and_other_classes_are_not() -> None:
    """Objects in an archive cannot be read; those in a cheaper class can."""
    for name, expected in (("GLACIER", "problem"), ("STANDARD_IA", "ok"), ("GLACIER_IR", "ok")):
        rule = replace(RULE, storage_classes=[name])
        assert ruled(replace(PLAIN, lifecycle=[rule]))["lifecycle"] == expected


def test_versioning_costs() -> None:
    """Versioning is warned of, with its cost, and more so if no rule removes old versions."""
    versioned = replace(
        PLAIN, versioning="Enabled", noncurrent=NoncurrentVersions(1_000, 1 << 30, is_all=False)
    )
    (without,) = [
        each
        for each in judge_rules(versioned, bucket="bucket", folder="db")
        if each.check == "versioning"
    ]
    assert "at least 1,000 versions with 1.0 GiB" in without.evidence
    assert '"Prefix": "db/"' in without.fix
    rule = replace(RULE, noncurrent_days=7)
    (with_rule,) = [
        each
        for each in judge_rules(replace(versioned, lifecycle=[rule]), bucket="b", folder="db")
        if each.check == "versioning"
    ]
    assert "7 more days" in with_rule.evidence
    assert "Suspended" in with_rule.fix


def test_what_the_store_does_not_tell_is_not_checked() -> None:
    """A refused question is reported with the reason, and hides nothing else."""
    told = NotTold("denied")
    found = ruled(BucketRules(versioning=told, noncurrent=None, lifecycle=told, lock=told))
    assert found == dict.fromkeys(("lifecycle", "versioning", "object lock"), "not checked")


def test_object_lock() -> None:
    """A default retention is a problem, a lock without one a warning."""
    assert ruled(replace(PLAIN, lock="no default"))["object lock"] == "warning"
    assert ruled(replace(PLAIN, lock="COMPLIANCE for 1 years"))["object lock"] == "problem"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ext4", "ok"),
        ("nfs4", "warning"),
        ("fuse.s3fs", "warning"),
        ("tmpfs", "warning"),
        ("overlay", "warning"),
        ("", "not checked"),
    ],
)
def test_file_systems(kind: str, expected: str) -> None:
    """A file system that may lack what is needed, or keeps nothing, is warned of."""
    folder = DatabaseFolder("/db", exists=True, is_writable=True, file_system=kind)
    found = severities([*judge_folder(folder, where=WHERE)])
    assert found == {"folder": "ok", "file system": expected}
    closed = severities([*judge_folder(replace(folder, is_writable=False), where=WHERE)])
    assert closed["folder"] == "problem"


def judged(trials: list[Trial], *, is_written: bool = True) -> dict[str, str]:
    return severities([*judge_trials(trials, where=WHERE, is_written=is_written)])


async def tried(store: ObjectStore, *, may_write: bool = True) -> list[Trial]:
    return await gathered(try_all(store, inline_runtime(1), may_write=may_write))


async def test_a_fit_store_passes_and_nothing_stays() -> None:
    """All requests are done on a store that is fit, and the object is deleted."""
    store = Careful(MemoryObjects())
    trials = await tried(store)
    assert judged(trials) == {"permissions": "ok"}
    assert [trial.operation for trial in trials] == [
        *("list", "get", "put", "put if absent", "read back", "delete", "read after delete")
    ]
    assert await gathered(store.list("verify/")) == []


async def test_without_leave_nothing_is_written() -> None:
    """A trial that may not write creates nothing, and the finding says what was left out."""
    trials = await tried(Careful(MemoryObjects()), may_write=False)
    assert [trial.operation for trial in trials] == ["list", "get"]
    assert judged(trials, is_written=False) == {"permissions": "ok", "writes": "not checked"}


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (careless.IgnoresConditions, "put if absent"),
        (careless.ReplacesAndSaysSo, "read back"),
        (careless.ReadsTheDeleted, "read after delete"),
    ],
)
async def test_an_unfit_store_is_a_problem(kind: Kind, check: str) -> None:
    """A store that ignores conditions, replaces, or shows what was deleted is found out."""
    found, *_ = [
        each
        for each in judge_trials(await tried(kind(MemoryObjects())), where=WHERE, is_written=True)
        if each.check != "permissions"
    ]
    assert (found.check, found.severity.value) == (check, "problem")
    assert found.fix == f"shalekv store verify {WHERE}"


@pytest.mark.parametrize("operation", ["list", "get", "create", "delete"])
async def test_a_refused_request_is_a_problem_of_its_own(operation: str) -> None:
    """What the credentials may not do is named with the permission; the rest is tried."""

    async def refuse(request: Request) -> None:
        if request.operation == operation:
            raise StoreRefused("s3://bucket/db", request.operation, request.name, "denied")

    store = FaultyStore(Careful(MemoryObjects()), before=refuse)
    found = [*judge_trials(await tried(store), where=WHERE, is_written=True)]
    problems = [each for each in found if each.severity.value == "problem"]
    shown = {"create": "put"}.get(operation, operation)
    assert shown in [each.check for each in problems]
    assert all("denied" in each.evidence for each in problems)
    by_check = {each.check: each.fix for each in problems}
    assert "s3:" in by_check[shown]
    assert ("is left behind" in str(problems)) == (operation == "delete")


async def test_a_store_that_does_not_answer_is_asked_once() -> None:
    """After a list without an answer nothing else is sent: it would only take longer."""

    async def lose(_request: Request) -> None:
        raise Lost

    store = FaultyStore(Careful(MemoryObjects()), before=lose)
    assert judged(await tried(store)) == {"list": "problem"}
    assert len(store.requests) == 1
