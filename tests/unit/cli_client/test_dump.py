"""`shalekv dump`: what it writes, where, and that a load reads it back."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from shalekv.cli.dump import dump
from shalekv.cli.load import load
from shalekv.v1 import kv_pb2
from tests.kit.serving.dict_server import DictServer
from tests.unit.cli_client.conftest import Run

BINARY = {
    b"\x00\xff": b"\x00\r\n\t\"',\\",
    b"a": b"",
    b"a\tb\n": b"\xc3\xa4\xff",
    b"b\r": b"\r",
    b"{": b'{"key": "x"}',
    "\u03b1 \u2028".encode(): "\U0001f431".encode(),
}


@pytest.fixture
def filled(server: DictServer) -> DictServer:
    """A server with keys and values that no text can have."""
    for seq, (key, value) in enumerate(BINARY.items(), 1):
        server.state.data[key] = kv_pb2.Entry(key=key, value=value, seq=seq)
    server.state.seq = len(BINARY)
    return server


def values(server: DictServer) -> dict[bytes, bytes]:
    """What is stored."""
    return {key: entry.value for key, entry in server.state.data.items()}


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("dumped", "loaded"),
    [
        ([], []),
        (["--hex"], []),
        (["--output-format", "ndjson", "--escaped"], []),
        (["--output-format", "csv"], ["--input-format", "csv"]),
        (["--output-format", "csv", "--base64"], ["--input-format", "csv", "--base64"]),
        (["--output-format", "tsv", "--escaped"], ["--escaped"]),
        (["--output-format", "tsv", "--hex"], ["--hex"]),
    ],
)
async def test_a_pipe_is_a_round_trip(
    run: Run, filled: DictServer, dumped: list[str], loaded: list[str]
) -> None:
    """`dump | load` ends in the same bytes."""
    printed = await run(dump, *dumped)
    assert (printed.exit_code, printed.stderr) == (0, "dumped 6 rows at seq 6\n")
    filled.state.data.clear()
    result = await run(load, *loaded, stdin=printed.stdout_bytes)
    assert result.exit_code == 0, result.output
    assert values(filled) == BINARY


@pytest.mark.parametrize("name", ["a.ndjson", "a.jsonl.gz", "a.csv", "a.csv.gz", "a", "a.gz"])
async def test_a_file_is_a_round_trip(
    run: Run, filled: DictServer, tmp_path: Path, name: str
) -> None:
    """A name tells the format and the compression, to both of them."""
    path = tmp_path / name
    assert (await run(dump, "--output", str(path))).exit_code == 0
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    filled.state.data.clear()
    assert (await run(load, str(path))).exit_code == 0
    assert values(filled) == BINARY
    assert names(tmp_path) == [name]


async def test_the_same_pairs_make_the_same_file(
    run: Run, filled: DictServer, tmp_path: Path
) -> None:
    """A compressed dump has neither its name nor its time in it."""
    assert values(filled)
    paths = [tmp_path / "a.csv.gz", tmp_path / "b.csv.gz"]
    for path in paths:
        await run(dump, "--output", str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.usefixtures("filled")
async def test_a_range_can_be_dumped(run: Run) -> None:
    """With the options of scan, in the order of the keys."""
    printed = await run(dump, "--start", "a", "--end", "b")
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [row["key"] for row in rows] == ["a", "a\tb\n"]
    assert printed.stderr.startswith("dumped 2 rows")


@pytest.mark.usefixtures("filled")
async def test_tsv_that_has_no_room_is_refused(run: Run, tmp_path: Path) -> None:
    """A pair that TSV cannot have ends the dump, with its key and a way out, and without a file."""
    path = tmp_path / "a.tsv"
    path.write_bytes(b"before")
    result = await run(dump, "--output", str(path))
    assert result.exit_code == 2
    assert r"TSV cannot have the pair of key '\x00\xff'" in result.stderr
    assert "--escaped" in result.stderr
    assert path.read_bytes() == b"before"


async def test_expiry_is_dumped_or_its_loss_told(run: Run, server: DictServer) -> None:
    """NDJSON has it; for other formats stderr says how many rows lose it."""
    server.state.data[b"k"] = kv_pb2.Entry(key=b"k", value=b"v", seq=1, expire_at_ms=5)
    row = json.loads((await run(dump)).stdout)
    assert row == {"key": "k", "value": "v", "expire_at_ms": 5}
    result = await run(dump, "--output-format", "csv")
    assert result.stdout_bytes == b"key,value\r\nk,v\r\n"
    assert "1 row of them will expire, which csv cannot say" in result.stderr


async def test_a_dump_that_breaks_off_leaves_no_file(
    run: Run, filled: DictServer, tmp_path: Path
) -> None:
    """Half a dump is not taken for a whole one."""
    filled.state.scan_failure_after = 1
    result = await run(dump, "--output", str(tmp_path / "a.ndjson.gz"))
    assert result.exit_code == 11
    assert "made to fail" in result.stderr
    assert names(tmp_path) == []


async def test_places_that_cannot_be_written_are_told(run: Run, tmp_path: Path) -> None:
    """Exit code 12, and which place it is."""
    result = await run(dump, "--output", str(tmp_path / "no" / "a.csv"))
    assert result.exit_code == 12
    assert "--output cannot be written" in result.stderr


async def test_nothing_is_a_dump_too(run: Run, tmp_path: Path) -> None:
    """An empty database makes a file that loads nothing."""
    path = tmp_path / "a.csv.gz"
    assert (await run(dump, "--output", str(path))).stderr.startswith("dumped 0 rows")
    assert gzip.decompress(path.read_bytes()) == b"key,value\r\n"
    assert (await run(load, str(path))).stdout.startswith("loaded 0 rows")
    assert (await run(dump, "--output", os.devnull)).exit_code == 0
