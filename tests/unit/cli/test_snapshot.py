"""`shalekv snapshot`, `consumers` and `store verify`, without a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from shalekv.store import opening
from shalekv.store.memory import MemoryObjects
from tests.kit.careless_stores import Careful, IgnoresConditions
from tests.kit.engine.collection import CollectedDatabase, save


async def _database(name: str = "") -> CollectedDatabase:
    database = await CollectedDatabase.created()
    await database.wal(4)
    await database.compact(2)
    if name:
        await database.snapshots().create(name=name, ttl_ms=1_000)
        await database.consumers(ttl_s=1).hold(name, 2)
    return database


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database as files."""
    save(asyncio.run(_database()), tmp_path / "db")
    return f"file://{tmp_path}/db"


def run(*args: str) -> Result:
    return CliRunner().invoke(shalekv, ["snapshot", *args])


def listed(url: str) -> list[dict[str, Any]]:
    result = run("list", "--url", url, "--format", "json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_expired_snapshot_is_listed_as_expired(tmp_path: Path) -> None:
    """An expired snapshot pins nothing, and cannot be renewed or shared.

    An expired consumer is listed as expired, too.
    """
    save(asyncio.run(_database(name="short")), tmp_path / "db")
    url = f"file://{tmp_path}/db"
    (row,) = listed(url)
    assert (row["name"], row["is_expired"]) == ("short", True)  # in 2023
    assert (row["pinned_bytes"], row["wal_id_last_compacted"]) == (None, None)
    for command in ("renew", "share"):
        error = run(command, "short", "--url", url).exception
        assert isinstance(error, Exception)
        assert exit_code_of(error) is ExitCode.USAGE
        assert "Begin again" in str(error)
    consumers = CliRunner().invoke(shalekv, ["consumers", "list", "--url", url, "--format", "json"])
    row = json.loads(consumers.stdout)
    assert (row["name"], row["wal_id_min"], row["state"]) == ("short", 2, "expired")


LITTLE = ("--parallel", "2", "--rounds", "2", "--large-object-bytes", "1000")


def verify(url: str, *args: str) -> Result:
    return CliRunner().invoke(shalekv, ["store", "verify", "--url", url, *LITTLE, *args])


def run_on(kind: type[Careful], monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    objects = MemoryObjects()
    monkeypatch.setattr(opening, "_open", lambda *_: kind(objects))
    return verify("file:///nowhere", *args)


def test_an_unfit_store_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfit store ends with code 6; each format has the failed checks and lost guarantees."""
    result = run_on(IgnoresConditions, monkeypatch, "--format", "table")
    assert result.exit_code == ExitCode.STORE
    table, _, below = result.stdout.partition("\n\n")
    assert table.splitlines()[0].split() == ["result", "check", "proves"]
    assert "\N{BALLOT X} failed      create-races" in table
    assert "\N{CHECK MARK} passed      list-order" in table
    assert "\N{BALLOT X} second-create: create verify/" in below
    assert "  A database would lose: one winner per slot of the log" in below
    assert "cannot hold a database: it fails create-races, second-create, " in result.stderr
    rows = run_on(IgnoresConditions, monkeypatch, "--format", "json").stdout.splitlines()
    failed = [row for row in map(json.loads, rows) if row["result"] == "failed"]
    assert [row["check"] for row in failed] == ["create-races", "second-create", "large-object"]
    assert all(row["found"] and row["lost"] for row in failed)
