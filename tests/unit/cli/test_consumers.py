"""`shalekv consumers` on files, with no server around."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.consumers import COLUMNS
from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from tests.kit.engine.collection import Ground
from tests.kit.engine.collection_files import save


async def _database() -> Ground:
    ground = await Ground.created()
    await ground.wal(4)
    await ground.compact(2)
    await ground.consumers(ttl_s=1).hold("short", 2)
    await ground.consumers(ttl_s=30 * 365 * 86_400).hold("mirror", 3)
    return ground


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database as files, made long ago."""
    save(asyncio.run(_database()), tmp_path / "db")
    return f"file://{tmp_path}/db"


def run(*args: str) -> Result:
    """Run a command about consumers."""
    return CliRunner().invoke(shalekv, ["consumers", *args])


def listed(url: str) -> list[dict[str, Any]]:
    """The rows of `list`."""
    result = run("list", "--url", url, "--format", "json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_consumers_are_listed(url: str) -> None:
    """By name, with the first WAL object that each keeps; one that has expired is told as such."""
    mirror, short = listed(url)
    assert tuple(mirror) == COLUMNS
    assert (mirror["name"], mirror["wal_id_min"], mirror["wal_id_last_compacted"]) == (
        "mirror",
        3,
        2,
    )
    assert mirror["expires"].endswith("+00:00")
    assert (short["name"], short["expires"]) == ("short", "expired")


def test_consumers_are_deleted(url: str) -> None:
    """Those that are named, and told line by line; others stay."""
    result = run("delete", "short", "--url", url)
    assert (result.exit_code, result.stdout) == (0, "short\n")
    assert [row["name"] for row in listed(url)] == ["mirror"]


def test_unknown_consumer_is_refused(url: str) -> None:
    """Then nothing is deleted, whatever else is named."""
    result = run("delete", "short", "nobody", "--url", url)
    assert result.exit_code == ExitCode.USAGE
    assert "no consumer called 'nobody'" in result.output
    assert len(listed(url)) == 2
