"""`shalekv backup` and `shalekv restore` on folders, with no server around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.backup import DAMAGE_COLUMNS, LIST_COLUMNS
from shalekv.cli.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from tests.kit.engine.damage import Planted

FUTURE_MS = 4_000_000_000_000  # no snapshot has expired on a real clock
UNKNOWN = "20260131T040000123Z-00000000"


def run(*args: str, code: ExitCode = ExitCode.OK) -> Result:
    """Run a command that ends with this code by itself."""
    result = CliRunner().invoke(shalekv, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def problem_of(*args: str, code: ExitCode) -> str:
    """What a command raises that ends the program with this code."""
    error = CliRunner().invoke(shalekv, list(args)).exception
    assert isinstance(error, Exception)
    assert exit_code_of(error) is code
    return str(error)


def told(*args: str) -> dict[str, Any]:
    """What it tells as JSON."""
    return dict(json.loads(run(*args, "--format", "json").stdout))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database as files."""
    return Planted(FUTURE_MS).save(tmp_path / "db")


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Where its backups are to be."""
    return f"file://{tmp_path}/backups"


def test_a_backup_is_made_listed_checked_restored_and_deleted(
    url: str, place: str, tmp_path: Path
) -> None:
    """Each command tells what it did, in words, as JSON, or as rows."""
    backup_id = run("backup", "create", "--url", url, "--to", place).stdout.strip()
    again = told("backup", "create", "--url", url, "--to", place)
    assert (again["copied_objects"], again["copied_bytes"]) == (0, 0)
    assert (again["present_objects"], again["present_bytes"]) == (
        again["objects"],
        again["size_bytes"],
    )
    listed = run("backup", "list", "--from", place, "--format", "json").stdout.splitlines()
    rows = [json.loads(line) for line in listed]
    assert tuple(rows[0]) == LIST_COLUMNS
    assert [row["backup_id"] for row in rows] == [backup_id, again["backup_id"]]
    assert {row["source"] for row in rows} == {url}
    summary = run("backup", "verify", "--from", place).stderr
    assert summary.startswith(f"sound: 2 backups, {again['objects']} objects, ")
    target = f"file://{tmp_path}/again"
    restored = told("restore", "--from", place, "--backup", backup_id, "--url", target)
    assert (restored["backup_id"], restored["url"]) == (backup_id, target)
    assert restored["copied_objects"] == again["objects"]
    assert run("fsck", "--deep", "--url", target).stderr.startswith("clean: ")
    deleted = run("backup", "delete", backup_id, "--from", place).stdout
    assert deleted == "1 backup and 0 objects (0 bytes) deleted\n"
    last = told("backup", "delete", again["backup_id"], "--from", place)
    assert (last["backups"], last["objects"]) == (1, again["objects"])
    assert last["left_because"] == []
    assert run("backup", "list", "--from", place).stdout == ""


def test_restore_says_what_it_has_restored(url: str, place: str, tmp_path: Path) -> None:
    """In words, and refuses to do so where a database is."""
    backup_id = run("backup", "create", "--url", url, "--to", place).stdout.strip()
    target = f"file://{tmp_path}/again"
    said = run("restore", "--from", place, "--url", target).stdout
    assert said.startswith(f"backup {backup_id} restored to {target}: ")
    problem = problem_of("restore", "--from", place, "--url", url, code=ExitCode.USAGE)
    assert "holds a database already" in problem


def test_damage_is_a_row_and_an_exit_code(url: str, place: str, tmp_path: Path) -> None:
    """With the object, what is wrong, and the backups that are lost by it."""
    backup_id = run("backup", "create", "--url", url, "--to", place).stdout.strip()
    damaged = min((tmp_path / "backups" / "backup_wal").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run("backup", "verify", "--from", place, "--format", "json", code=ExitCode.DAMAGED)
    (row,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert tuple(row) == DAMAGE_COLUMNS
    assert (row["object"], row["backups"]) == (f"backup_wal/{damaged.name}", backup_id)
    assert result.stderr.startswith("1 backup damaged: ")
    target = f"file://{tmp_path}/again"
    problem_of("restore", "--from", place, "--url", target, code=ExitCode.DAMAGED)
    assert not (tmp_path / "again" / "manifest").exists()


def test_the_place_of_the_backups_has_settings_of_its_own(
    url: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the file alone: what the environment says is for the database."""
    config = tmp_path / "there.toml"
    config.write_text("[store]\nread_attempts = 3\n[writer]\nflush_bytes = 100000\n")
    flags = ("--to", place, "--to-config", str(config))
    run("backup", "create", "--url", url, *flags)
    monkeypatch.setenv("SHALEKV_STORE__RECORDS_URL", "sqlite:///nowhere/records.db")
    problem = problem_of("backup", "create", "--url", url, *flags, code=ExitCode.USAGE)
    assert "records_url" in problem  # of the database, which is opened first
    monkeypatch.delenv("SHALEKV_STORE__RECORDS_URL")
    config.write_text("[store]\nread_attempts = 0\n")
    said = run("backup", "create", "--url", url, *flags, code=ExitCode.USAGE).stderr
    assert "store.read_attempts" in said
    assert str(config) in said
    config.write_text("[store]\nread_attempt = 3\n")
    said = run("backup", "create", "--url", url, *flags, code=ExitCode.USAGE).stderr
    assert "did you mean" in said


@pytest.mark.parametrize(
    "args",
    [
        ["backup", "create", "--url", "file:///tmp/a", "--to", "file:///tmp/a/"],
        ["backup", "create", "--url", "file:///tmp/a"],
        ["backup", "create", "--url", "file:///tmp/a", "--to", "memory://a"],
        ["backup", "create", "--url", "file:///tmp/a", "--to", "x", "--snapshot-ttl", "60"],
        ["backup", "create", "--url", "file:///tmp/a", "--to", "file:///b", "--parallel", "0"],
        ["backup", "verify", "nonsense", "--from", "file:///tmp/a"],
        ["backup", "delete", "nonsense", "--from", "file:///tmp/a"],
        ["restore", "--from", "file:///tmp/a", "--url", "file:///tmp/b", "--backup", "latest"],
        ["restore", "--from", "file:///tmp/a", "--url", "file:///tmp/a"],
    ],
)
def test_wrong_arguments_are_usage_errors(args: list[str]) -> None:
    """Nothing is done then."""
    run(*args, code=ExitCode.USAGE)


def test_a_backup_that_is_not_there_is_told(place: str, tmp_path: Path) -> None:
    """By every command that needs one."""
    target = f"file://{tmp_path}/again"
    for args in (
        ["restore", "--from", place, "--url", target],
        ["restore", "--from", place, "--url", target, "--backup", UNKNOWN],
        ["backup", "verify", UNKNOWN, "--from", place],
        ["backup", "delete", UNKNOWN, "--from", place],
    ):
        assert "has no backup" in problem_of(*args, code=ExitCode.USAGE)


def test_there_must_be_a_database(place: str, tmp_path: Path) -> None:
    """The exit code says so."""
    args = ("backup", "create", "--url", f"file://{tmp_path}/none", "--to", place)
    problem_of(*args, code=ExitCode.DATABASE_NOT_FOUND)
    assert not (tmp_path / "backups").exists()
