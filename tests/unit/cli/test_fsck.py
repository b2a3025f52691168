"""`shalekv fsck`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from shalekv.core.tree import L0
from shalekv.errors import DatabaseNotFound
from shalekv.format.names import wal_name
from tests.kit.engine.damage import L0_SST, Planted, sst_name
from tests.kit.samples import put

FUTURE_MS = 4_000_000_000_000  # no snapshot has expired on a real clock


def run(url: str, *args: str) -> Result:
    """Check the database at `url`."""
    return CliRunner().invoke(shalekv, ["fsck", "--url", url, *args])


@pytest.mark.parametrize("args", [(), ("--deep",), ("--parallel", "1", "--format", "table")])
def test_a_sound_database_ends_well(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Nothing on standard output, a summary beside it, exit code 0."""
    result = run(Planted(FUTURE_MS).save(tmp_path), *args)
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "")
    assert result.stderr.startswith("clean: 2 manifests, 8 WAL objects (2 fences), 7 SSTs, ")


def test_every_finding_is_a_line(tmp_path: Path) -> None:
    """Object, byte, kind and problem, in each format; exit code 5."""
    planted = Planted(FUTURE_MS)
    planted.flip(wal_name(4), 1)
    planted.flip(sst_name(L0_SST), 1)
    planted.sst(99, L0, [put(b"a", 1)])
    url = planted.save(tmp_path)
    result = run(url, "--format", "json")
    assert result.exit_code == ExitCode.DAMAGED
    assert result.stderr.startswith("damaged: ")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["object"], each["offset"], each["kind"]) for each in found] == [
        (wal_name(4), 0, "bad_checksum"),
        (sst_name(L0_SST), 0, "bad_checksum"),
        (sst_name(99), None, "orphan"),
    ]
    raw = [line.split("\t") for line in run(url).stdout.splitlines()]
    assert [row[0] for row in raw] == [each["object"] for each in found]
    assert [row[1] for row in raw] == ["0", "0", ""]
    table = run(url, "--format", "table")
    assert table.exit_code == ExitCode.DAMAGED
    assert table.stdout.splitlines()[0].split() == ["object", "offset", "kind", "problem"]
    assert len(table.stdout.splitlines()) == 4


def test_orphans_alone_end_well(tmp_path: Path) -> None:
    """They are listed, and are the collector's business."""
    planted = Planted(FUTURE_MS)
    planted.sst(99, L0, [put(b"a", 1)])
    result = run(planted.save(tmp_path))
    assert result.exit_code == ExitCode.OK
    assert result.stdout.split("\t")[2] == "orphan"
    assert "orphans wait for the collector" in result.stderr


def test_where_there_is_no_database(tmp_path: Path) -> None:
    """It says so, and leaves nothing behind."""
    result = run(f"file://{tmp_path}/nothing")
    assert isinstance(result.exception, DatabaseNotFound)
    assert list(tmp_path.iterdir()) == []
