"""`shalekv scan` and `shalekv status`: what they print."""

from __future__ import annotations

import json
import re

import pytest

from shalekv.cli.output import TABLE_ROWS
from shalekv.cli.put import put
from shalekv.cli.scan import scan
from shalekv.cli.status import status
from shalekv.v1 import kv_pb2
from tests.kit.serving.dict_server import DATABASE_ID, DictServer
from tests.unit.cli_client.conftest import Run


@pytest.fixture
def filled(server: DictServer) -> DictServer:
    """Keys k00 to k11 whose values are their numbers."""
    for number in range(12):
        key = b"k%02d" % number
        server.state.data[key] = kv_pb2.Entry(key=key, value=key[1:], seq=number + 1)
    return server


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--limit", "2"], ["k00\t00", "k01\t01"]),
        (["--reverse", "--limit", "1"], ["k11\t11"]),
        (["--prefix", "k1"], ["k10\t10", "k11\t11"]),
        (["--start", "k01", "--end", "k03"], ["k01\t01", "k02\t02"]),
        (["--hex", "--start", "6b3130", "--keys-only"], ["6b3130", "6b3131"]),
        (["--prefix", "x"], []),
    ],
)
@pytest.mark.usefixtures("filled")
async def test_raw_is_one_line_for_each_pair(
    run: Run, args: list[str], expected: list[str]
) -> None:
    """Without a terminal: key, TAB, value, in order, of the range that was asked for."""
    result = await run(scan, *args)
    assert (result.exit_code, result.stdout.splitlines()) == (0, expected)


async def test_raw_lines_survive_any_bytes(run: Run, server: DictServer) -> None:
    """TABs and line feeds inside keys and values do not break the lines."""
    server.state.data[b"a\tb"] = kv_pb2.Entry(key=b"a\tb", value=b"c\nd\\", seq=1)
    assert (await run(scan)).stdout == "a\\tb\tc\\nd\\\n"
    assert (await run(scan, "--escaped")).stdout == "a\\tb\tc\\nd\\\\\n"


@pytest.mark.usefixtures("filled")
async def test_json_is_one_object_for_each_pair(run: Run) -> None:
    """--format json prints objects, without values when only keys were asked for."""
    result = await run(scan, "--format", "json", "--limit", "1")
    assert json.loads(result.stdout) == {
        "key": "k00",
        "value": "00",
        "seq": 1,
        "expire_at_ms": None,
    }
    result = await run(scan, "--format", "json", "--limit", "1", "--keys-only")
    assert json.loads(result.stdout) == {"key": "k00", "seq": 1, "expire_at_ms": None}


async def test_table_lines_up(run: Run, server: DictServer) -> None:
    """A table has headings, aligned columns also for wide characters, and numbers at the right."""
    for number, (key, value) in enumerate([("cat", "\U0001f431"), ("c", "x"), ("caterpillar", "")]):
        data = key.encode()
        server.state.data[data] = kv_pb2.Entry(key=data, value=value.encode(), seq=number * 99)
    result = await run(scan, "--format", "table")
    assert result.stdout.splitlines() == [
        "key          value  seq",
        "c            x       99",
        "cat          \U0001f431       0",
        "caterpillar         198",
    ]


async def test_table_of_nothing_has_headings(run: Run) -> None:
    """An empty table still says what it would show."""
    assert (await run(scan, "--format", "table")).stdout.split() == ["key", "value", "seq"]


@pytest.mark.parametrize("output_format", ["table", "json", "raw"])
async def test_nothing_is_lost_between_pages(
    run: Run, server: DictServer, output_format: str
) -> None:
    """However many pages of output there are, every key is printed once and in order."""
    keys = [f"{number:05}" for number in range(2 * TABLE_ROWS + 1)]
    for key in keys:
        server.state.data[key.encode()] = kv_pb2.Entry(key=key.encode(), seq=1)
    result = await run(scan, "--format", output_format, "--keys-only")
    found = result.stdout.split()
    if output_format == "json":
        found = [json.loads(line)["key"] for line in result.stdout.splitlines()]
    assert [key for key in found if key != "key"] == keys


@pytest.mark.usefixtures("filled")
async def test_what_came_before_a_failure_is_printed(run: Run, server: DictServer) -> None:
    """A scan that breaks off prints what it got, and ends with an error, not as if it were all."""
    server.state.scan_failure_after = 1
    result = await run(scan, "--keys-only")
    assert result.stdout.split() == ["k00", "k01", "k02"]
    assert result.exit_code == 11
    assert "made to fail" in result.stderr


async def test_impossible_ranges_are_refused(run: Run, server: DictServer) -> None:
    """A range that contradicts itself is a usage error, and nothing is sent."""
    result = await run(scan, "--prefix", "a", "--end", "b")
    assert result.exit_code == 2
    assert "--prefix excludes --start and --end" in result.stderr
    assert server.state.requests == []


@pytest.mark.parametrize("limit", [["--limit", "5"], ["--limit-bytes", "21"]])
@pytest.mark.usefixtures("filled")
async def test_pages_follow_each_other(run: Run, server: DictServer, limit: list[str]) -> None:
    """What a limit has cut off tells how to go on, and goes on at the same moment."""
    keys: list[str] = []
    token: list[str] = []
    for _ in range(3):
        page = await run(scan, *limit, *token, "--format", "json")
        assert page.exit_code == 0, page.output
        keys += [json.loads(line)["key"] for line in page.stdout.splitlines()]
        server.state.data.pop(b"k11", None)  # nobody sees it, who began before
        token = re.findall(r"--page-token \S+", page.stderr)[-1:]
        token = token[0].split() if token else []
    assert keys == [f"k{number:02}" for number in range(12)]
    assert token == []


@pytest.mark.usefixtures("filled")
async def test_a_scan_to_its_end_says_nothing(run: Run) -> None:
    """Without a limit, and with one that was not reached, stderr is empty."""
    assert (await run(scan)).stderr == ""
    assert (await run(scan, "--limit", "12")).stderr == ""


async def test_pages_that_are_gone_are_told(run: Run) -> None:
    """A token that the server has forgotten says to begin again; one that is none is refused."""
    gone = await run(scan, "--page-token", "Z29uZQ==")
    assert gone.exit_code == 10
    assert "page token" in gone.stderr
    wrong = await run(scan, "--page-token", "what?")
    assert wrong.exit_code == 2
    assert "not what an earlier page has printed" in wrong.stderr


async def test_status_can_be_read_by_programs(run: Run) -> None:
    """The status as JSON has view, process, writer, memtable and manifest."""
    await run(put, "k", "v")
    found = json.loads((await run(status, "--format", "json")).stdout)
    assert found["view"]["database_id"] == DATABASE_ID.hex()
    assert found["view"]["role"] == "writer"
    assert found["writer"]["commits"] == 1
    assert found["manifest"]["wal_id_last_compacted"] is None


async def test_status_can_be_read_by_people(run: Run) -> None:
    """In sections numbers have separators and what is not there is a dash; raw has neither."""
    lines = (await run(status, "--format", "table")).stdout.splitlines()
    table = dict(words for line in lines if len(words := line.split()) == 2)
    assert table["memtable.bytes"] == "5,000,000"
    assert table["manifest.wal_id_last_compacted"] == "-"
    raw = dict(line.split("\t") for line in (await run(status)).stdout.splitlines())
    assert raw["memtable.bytes"] == "5000000"
    assert raw["manifest.wal_id_last_compacted"] == ""
