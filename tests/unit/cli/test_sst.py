"""`shalekv sst inspect`: what an SST says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.main import shalekv
from shalekv.errors import BadChecksum, CorruptObject, Truncated, WrongObject
from shalekv.format.names import wal_name
from tests.kit.engine.damage import LEFT_SST, SECOND_SEQ, Planted, sst_id, sst_name

FUTURE_MS = 4_000_000_000_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A small database."""
    return Planted(FUTURE_MS).save(tmp_path)


def run(*args: str) -> Result:
    """Look into an SST."""
    return CliRunner().invoke(shalekv, ["sst", "inspect", *args])


@pytest.mark.parametrize(
    "name",
    [sst_name(LEFT_SST), sst_name(LEFT_SST)[7:-4], sst_id(LEFT_SST).hex()],
)
def test_an_sst_is_found_by_all_of_its_names(url: str, name: str) -> None:
    """The name of the object, its UUID, and its UUID without dashes."""
    found = json.loads(run("--url", url, name, "--format", "json").stdout)
    assert found["properties"]["name"] == sst_name(LEFT_SST)


def test_everything_is_told(url: str) -> None:
    """Footer, contents, layout, filter, statistics and sections."""
    found = json.loads(run("--url", url, sst_name(LEFT_SST), "--format", "json").stdout)
    contents = found["contents"]
    assert (contents["put_count"], contents["range_tombstone_count"]) == (2, 1)
    assert (contents["first_key"], contents["last_key"], contents["entry_count"]) == ("a", "m", 3)
    assert (found["filter"]["keys"], found["filter"]["probes"]) == (2, 6)
    assert found["filter"]["bits_per_key"] == 256.0  # the least filter has one line of 512
    assert found["statistics"]["filter_bytes"] == found["layout"]["filter_len"] == 80
    assert found["sections"] == {
        "points": {"blocks": 1, "rows": 2},
        "range_tombstones": {"blocks": 1, "rows": 1},
    }
    assert found["is_fence"] is False
    fence = json.loads(run("--url", url, "5", "--format", "json").stdout)
    assert (fence["is_fence"], fence["filter"], fence["sections"]) == (True, None, {})


def test_blocks_are_listed(url: str) -> None:
    """--blocks prints what the index says of each."""
    lines = run("--url", url, sst_name(LEFT_SST), "--blocks").stdout.splitlines()
    rows = [line.split("\t") for line in lines]
    assert [row[:3] for row in rows] == [
        ["0", "points", "0"],
        ["1", "range_tombstones", rows[0][3]],
    ]
    assert [row[-1] for row in rows] == ["a", "d"]


def test_entries_are_listed(url: str) -> None:
    """--entries prints all sections in their order, --limit the first of them."""
    lines = run("--url", url, "8", "--entries", "--format", "json").stdout.splitlines()
    ranged, remembered = map(json.loads, lines)
    assert (ranged["section"], ranged["key"], ranged["value"]) == ("range_tombstones", "q", "r")
    assert (remembered["section"], remembered["seq"]) == ("system", SECOND_SEQ + 1)
    (first,) = run("--url", url, "8", "--entries", "--limit", "1", "--hex").stdout.splitlines()
    assert first.split("\t") == [
        "range_tombstones",
        "71",
        str(SECOND_SEQ + 1),
        "range_tombstone",
        "72",
        "",
    ]


def test_a_file_says_whose_it_is(url: str, tmp_path: Path) -> None:
    """--file needs no name; with one, another object is refused."""
    del url
    copy = tmp_path / "copy"
    copy.write_bytes((tmp_path / wal_name(6)).read_bytes())
    found = json.loads(run("--file", str(copy), "--format", "json").stdout)
    assert found["properties"]["name"] == wal_name(6)
    assert len(run("--file", str(copy), "--entries").stdout.splitlines()) == 2
    assert isinstance(run("--file", str(copy), "7").exception, WrongObject)
    copy.write_bytes(b"short")
    error = run("--file", str(copy)).exception
    assert isinstance(error, Truncated)
    assert error.name == str(copy)


def test_damage_is_no_answer(url: str, tmp_path: Path) -> None:
    """A footer, an index or a block that is damaged raises; other parts can still be read."""
    path = tmp_path / sst_name(LEFT_SST)
    sound = path.read_bytes()
    path.write_bytes(b"\xff" + sound[1:])
    name = sst_name(LEFT_SST)
    assert run("--url", url, name).exit_code == 0
    assert isinstance(run("--url", url, name, "--entries").exception, BadChecksum)
    path.write_bytes(sound[:-30] + b"\xff" + sound[-29:])
    assert isinstance(run("--url", url, name).exception, CorruptObject)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["77"], "has no wal/"),
        (["levels/x.sst"], "no object in"),
        (["0192f0c1-3a47-4aa0-8123-456789abcdef"], "UUID of version 7"),
        ([], "NAME"),
        (["6", "--blocks", "--entries"], "exclude each other"),
        (["6", "--limit", "0"], "--limit"),
    ],
)
def test_what_cannot_be_looked_for(url: str, args: list[str], problem: str) -> None:
    """Objects that are not there, names that are none, and options that contradict each other."""
    result = run("--url", url, *args)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_without_a_place() -> None:
    """Neither --url nor --file is a usage error."""
    assert run("6").exit_code == 2
