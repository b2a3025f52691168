"""`shalekv store verify`: what it prints, and how it ends."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from shalekv.cli.store import COLUMNS
from shalekv.errors import StoreError
from shalekv.store import opening
from shalekv.store.memory import MemoryObjects
from tests.kit.careless_stores import Careful, IgnoresConditions, ReadsTooEarly

LITTLE = ("--parallel", "2", "--rounds", "2", "--large-object-bytes", "1000")


def run(url: str, *args: str) -> Result:
    """Verify the store at `url`."""
    return CliRunner().invoke(shalekv, ["store", "verify", "--url", url, *LITTLE, *args])


def run_on(kind: type[Careful], monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    """Verify a store in memory."""
    objects = MemoryObjects()
    monkeypatch.setattr(opening, "_open", lambda *_: kind(objects))
    return run("file:///nowhere", *args)


def test_a_fit_store_ends_well(tmp_path: Path) -> None:
    """A row for each check, the last of which is not asked for; exit code 0; no object left."""
    result = run(f"file://{tmp_path}/db", "--format", "json")
    assert result.exit_code == ExitCode.OK, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [tuple(row) for row in rows] == [COLUMNS] * 14
    assert {row["result"] for row in rows} == {"passed", "told", "not needed"}
    assert (rows[-1]["check"], rows[-1]["result"]) == ("conditional-copy", "not needed")
    assert rows[0]["found"] == "2 races of 2"
    assert result.stderr == f"file://{tmp_path}/db is fit: it keeps what 13 checks asked for\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["clock"]


def test_an_unfit_store_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed and what is lost with it, in each format; exit code 6."""
    result = run_on(IgnoresConditions, monkeypatch, "--format", "table")
    assert result.exit_code == ExitCode.STORE
    table, _, below = result.stdout.partition("\n\n")
    assert table.splitlines()[0].split() == ["result", "check", "proves"]
    assert "\N{BALLOT X} failed      create-races" in table
    assert "\N{CHECK MARK} passed      list-order" in table
    assert "\N{BALLOT X} second-create: create verify/" in below
    assert "  Lost with it: one winner per slot of the log" in below
    assert "is unfit: it fails create-races, second-create, " in result.stderr
    rows = run_on(IgnoresConditions, monkeypatch, "--format", "json").stdout.splitlines()
    failed = [row for row in map(json.loads, rows) if row["result"] == "failed"]
    assert [row["check"] for row in failed] == ["create-races", "second-create", "large-object"]
    assert all(row["found"] and row["lost"] for row in failed)


def test_raw_rows_are_for_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cells separated by TABs, without marks."""
    result = run_on(ReadsTooEarly, monkeypatch, "--format", "raw")
    assert result.exit_code == ExitCode.STORE
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert {row[1]: row[0] for row in rows}["read-after-write"] == "failed"


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the store, and not a row: nothing was looked at."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        flags = ("--endpoint-url", f"http://127.0.0.1:{closed.getsockname()[1]}")
        result = run("s3://bucket/db", *flags, "--read-attempts", "1")
    assert isinstance(result.exception, StoreError)
    assert exit_code_of(result.exception) == ExitCode.STORE
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ("--parallel", "1"),
        ("--parallel", "65"),
        ("--rounds", "0"),
        ("--large-object-bytes", "0"),
        ("--records-url", "sqlite:///tmp/records.db"),  # not without two_phase
        ("--format", "xml"),
    ],
)
def test_bad_flags(tmp_path: Path, args: tuple[str, ...]) -> None:
    """They are told before anything is touched."""
    result = run(f"file://{tmp_path}/db", *args)
    code = result.exit_code if isinstance(result.exception, SystemExit) else None
    assert ExitCode.USAGE in (code, exit_code_of(result.exception or RuntimeError()))
    assert list(tmp_path.iterdir()) == []


def test_memory_is_refused() -> None:
    """A store in the memory of a server cannot be reached by another process."""
    assert run("memory://trial").exit_code == ExitCode.USAGE


def test_help_teaches() -> None:
    """Its --help has examples and the table of exit codes, and fits on a terminal."""
    result = CliRunner().invoke(shalekv, ["store", "verify", "--help"])
    assert result.exit_code == 0
    assert "Examples:\n" in result.stdout
    assert "Exit codes:\n" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
