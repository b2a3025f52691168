"""`shalekv snapshot` on files, with no server around."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from shalekv.cli.snapshot import COLUMNS
from shalekv.errors import DatabaseNotFound
from tests.kit.engine.collection import Ground
from tests.kit.engine.collection_files import save


async def _database(name: str = "") -> Ground:
    ground = await Ground.created()
    await ground.wal(4)
    await ground.compact(2)
    if name:
        await ground.snapshots().create(name=name, ttl_ms=1_000)
    return ground


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database as files."""
    save(asyncio.run(_database()), tmp_path / "db")
    return f"file://{tmp_path}/db"


def run(*args: str) -> Result:
    """Run a command about snapshots."""
    return CliRunner().invoke(shalekv, ["snapshot", *args])


def listed(url: str) -> list[dict[str, Any]]:
    """The rows of `list`."""
    result = run("list", "--url", url, "--format", "json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_snapshots_are_created_and_listed(url: str) -> None:
    """`create` prints the id; `list` tells name, manifest, expiry, c, sequence number and bytes."""
    first = run("create", "--url", url, "--name", "nightly", "--forever").stdout.strip()
    second = run("create", "--url", url).stdout.strip()
    rows = listed(url)
    assert tuple(rows[0]) == COLUMNS
    assert [row["id"] for row in rows] == [first, second]
    nightly, unnamed = rows
    assert (nightly["name"], nightly["expires"], nightly["manifest_id"]) == ("nightly", "never", 3)
    assert (nightly["wal_id_last_compacted"], nightly["wal_id_last_seen"]) == (2, 3)
    assert (nightly["pinned_bytes"], nightly["pinned_alone_bytes"]) == (0, 0)
    assert (unnamed["name"], unnamed["manifest_id"]) == (None, 4)
    assert unnamed["expires"].endswith("+00:00")


def test_snapshots_are_renewed_shared_and_deleted(url: str) -> None:
    """By id or by name."""
    first = run("create", "--url", url, "--name", "nightly", "--ttl", "1d").stdout.strip()
    shared = json.loads(run("share", "nightly", "--url", url, "--format", "json").stdout)
    assert (shared["manifest_id"], shared["name"]) == (3, None)
    renewed = json.loads(run("renew", first, "--url", url, "--forever", "--format", "json").stdout)
    assert (renewed["id"], renewed["expires"]) == (first, "never")
    assert run("delete", "nightly", "--url", url).stdout.strip() == first
    assert [row["id"] for row in listed(url)] == [shared["id"]]


def test_expired_snapshot_is_listed_as_that(tmp_path: Path) -> None:
    """It pins nothing; renewing or sharing it is refused, with an exit code."""
    save(asyncio.run(_database(name="short")), tmp_path / "db")
    url = f"file://{tmp_path}/db"
    (row,) = listed(url)
    assert (row["name"], row["expires"]) == ("short", "expired")  # in 2023
    assert (row["pinned_bytes"], row["wal_id_last_compacted"]) == (None, None)
    for command in ("renew", "share"):
        error = run(command, "short", "--url", url).exception
        assert isinstance(error, Exception)
        assert exit_code_of(error) is ExitCode.USAGE
        assert "Begin again" in str(error)


@pytest.mark.parametrize(
    "args",
    [
        ["create", "--ttl", "1h", "--forever"],
        ["create", "--ttl", "60"],
        ["renew"],
        ["delete"],
        ["share"],
    ],
)
def test_wrong_arguments_are_usage_errors(url: str, args: list[str]) -> None:
    """Nothing is done then."""
    result = run(*args, "--url", url)
    assert result.exit_code == ExitCode.USAGE
    assert listed(url) == []


def test_name_that_is_taken_is_told(url: str) -> None:
    """The message says which."""
    run("create", "--url", url, "--name", "one")
    error = run("create", "--url", url, "--name", "one").exception
    assert isinstance(error, Exception)
    assert "'one'" in str(error)
    assert exit_code_of(error) is ExitCode.USAGE


@pytest.mark.parametrize("words", [("create",), ("list",), ("renew", "x"), ("delete", "x")])
def test_where_no_database_is_nothing_is_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A URL that is wrong is told, and no folder comes to be there, as the clock of one would."""
    result = run(*words, "--url", f"file://{tmp_path}/nothing")
    assert isinstance(result.exception, DatabaseNotFound)
    assert not (tmp_path / "nothing").exists()
