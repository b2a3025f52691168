"""`shalekv manifest` and `shalekv wal`: what they read from a store, with no server around."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from shalekv.cli.manifest import manifest
from shalekv.cli.wal import wal
from shalekv.clock import LoopClock
from shalekv.core.entry import Entry, Kind
from shalekv.core.manifest import Manifest, PendingLoad, Snapshot
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.errors import BadMagic, DatabaseNotFound
from shalekv.format.footer import SstProperties
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import manifest_name, wal_name
from shalekv.format.sst_encode import encode_sst
from shalekv.roles.database import create_database
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store

EPOCH = 7
SST_ID = bytes.fromhex("0192f0c13a477aa08123456789abcdef")  # a UUID of version 7
LONG_KEY = b"k" * 5_000  # its footer needs a second read
POINTS = [
    Entry(b"a\tb", 5, Kind.PUT, b"\xff", 99),
    Entry(b"deleted", 5, Kind.TOMBSTONE),
    Entry(LONG_KEY, 5, Kind.PUT, b""),
]
RANGES = [Entry(b"m", 5, Kind.RANGE_TOMBSTONE, b"n")]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with a fence, a commit, and a WAL object that is damaged."""
    place = f"file://{tmp_path}/db"
    asyncio.run(_fill(place))
    damaged = tmp_path / "db" / wal_name(2)
    damaged.write_bytes(b"\0" * 100)
    return place


async def _fill(place: str) -> None:
    workers = ThreadWorkers(1)
    runtime = Runtime(clock=LoopClock(), random=random.Random(5), workers=workers)
    store = open_store(place, runtime, StoreSettings())
    await create_database(store, runtime, StoreSettings())
    for wal_id, (points, ranges) in enumerate([([], []), (POINTS, RANGES), ([], [])]):
        name = wal_name(wal_id)
        properties = SstProperties(
            name=name,
            database_id=bytes(16),
            writer_epoch=EPOCH,
            writer_nonce=bytes(16),
            write_id=bytes(16),
        )
        data = encode_sst(properties, points, ranges, block_bytes=4096)
        await store.create(name, data)
    await store.close()
    workers.close()


def run(command: click.Command, *args: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(command, args)


def test_wal_lists_objects(url: str) -> None:
    """Each object has its size, epoch, sequence numbers and entries; a fence is told apart."""
    rows = [
        json.loads(line)
        for line in run(wal, "--url", url, "--format", "json").stdout.split("\n")[:3]
    ]
    fence, commit, damaged = rows
    assert (fence["id"], fence["epoch"], fence["entries"], fence["is_fence"]) == (0, EPOCH, 0, True)
    assert (fence["min_seq"], fence["problem"]) == (None, None)
    assert (commit["min_seq"], commit["max_seq"], commit["entries"]) == (5, 5, 4)
    assert commit["is_fence"] is False
    assert (damaged["size_bytes"], damaged["epoch"]) == (100, None)


def test_damage_is_told_and_does_not_hide_the_rest(url: str) -> None:
    """A damaged object is a row that names the problem, and the exit code says so."""
    result = run(wal, "--url", url)
    assert result.exit_code == 5
    assert len(result.stdout.splitlines()) == 3
    assert "wal/00000000000000000002.sst" in result.stdout.splitlines()[2]
    assert result.stderr.startswith("Error: 1 of 3 objects cannot be used")
    assert "wal/00000000000000000002.sst" in result.stderr


def test_missing_objects_are_told(url: str, tmp_path: Path) -> None:
    """A slot that was filled once and is empty is a row; a list may begin behind it."""
    (tmp_path / "db" / wal_name(2)).unlink()
    assert run(wal, "--url", url).exit_code == 0  # nobody knows of it
    (tmp_path / "db" / wal_name(0)).unlink()
    result = run(wal, "--url", url, "--format", "json")
    assert result.exit_code == 5
    missing, commit = map(json.loads, result.stdout.splitlines())
    assert (missing["id"], missing["size_bytes"], commit["id"]) == (0, None, 1)
    assert "is missing although it was written" in missing["problem"]
    assert run(wal, "--url", url, "--from", "1").exit_code == 0


def test_the_log_is_listed_without_a_manifest_that_can_be_read(url: str, tmp_path: Path) -> None:
    """A damaged manifest hides neither the log nor the list of manifests."""
    (tmp_path / "db" / wal_name(2)).unlink()
    (tmp_path / "db" / manifest_name(0)).write_bytes(b"cut")
    result = run(wal, "--url", url)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    (line,) = run(manifest, "--url", url, "--list").stdout.splitlines()
    assert line.split("\t")[:2] == ["0", "3"]


def test_wal_lists_from_an_id_on(url: str) -> None:
    """--from leaves out what is older."""
    assert [
        line.split("\t")[0] for line in run(wal, "--url", url, "--from", "1").stdout.splitlines()
    ] == [
        "1",
        "2",
    ]


def test_wal_prints_the_entries_of_an_object(url: str) -> None:
    """--id prints every entry: puts, tombstones and range tombstones, safely spelled."""
    result = run(wal, "--url", url, "--id", "1", "--format", "json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["put", "tombstone", "put", "range_tombstone"]
    assert rows[0] == {
        "key": "a\tb",
        "seq": 5,
        "kind": "put",
        "value_base64": "/w==",
        "expire_at_ms": 99,
    }
    raw = run(wal, "--url", url, "--id", "1", "--hex").stdout.splitlines()
    assert raw[0] == "610962\t5\tput\tff\t99"
    assert raw[-1] == "6d\t5\trange_tombstone\t6e\t"


def test_damaged_objects_are_not_printed(url: str) -> None:
    """The entries of a damaged object are an error, not an empty list."""
    result = run(wal, "--url", url, "--id", "2")
    assert isinstance(result.exception, BadMagic)
    assert result.stdout == ""


def test_manifest_is_printed_whole(url: str) -> None:
    """The current manifest has every field, ids in hexadecimal, and its own id first."""
    found = json.loads(run(manifest, "--url", url, "--format", "json").stdout)
    assert next(iter(found)) == "manifest_id"
    assert (found["manifest_id"], found["cas_mode"], found["leveled_ssts"]) == (0, "native", [])
    assert len(found["database_id"]) == 32
    raw = dict(line.split("\t") for line in run(manifest, "--url", url).stdout.splitlines())
    assert (raw["writer_epoch"], raw["wal_id_last_compacted"], raw["snapshots"]) == ("0", "", "")
    assert run(manifest, "--url", url, "--id", "0").stdout.splitlines()[0] == "manifest_id\t0"


def test_manifest_spells_out_ssts_and_snapshots(tmp_path: Path) -> None:
    """SSTs of the levels and snapshots are printed field by field, keys in the chosen encoding."""
    sst = SstInfo(SST_ID, 2, b"\x00a", b"z", 0, 0, 96, 40, 1, 9, 3, 1, 500, 77)
    snapshot = Snapshot(bytes(15) + b"\x01", 1, 60, name="before")
    found = Manifest(
        database_id=bytes(16),
        manifest_id=1,
        write_id=bytes(16),
        leveled_ssts=SstTable.from_infos([sst]),
        snapshots=(snapshot,),
        pending_loads=(PendingLoad("load-1", SstTable.from_infos([sst])),),
    )
    file = tmp_path / manifest_name(1)
    file.parent.mkdir()
    file.write_bytes(encode_manifest(found))
    printed = run(manifest, "--url", f"file://{tmp_path}", "--hex").stdout.splitlines()
    raw = dict(line.split("\t") for line in printed)
    assert raw["leveled_ssts.0.first_key"] == "0061"
    assert raw["leveled_ssts.0.id"] == SST_ID.hex()
    assert raw["leveled_ssts.0.level"] == "2"
    assert raw["snapshots.0.name"] == "before"
    assert raw["pending_loads.0.load_id"] == "load-1"
    assert raw["pending_loads.0.ssts.0.last_key"] == "7a"


def test_manifests_are_listed(url: str, tmp_path: Path) -> None:
    """--list has id, size and time of each; other files in the folder are none of ours."""
    (tmp_path / "db" / "manifest" / "notes.txt").write_text("not a manifest")
    size = (tmp_path / "db" / manifest_name(0)).stat().st_size
    (line,) = run(manifest, "--url", url, "--list").stdout.splitlines()
    assert line.split("\t")[:2] == ["0", str(size)]


@pytest.mark.parametrize("command", [manifest, wal])
def test_ids_that_are_not_there_are_usage_errors(url: str, command: click.Command) -> None:
    """--id of an object that does not exist names it, with exit code 2."""
    result = run(command, "--url", url, "--id", "77")
    assert result.exit_code == 2
    assert "00000000000000000077" in result.stderr


@pytest.mark.parametrize("command", [manifest, wal])
def test_places_without_a_database(command: click.Command, tmp_path: Path) -> None:
    """Reading where there is no database says so, and leaves nothing behind."""
    result = run(command, "--url", f"file://{tmp_path}/nothing")
    assert isinstance(result.exception, DatabaseNotFound)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [manifest, wal])
@pytest.mark.parametrize(
    "args", [[], ["--url", "/var/lib"], ["--url", "s3://b/db"], ["--url", "memory://a"]]
)
def test_urls_are_checked(command: click.Command, args: list[str]) -> None:
    """No URL, no scheme, no bucket's name, or another process's memory: usage errors."""
    result = run(command, *args)
    assert result.exit_code == 2
    assert "--url" in result.stderr


def test_list_and_id_exclude_each_other(url: str) -> None:
    """--list with --id is refused, and --from with --id."""
    assert run(wal, "--url", url, "--from", "1", "--id", "0").exit_code == 2
    assert run(manifest, "--url", url, "--list", "--id", "0").exit_code == 2
