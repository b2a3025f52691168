"""`shalekv dump`: its files, and that a load reads them back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shalekv.cli.commands.dump import dump
from shalekv.cli.commands.load import load
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
    """A server with keys and values that are not text."""
    for seq, (key, value) in enumerate(BINARY.items(), 1):
        server.state.data[key] = kv_pb2.Entry(key=key, value=value, seq=seq)
    server.state.seq = len(BINARY)
    return server


def values(server: DictServer) -> dict[bytes, bytes]:
    return {key: entry.value for key, entry in server.state.data.items()}


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("name", ["a.ndjson", "a.jsonl.gz", "a.csv", "a.csv.gz", "a", "a.gz"])
async def test_a_file_is_a_round_trip(
    run: Run, filled: DictServer, tmp_path: Path, name: str
) -> None:
    """The name of the file decides format and compression, for dump and load."""
    path = tmp_path / name
    assert (await run(dump, str(path))).exit_code == 0
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    filled.state.data.clear()
    assert (await run(load, str(path))).exit_code == 0
    assert values(filled) == BINARY
    assert names(tmp_path) == [name]


@pytest.mark.usefixtures("filled")
async def test_a_pair_that_tsv_cannot_hold_is_refused(run: Run, tmp_path: Path) -> None:
    """A pair that TSV cannot hold ends the dump without a file; the error has key and advice."""
    path = tmp_path / "a.tsv"
    path.write_bytes(b"before")
    result = await run(dump, str(path))
    assert result.exit_code == 2
    assert r"TSV cannot have the pair of key '\x00\xff'" in result.stderr
    assert "--escaped" in result.stderr
    assert path.read_bytes() == b"before"


async def test_a_dump_that_breaks_off_leaves_no_file(
    run: Run, filled: DictServer, tmp_path: Path
) -> None:
    """An interrupted dump leaves no file."""
    filled.state.scan_failure_after = 1
    result = await run(dump, str(tmp_path / "a.ndjson.gz"))
    assert result.exit_code == 11
    assert "made to fail" in result.stderr
    assert names(tmp_path) == []
