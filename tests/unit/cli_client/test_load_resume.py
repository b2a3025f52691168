"""`shalekv load --resume` and `--bad-rows`: what is recorded, and where the next load continues."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.cli.commands.load import load
from shalekv.errors import Fenced, InvalidRequest
from tests.kit.serving import dict_state
from tests.kit.serving.dict_server import DictServer, bare, losing, refusing
from tests.unit.cli_client.conftest import Run

FENCED = refusing(Fenced("another took over", own_epoch=1, newer_epoch=2))
ONE_BY_ONE = ["--batch-count", "2", "--in-flight", "1"]


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    """Nine rows with one key each; the first and the last have the same key."""
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"k\tfirst\n" + b"".join(b"k%d\tv\n" % n for n in range(7)) + b"k\tlast\n")
    return path


def state_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def set_keys(server: DictServer) -> list[bytes]:
    """The keys of all writes, in their order."""
    writes = [r for r in server.state.requests if r.DESCRIPTOR.name == "WriteRequest"]
    return [change.put.key for write in writes for change in write.changes]


async def test_a_load_goes_on_where_it_was_certain(
    run: Run, server: DictServer, input_file: Path, tmp_path: Path
) -> None:
    """After a failure only rows that are not stored for certain are sent, then none."""
    args = [str(input_file), "--resume", str(tmp_path / "state"), *ONE_BY_ONE]
    server.state.failures.extend([None, None, None, FENCED])
    assert (await run(load, *args)).exit_code == 4
    state = state_of(tmp_path / "state")
    assert (state["line"], state["rows"], state["complete"]) == (4, 4, False)
    server.state.requests.clear()
    result = await run(load, *args)
    assert result.exit_code == 0, result.output
    assert result.stderr == "continuing after line 4\n"
    assert result.stdout.startswith("loaded 5 rows")
    assert set_keys(server) == [b"k3", b"k4", b"k5", b"k6", b"k"]
    assert server.state.data[b"k"].value == b"last"
    assert state_of(tmp_path / "state")["complete"] is True
    server.state.requests.clear()
    result = await run(load, *args)
    assert (result.exit_code, server.state.requests) == (0, [])
    assert result.stdout.startswith("loaded before: 9 rows")


async def test_a_write_that_arrives_late_changes_nothing(
    run: Run, server: DictServer, input_file: Path, tmp_path: Path
) -> None:
    """A write of the killed load has the idempotency key of the same write of the next load."""
    path = tmp_path / "state"
    args = [str(input_file), "--resume", str(path), *ONE_BY_ONE]
    server.state.failures.extend([None, bare(grpc.StatusCode.UNAVAILABLE), FENCED])
    assert (await run(load, *args)).exit_code == 11  # the outcome is unknown
    late = server.state.requests[1]
    assert (await run(load, *args)).exit_code == 0
    seq = server.state.seq
    server.state.answer(late)  # it was on its way all the time
    assert server.state.data[b"k"].value == b"last"
    assert server.state.seq == seq


async def test_rows_that_depend_on_the_time_can_be_repeated(
    run: Run, server: DictServer, tmp_path: Path
) -> None:
    """Rows whose time to live depends on the clock are sent without an idempotency key."""
    path = tmp_path / "rows.ndjson"
    expire_at_ms = time.time_ns() // 1_000_000 + 3_600_000
    path.write_text(json.dumps({"key": "k", "value": "v", "expire_at_ms": expire_at_ms}))
    args = [str(path), "--resume", str(tmp_path / "state")]
    server.state.failures.extend([None, losing(), FENCED])
    assert (await run(load, *args)).exit_code == 11
    first_ms = server.state.data[b"k"].expire_at_ms  # this server keeps what it was sent
    result = await run(load, *args)
    assert result.exit_code == 0, result.output
    assert 0 < server.state.data[b"k"].expire_at_ms < first_ms


@pytest.mark.parametrize(
    ("change", "flags", "problem"),
    [
        (b"k\tother\n" * 9, [], "size_bytes was 50, and is 72"),
        (b"x" * 50, [], "its input had another beginning"),
        (None, ["--hex"], "encoding was text, and is hex"),
        (None, ["--ttl", "1s"], "ttl_ms was 0, and is 1000"),
        (None, ["--key-column", "1"], "key_column was not given, and is 1"),
        (None, ["--input-format", "csv"], "input_format was tsv, and is csv"),
    ],
)
async def test_a_state_belongs_to_one_input(
    run: Run, input_file: Path, tmp_path: Path, change: bytes | None, flags: list[str], problem: str
) -> None:
    """Another input, or other options for reading it, are refused, and the state is kept."""
    path = tmp_path / "state"
    await run(load, str(input_file), "--resume", str(path))
    before = path.read_bytes()
    if change is not None:
        await asyncio.to_thread(input_file.write_bytes, change)
    result = await run(load, str(input_file), "--resume", str(path), *flags)
    assert result.exit_code == 2
    assert f"{path} belongs to another load: {problem}" in " ".join(result.stderr.split())
    assert path.read_bytes() == before


async def test_a_state_belongs_to_one_database(
    run: Run,
    server: DictServer,
    input_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state of another database is refused."""
    args = [str(input_file), "--resume", str(tmp_path / "state"), *ONE_BY_ONE]
    server.state.failures.extend([None, None, FENCED])
    await run(load, *args)
    before = state_of(tmp_path / "state")
    monkeypatch.setattr(dict_state, "DATABASE_ID", b"x" * 16)
    result = await run(load, *args)
    assert result.exit_code == 2
    assert "belongs to a load into the database" in result.stderr
    assert state_of(tmp_path / "state") == before


async def test_bad_rows_are_collected_once(run: Run, server: DictServer, tmp_path: Path) -> None:
    """A resumed load has the same bad rows in the end as an uninterrupted one."""
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"".join(b"bad%d\nk%d\tv\n" % (n, n) for n in range(9)))
    once, twice = tmp_path / "once", tmp_path / "twice"
    await run(load, str(path), "--bad-rows", str(once))
    args = [str(path), "--resume", str(tmp_path / "state"), "--bad-rows", str(twice)]
    server.state.failures.extend([None, None, None, FENCED])
    assert (await run(load, *args, *ONE_BY_ONE)).exit_code == 4
    with twice.open("ab") as file:
        file.write(b"what a killed load had written and the state did not count" * 99)
    assert (await run(load, *args, *ONE_BY_ONE)).exit_code == 0
    assert twice.read_bytes() == once.read_bytes()
    assert state_of(tmp_path / "state")["bad_rows"] == 9
    state = state_of(tmp_path / "state") | {"complete": False}
    (tmp_path / "state").write_text(json.dumps(state))
    twice.write_bytes(b"cut")
    result = await run(load, *args)
    assert result.exit_code == 2
    assert "--bad-rows" in result.stderr


async def test_bad_rows_are_not_forgotten_without_their_file(
    run: Run, server: DictServer, tmp_path: Path
) -> None:
    """A load resumed without --bad-rows, and then with it, keeps the earlier bad rows."""
    path, bad = tmp_path / "rows.tsv", tmp_path / "bad"
    path.write_bytes(b"bad0\na\t1\nb\t2\nbad1\n")
    args = [str(path), "--resume", str(tmp_path / "state"), *ONE_BY_ONE]
    server.state.failures.extend([None, None, FENCED])
    assert (await run(load, *args, "--bad-rows", str(bad))).exit_code == 4
    without = await run(load, *args)
    assert (without.exit_code, "bad row in" in without.stdout) == (2, False)
    assert (await run(load, *args, "--bad-rows", str(bad))).exit_code == 0
    assert [json.loads(line)["row"] for line in bad.read_text().splitlines()] == ["bad0", "bad1"]


async def test_bad_rows_are_collected(run: Run, server: DictServer, tmp_path: Path) -> None:
    """With --bad-rows a load continues; the file has line, problem and row of each."""
    bad_file = tmp_path / "bad.ndjson"
    server.state.failures.extend([None, refusing(InvalidRequest("changes[1].put.value", "large"))])
    rows = b"a\t1\nno tab\nb\t2\n\xff\tx\ty\nc\t3\n"
    result = await run(load, "--bad-rows", str(bad_file), stdin=rows)
    assert result.exit_code == 0, result.output
    assert f"3 bad rows in {bad_file}" in result.stdout
    assert sorted(server.state.data) == [b"a", b"c"]
    found = [json.loads(line) for line in bad_file.read_text().splitlines()]
    assert [(bad["line"], bad.get("row"), bad.get("row_base64")) for bad in found] == [
        (2, "no tab", None),
        (3, "b", None),
        (4, None, "/wl4CXk="),
    ]
    assert "no TAB" in found[0]["problem"]
    assert "changes[1].put.value" in found[1]["problem"]
