"""`shalekv store verify`: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from shalekv.store import opening
from shalekv.store.memory import MemoryObjects
from tests.kit.careless_stores import Careful, IgnoresConditions

LITTLE = ("--parallel", "2", "--rounds", "2", "--large-object-bytes", "1000")


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(shalekv, ["store", "verify", "--url", url, *LITTLE, *args])


def run_on(kind: type[Careful], monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    objects = MemoryObjects()
    monkeypatch.setattr(opening, "_open", lambda *_: kind(objects))
    return run("file:///nowhere", *args)


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
