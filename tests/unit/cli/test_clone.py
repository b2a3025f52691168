"""`shalekv clone`, and what commands say of a clone and of its parent, on files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from shalekv.errors import DatabaseExists, DatabaseNotFound, InvalidRequest, SnapshotNotFound
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER
from tests.kit.engine.places import Place, everything


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database as files."""
    asyncio.run(_save(tmp_path / "parent"))
    return f"file://{tmp_path}/parent"


async def _save(root: Path) -> None:
    parent: Place = await everything()
    for folder in (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER):
        (root / folder).mkdir(parents=True)
        async for info in parent.store.list(folder):
            (root / info.name).write_bytes((await parent.store.get(info.name)).data)


def run(*args: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(shalekv, args)


def told(*args: str) -> Any:
    """The record that a command prints."""
    result = run(*args, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def code_of(result: Result) -> ExitCode:
    """With what the command would end."""
    assert result.exception is not None
    return exit_code_of(result.exception)


def test_what_is_shared_is_told(url: str, tmp_path: Path) -> None:
    """A line by default; else a record, with the pins, of whose bytes `levels` tells, too."""
    line = run("clone", "--url", url, "--to", f"file://{tmp_path}/one")
    assert line.exit_code == 0, line.output
    database_id, _, rest = line.stdout.partition(":")
    assert len(bytes.fromhex(database_id)) == 16
    assert rest.startswith(" shares ")
    clone = f"file://{tmp_path}/two"
    record = told("clone", "--url", url, "--to", clone)
    assert (record["url"], record["parent"]) == (clone, url)
    (pin,) = record["snapshots"]
    assert pin["url"] == url
    (origin,) = told("levels", "--url", clone)["origins"]
    assert origin["ssts"] == record["shared_ssts"]
    assert origin["size_bytes"] == record["shared_bytes"]
    assert origin["snapshot"] == pin["id"]
    table = run("levels", "--url", clone, "--format", "table").stdout
    assert f"{record['shared_bytes']:,} bytes: {url}" in table


def test_a_shared_sst_is_found_by_its_name(url: str, tmp_path: Path) -> None:
    """`sst inspect` looks for it where it is, `manifest` lists it, `fsck` reads it."""
    clone = f"file://{tmp_path}/clone"
    run("clone", "--url", url, "--to", clone)
    (origin,) = told("manifest", "--url", clone)["origins"]
    assert origin["url"] == url
    for sst_id in origin["sst_ids"]:
        found = told("sst", "inspect", "--url", clone, sst_id)
        assert found["properties"]["database_id"] == origin["database_id"]
        assert not list((tmp_path / "clone").glob(f"{found['properties']['name']}"))
    checked = run("fsck", "--url", clone)
    assert checked.exit_code == 0, checked.output
    missing = run("sst", "inspect", "--url", clone, "0198c0de-0000-7000-8000-000000000001")
    assert missing.exit_code == ExitCode.USAGE
    for path in (tmp_path / "parent" / LEVELS_FOLDER).iterdir():
        path.unlink()
    gone = run("sst", "inspect", "--url", clone, origin["sst_ids"][0])
    assert gone.exit_code == ExitCode.USAGE
    assert f"{url} has no levels/" in gone.output
    checked = run("fsck", "--url", clone, "--format", "raw")
    assert checked.exit_code == ExitCode.DAMAGED
    assert f"{url}/levels/" in checked.stdout


def test_a_pin_is_deleted_by_force_alone(url: str, tmp_path: Path) -> None:
    """`snapshot delete` refuses the snapshot that keeps a clone alive, unless it is forced."""
    run("clone", "--url", url, "--to", f"file://{tmp_path}/clone")
    rows = run("snapshot", "list", "--url", url, "--format", "json").stdout.splitlines()
    (name,) = [row["name"] for row in map(json.loads, rows) if (row["name"] or "")[:6] == "clone "]
    refused = run("snapshot", "delete", name, "--url", url)
    assert isinstance(refused.exception, InvalidRequest)
    assert "--force" in str(refused.exception)
    assert run("snapshot", "delete", name, "--url", url, "--force").exit_code == 0
    assert isinstance(run("snapshot", "delete", name, "--url", url).exception, SnapshotNotFound)


def test_what_cannot_be_cloned_is_told(url: str, tmp_path: Path) -> None:
    """No database, no such snapshot, a place that is taken, a place that no other process sees."""
    clone = f"file://{tmp_path}/clone"
    absent = run("clone", "--url", f"file://{tmp_path}/none", "--to", clone)
    assert isinstance(absent.exception, DatabaseNotFound)
    unnamed = run("clone", "--url", url, "--to", clone, "--snapshot", "none")
    assert isinstance(unnamed.exception, SnapshotNotFound)
    taken = run("clone", "--url", url, "--to", url)
    assert isinstance(taken.exception, DatabaseExists)
    assert code_of(taken) == code_of(unnamed) == ExitCode.USAGE
    for place in ("memory://trial", "nowhere"):
        refused = run("clone", "--url", url, "--to", place)
        assert refused.exit_code == ExitCode.USAGE
        assert "--to" in refused.output
