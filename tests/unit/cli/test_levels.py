"""`shalekv levels`: levels, amplification, snapshots and orphans, read from a store."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from shalekv.cli.main import shalekv
from shalekv.errors import CorruptObject
from shalekv.format.names import manifest_name, wal_name
from tests.kit.engine.damage import (
    CURRENT,
    LEFT_SST,
    OLD_SST,
    PINNED,
    RIGHT_SST,
    Planted,
    sst_name,
)

FUTURE_MS = 4_000_000_000_000


def run(url: str, *args: str) -> Result:
    return CliRunner().invoke(shalekv, ["levels", "--url", url, *args])


def record(url: str, *args: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(run(url, "--format", "json", *args).stdout)
    return found


def test_levels_are_listed(tmp_path: Path) -> None:
    """Each level has SSTs, bytes, entries, tombstones, keys and sequence numbers; with totals."""
    planted = Planted(FUTURE_MS)
    found = record(planted.save(tmp_path))
    rows = found["levels"]
    assert isinstance(rows, list)
    assert [row["level"] for row in rows] == [0, 1, 2, 63]
    run_one = rows[1]
    sizes = [len(planted.data(sst_name(number))) for number in (LEFT_SST, RIGHT_SST)]
    assert run_one == {
        "level": 1,
        "ssts": 2,
        "size_bytes": sum(sizes),
        "entries": 5,
        "tombstones": 2,
        "first_key": "a",
        "last_key": "p",
        "min_seq": 11,
        "max_seq": 15,
    }
    assert (rows[3]["first_key"], rows[3]["entries"]) == (None, 1)
    total = found["total"]
    assert isinstance(total, dict)
    assert total["size_bytes"] == sum(row["size_bytes"] for row in rows)
    assert (total["ssts"], total["entries"]) == (5, 10)
    data = [row["size_bytes"] for row in rows[:3]]
    assert found["space_amplification"] == round(sum(data) / data[2], 3)
    assert (found["read_amplification"], found["l0_overlap"]) == (3, 1)


def test_snapshots_have_their_pinned_bytes(tmp_path: Path) -> None:
    """Snapshots pin SSTs and WAL objects beyond the current manifest; expired ones are omitted."""
    planted = Planted(FUTURE_MS)
    pinned = len(planted.data(sst_name(OLD_SST))) + len(planted.data(wal_name(2)))
    snapshots = record(planted.save(tmp_path))["snapshots"]
    assert isinstance(snapshots, list)
    kept, current = snapshots
    assert (kept["snapshot"], kept["manifest_id"]) == ("kept", PINNED)
    assert (kept["pinned_bytes"], kept["alone_bytes"]) == (pinned, pinned)
    assert (current["manifest_id"], current["pinned_bytes"], current["expires_at_ms"]) == (
        CURRENT,
        0,
        None,
    )


def test_damaged_manifests(tmp_path: Path) -> None:
    """A damaged current manifest is an error; that of a snapshot hides only what it pins."""
    planted = Planted(FUTURE_MS)
    planted.flip(manifest_name(PINNED), 25)
    snapshots = record(planted.save(tmp_path))["snapshots"]
    assert isinstance(snapshots, list)
    assert snapshots[0]["pinned_bytes"] is None
    planted.flip(manifest_name(CURRENT), 25)
    assert isinstance(run(planted.save(tmp_path)).exception, CorruptObject)
