"""What a write may demand and do: conditions, times to live, ranges, counters."""

from __future__ import annotations

import json

import pytest

from shalekv.cli.add import add
from shalekv.cli.delete import delete
from shalekv.cli.get import get
from shalekv.cli.put import put
from tests.kit.serving.dict_server import DictServer
from tests.unit.cli_client.conftest import Run


async def test_conditions_of_a_put(run: Run, server: DictServer) -> None:
    """What holds is done; what doesn't is exit code 13, says what is there, and changes nothing."""
    assert (await run(put, "k", "1", "--if-present")).exit_code == 13
    assert (await run(put, "k", "1", "--if-absent")).stdout == "seq 1\n"
    assert (await run(put, "k", "2", "--if-seq", "1")).stdout == "seq 2\n"
    refused = await run(put, "k", "3", "--if-seq", "1")
    assert (refused.exit_code, refused.stdout) == (13, "")
    assert refused.stderr == ("Error: condition failed: the key has seq 2\nNothing was changed.\n")
    assert server.state.data[b"k"].value == b"2"


async def test_conditions_of_a_delete(run: Run, server: DictServer) -> None:
    """As those of a put; of a key without a value it says so."""
    refused = await run(delete, "k", "--if-present")
    assert refused.exit_code == 13
    assert "condition failed: the key has no value" in refused.stderr
    await run(put, "k", "v")
    assert (await run(delete, "k", "--if-absent")).exit_code == 13
    assert (await run(delete, "k", "--if-seq", "1")).exit_code == 0
    assert server.state.data == {}


@pytest.mark.parametrize("flags", [["--if-absent", "--if-present"], ["--if-absent", "--if-seq=1"]])
async def test_conditions_exclude_each_other(
    run: Run, server: DictServer, flags: list[str]
) -> None:
    """Two conditions are a usage error, and nothing is sent."""
    result = await run(put, "k", "v", *flags)
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
    assert server.state.requests == []


async def test_time_to_live_is_sent(run: Run, server: DictServer) -> None:
    """--ttl reaches the server in milliseconds; a number without a unit does not."""
    await run(put, "k", "v", "--ttl", "5m")
    assert server.state.requests[-1].ttl_ms == 300_000
    result = await run(put, "k", "v", "--ttl", "300")
    assert result.exit_code == 2
    assert "10s" in result.stderr


@pytest.mark.parametrize(
    ("args", "left"),
    [
        (["--prefix", "b"], [b"a", b"c"]),
        (["--start", "b", "--end", "c"], [b"a", b"c"]),
        (["--start", "b"], [b"a"]),
        (["--hex", "--prefix", "6231"], [b"a", b"b2", b"c"]),
        (["--all", "--yes"], []),
    ],
)
async def test_ranges_are_deleted(
    run: Run, server: DictServer, args: list[str], left: list[bytes]
) -> None:
    """A range, or all keys, in one request."""
    for key in ("a", "b1", "b2", "c"):
        await run(put, key, "v")
    result = await run(delete, *args)
    assert (result.exit_code, result.stdout) == (0, "seq 5\n")
    assert sorted(server.state.data) == left
    assert server.state.calls["DeleteRange"] == 1


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "say what to delete"),
        (["--prefix", ""], "say what to delete"),
        (["k", "--prefix", "k"], "one of them"),
        (["--prefix", "k", "--all", "--yes"], "one of them"),
        (["--prefix", "k", "--start", "k"], "--prefix excludes"),
        (["--all"], "add --yes"),
        (["--prefix", "k", "--if-present"], "conditions are for one KEY"),
    ],
)
async def test_deletes_that_are_not_clear_are_refused(
    run: Run, server: DictServer, args: list[str], problem: str
) -> None:
    """Nothing, two things, or everything by accident: usage errors, and nothing is sent."""
    result = await run(delete, *args)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert server.state.requests == []


async def test_counters(run: Run) -> None:
    """DELTA is 1 unless given, may be negative without quoting, and `get` shows the number."""
    assert (await run(add, "n")).stdout == "1\n"
    assert (await run(add, "n", "-43")).stdout == "-42\n"
    assert (await run(add, "-7", "--hex", "6e")).stdout == "-49\n"
    assert (await run(add, "n", "--", "-1")).stdout == "-50\n"
    assert (await run(get, "n", "--as-int64")).stdout == "-50\n"
    assert (await run(get, "n", "--as-int64", "--format", "raw")).stdout_bytes == b"-50"
    found = json.loads((await run(get, "n", "--as-int64", "--format", "json")).stdout)
    assert found["value"] == -50
    told = json.loads((await run(add, "n", "0", "--format", "json")).stdout)
    assert told == {"key": "n", "value": -50}


async def test_what_is_no_counter_is_told(run: Run) -> None:
    """Adding to it and reading it as one are wrong requests, and change nothing."""
    await run(put, "k", "text")
    refused = await run(add, "k")
    assert (refused.exit_code, refused.stdout) == (2, "")
    shown = await run(get, "k", "--as-int64")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "a counter has 8 bytes, and this value has 4" in shown.stderr
    await run(add, "n", str(2**63 - 1))
    assert (await run(add, "n")).exit_code == 2


@pytest.mark.parametrize("args", [["-5"], [], ["--timeout-ms", "-5", "k"], ["k", "x"], ["k", "-x"]])
async def test_wrong_words_to_add_are_refused(
    run: Run, server: DictServer, args: list[str]
) -> None:
    """A number is never taken for the key, nor an unknown option for a number."""
    result = await run(add, *args)
    assert result.exit_code == 2
    assert server.state.requests == []


async def test_commits_can_be_read_by_programs(run: Run) -> None:
    """--format tells where the commit is, and how durable."""
    commit = json.loads((await run(put, "k", "v", "--format", "json")).stdout)
    assert commit == {"seq": 1, "wal_id": 1, "epoch": 7, "durability": "durable"}
    raw = (await run(delete, "k", "--format", "raw", "--durability", "memory")).stdout
    assert dict(line.split("\t") for line in raw.splitlines())["durability"] == "memory"
