"""Which servers are asked, which state is read, and where it is printed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shalekv.cli.dump import dump
from shalekv.cli.get import get
from shalekv.cli.put import put
from shalekv.cli.rows_bar import rows_bar
from shalekv.cli.rows_told import RowsTold, telling
from shalekv.cli.scan import scan
from shalekv.cli.top import top
from shalekv.cli.watch import watch
from shalekv_client import SessionToken
from tests.kit.serving.dict_server import DATABASE_ID, DictServer
from tests.servers.process import free_port
from tests.unit.cli_client.conftest import Run


@pytest.mark.parametrize("flag", ["--addr", "--address"])
async def test_several_addresses_find_one_that_serves(server: DictServer, flag: str) -> None:
    """With commas, or the option again: a read goes past a server that is not there."""
    await asyncio.to_thread(_read_past, [flag, f"127.0.0.1:{free_port()},{server.address}"])
    await asyncio.to_thread(_read_past, [flag, f"127.0.0.1:{free_port()}", flag, server.address])


def _read_past(words: list[str]) -> None:
    result = CliRunner().invoke(get, ["nothing", *words])
    assert (result.exit_code, result.stderr) == (1, "not found: nothing\n")


@pytest.mark.parametrize("value", ["127.0.0.1:1,", "127.0.0.1:1,nowhere", ","])
async def test_a_bad_address_among_several_is_refused(run: Run, value: str) -> None:
    """As one alone is."""
    assert (await run(get, "k", "--addr", value)).exit_code == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--snapshot", "x", "--min-seq", "3"], "exclude"),
        (["--snapshot", "x", "--max-staleness", "1s"], "exclude"),
        (["--max-staleness", "5"], "no time"),
        (["--token", "nonsense"], "token"),
        (["--min-seq", "0"], "range"),
        (["--reads", "some"], "some"),
    ],
)
async def test_contradictions_are_usage_errors(run: Run, words: list[str], problem: str) -> None:
    """And nothing is asked of the server."""
    result = await run(get, "k", *words)
    assert result.exit_code == 2
    assert problem in result.stderr


async def test_freshness_goes_into_the_request(run: Run, server: DictServer) -> None:
    """A state that contains a commit, and a token of this database, are satisfied at once."""
    await run(put, "k", "v")
    token = str(SessionToken(DATABASE_ID, 1))
    for words in (["--min-seq", "1"], ["--token", token], ["--max-staleness", "2s"]):
        result = await run(get, "k", *words)
        assert (result.exit_code, result.stdout) == (0, "v\n"), result.stderr
    other = str(SessionToken(bytes(16), 1))
    result = await run(get, "k", "--token", other)
    assert result.exit_code == 2
    assert "database" in result.stderr
    assert server.state.data


def names_in(folder: Path) -> list[str]:
    """The files that are there."""
    return [path.name for path in folder.iterdir()]


async def test_output_is_a_whole_file(run: Run, tmp_path: Path) -> None:
    """Raw without --format; nothing is there when the scan fails, and what was there stays."""
    for number in range(3):
        await run(put, f"k{number}", "v")
    path = tmp_path / "all.tsv"
    result = await run(scan, "--output", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"3 rows in {path}\n"
    assert path.read_text() == "k0\tv\nk1\tv\nk2\tv\n"
    failed = await run(scan, "--output", str(path), "--addr", f"127.0.0.1:{free_port()}")
    assert failed.exit_code == 9
    assert path.read_text() == "k0\tv\nk1\tv\nk2\tv\n"
    assert names_in(tmp_path) == [path.name]
    nowhere = tmp_path / "missing" / "all.tsv"
    assert (await run(scan, "--output", str(nowhere))).exit_code == 12


async def test_no_bar_where_nobody_looks(run: Run, tmp_path: Path) -> None:
    """Without a terminal stderr has the totals alone."""
    await run(put, "k", "v")
    result = await run(dump, "--output", str(tmp_path / "all.ndjson"))
    assert result.stderr == "dumped 1 row at seq 1\n"


def test_the_bar_tells_rows_bytes_and_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it counts; `telling` draws it only there, and for files."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = RowsTold(rows=1_234, bytes=5 << 20)
    with rows_bar(told):
        pass
    drawn = capsys.readouterr().err
    assert "1,234 rows, 5.0 MiB, " in drawn
    assert "rows/s" in drawn
    with telling(told, to_file=True):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with telling(told, to_file=True):
        pass
    assert "1,234 rows" in capsys.readouterr().err


async def test_watch_and_top_refuse_what_makes_no_sense(run: Run) -> None:
    """A prefix twice, an interval that would be a load."""
    assert (await run(watch, "a", "--start", "b")).exit_code == 2
    assert (await run(watch, "--from-seq", "0")).exit_code == 2
    assert (await run(top, "--interval", "1ms")).exit_code == 2
