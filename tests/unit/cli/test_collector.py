"""`shalekv collector` as far as it runs in this process: dry runs, settings, usage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.collector import DRY_COLUMNS
from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from shalekv.format import names
from tests.kit.engine.collection import Ground
from tests.kit.engine.collection_files import load, save


async def _database() -> Ground:
    ground = await Ground.created()
    await ground.wal(4)
    await ground.compact(2)
    await ground.snapshots().create(name="nightly", ttl_ms=None)
    await ground.snapshots().create(ttl_ms=1)
    await ground.merge()
    await ground.merge()
    return ground


@pytest.fixture
def ground() -> Ground:
    """A database with garbage, a snapshot, and one that has expired."""
    return asyncio.run(_database())


@pytest.fixture
def url(tmp_path: Path, ground: Ground) -> str:
    """The same as files, long ago."""
    save(ground, tmp_path / "db")
    return f"file://{tmp_path}/db"


def run(*args: str, **env: str) -> Result:
    """Run the command."""
    return CliRunner(env=env).invoke(shalekv, ["collector", *args])


def test_dry_run_says_what_goes_and_what_keeps_the_rest(
    url: str, ground: Ground, tmp_path: Path
) -> None:
    """A row for each object, with the reason; nothing is deleted; then it is exactly what goes."""
    result = run("--url", url, "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows.keys() == ground.names()
    assert load(tmp_path / "db", ground).names() == ground.names()
    pinned = [row for row in rows.values() if row["reason"] == "pinned by snapshot"]
    assert {row["detail"] for row in pinned} == {"nightly of manifest 3"}
    assert {row["fate"] for row in pinned} == {"stays"}
    first = rows[names.wal_name(0)]
    assert tuple(first) == DRY_COLUMNS
    assert (first["fate"], first["reason"]) == ("goes", "below c")
    assert first["modified"].startswith("2023-")
    going = {name for name, row in rows.items() if row["fate"] == "goes"}
    assert f"{len(going)} of {len(rows)} objects would go" in result.stderr
    assert "expired: 1 snapshots, 0 leases" in result.stderr
    assert run("--url", url, "--once", "--log-level", "error").exit_code == 0
    left = load(tmp_path / "db", ground)
    assert ground.names() - left.names() == going


def test_dry_run_of_several_databases_names_them(url: str, tmp_path: Path) -> None:
    """What fails for one is told, by the exit code as well, and hides nothing of the others."""
    missing = f"file://{tmp_path}/none"
    result = run("--url", missing, "--url", url, "--dry-run")
    assert result.exit_code == ExitCode.DATABASE_NOT_FOUND
    assert {line.split("\t")[0] for line in result.stdout.splitlines()} == {url}
    assert "holds no database" in result.stderr


def test_ages_are_settings(url: str) -> None:
    """Nothing goes that is younger than --collect-age-s."""
    result = run("--url", url, "--dry-run", "--collect-age-s", "31536000", "--format", "json")
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    old = {row["fate"] for row in rows if row["name"].startswith("manifest/")}
    assert old == {"goes", "stays"}  # 2023 is longer ago than a year


@pytest.mark.parametrize("args", [["--once"], ["--dry-run"], []])
def test_a_url_is_needed(args: list[str]) -> None:
    """From flag, environment or file; the message names all three."""
    result = run(*args)
    assert result.exit_code == ExitCode.USAGE
    for name in ("--url", "SHALEKV_DATABASE__URL", "database.url"):
        assert name in result.output


def test_the_url_may_stand_in_environment_or_file(url: str, tmp_path: Path) -> None:
    """As for `shalekv serve`, with whose file it may share the settings."""
    assert run("--dry-run", SHALEKV_DATABASE__URL=url).exit_code == 0
    file = tmp_path / "shalekv.toml"
    file.write_text(f'[database]\nurl = "{url}"\ncreate = true\n[collector]\ncollect_age_s = 1\n')
    assert run("--dry-run", "--config", str(file)).exit_code == 0


@pytest.mark.parametrize("wrong", ["memory://x", "s3://x/y", "nowhere"])
def test_a_wrong_url_is_a_usage_error(wrong: str) -> None:
    """Memory is collected by nobody: no other process can read it."""
    result = run("--url", wrong, "--once")
    assert result.exit_code == ExitCode.USAGE
    assert "Traceback" not in result.output
