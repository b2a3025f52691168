"""`shalekv get`, `put` and `delete`: what they send, print, and how they end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import grpc
import pytest

from shalekv.cli.delete import delete
from shalekv.cli.get import get
from shalekv.cli.put import put
from shalekv.errors import Fenced, QueueFull
from shalekv_client import Durability, ReadLevel
from tests.kit.serving.dict_server import DictServer, Failure, bare, refusing, silent
from tests.unit.cli_client.conftest import Run

UNAVAILABLE, UNIMPLEMENTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED


async def test_put_get_delete(run: Run) -> None:
    """A value is put, printed, deleted, and then not found: message on stderr, exit code 1."""
    assert (await run(put, "greeting", "hello")).stdout == "seq 1\n"
    assert (await run(get, "greeting")).stdout == "hello\n"
    assert (await run(delete, "greeting")).stdout == "seq 2\n"
    missing = await run(get, "greeting")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert missing.stderr == "not found: greeting\n"


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--hex", "00ff", "0102"),
        ("--base64", "AP8=", "AQI="),
        ("--escaped", r"\x00\xff", r"\x01\x02"),
    ],
)
async def test_binary_keys_and_values(
    run: Run, server: DictServer, flag: str, key: str, value: str
) -> None:
    """One flag decides how key and value are spelled, going in and coming out."""
    assert (await run(put, flag, key, value)).exit_code == 0
    assert server.state.data[b"\x00\xff"].value == b"\x01\x02"
    assert (await run(get, flag, key)).stdout == value + "\n"
    assert (await run(delete, flag, key)).exit_code == 0
    assert (await run(get, flag, key)).stderr == f"not found: {key}\n"


async def test_values_from_a_file_and_from_stdin(
    run: Run, server: DictServer, tmp_path: Path
) -> None:
    """--value-file and - take every byte as it is, also when the key is in hex."""
    content = b"\x00\xff\n\\x41"
    file = tmp_path / "value"
    file.write_bytes(content)
    await run(put, "a", "--value-file", str(file))
    await run(put, "--hex", "62", "-", stdin=content)
    assert [server.state.data[key].value for key in (b"a", b"b")] == [content, content]
    assert (await run(get, "a", "--format", "raw")).stdout_bytes == content


@pytest.mark.parametrize("args", [["k"], ["k", "v", "--value-file", "-"]])
async def test_a_value_comes_from_one_place(run: Run, args: list[str]) -> None:
    """No value, and two of them, are refused."""
    result = await run(put, *args)
    assert result.exit_code == 2
    assert "one of them" in result.stderr


async def test_text_on_a_terminal_is_tame(run: Run) -> None:
    """Lines stay lines, and control sequences are escaped."""
    await run(put, "k", "-", stdin=b"a\tb\nc\x1b[2J")
    assert (await run(get, "k")).stdout == "a\tb\nc\\x1b[2J\n"


async def test_json_has_it_all(run: Run) -> None:
    """--format json tells key, value, sequence number and expiry; names tell the encoding."""
    await run(put, "k", "v")
    found = json.loads((await run(get, "k", "--format", "json")).stdout)
    assert found == {"key": "k", "value": "v", "seq": 1, "expire_at_ms": None}
    found = json.loads((await run(get, "--hex", "6b", "--format", "json")).stdout)
    assert found == {"key_hex": "6b", "value_hex": "76", "seq": 1, "expire_at_ms": None}


async def test_table_has_it_all(run: Run) -> None:
    """--format table has the same as a row."""
    await run(put, "k", "v")
    assert (await run(get, "k", "--format", "table")).stdout.splitlines() == [
        "key  value  seq  expire_at_ms",
        "k    v        1             -",
    ]


async def test_levels_are_sent(run: Run, server: DictServer) -> None:
    """--durability and --read-level reach the server."""
    await run(put, "k", "v", "--durability", "memory")
    await run(delete, "k", "--durability", "archived")
    await run(get, "k", "--read-level", "linearizable")
    first, second, third = server.state.requests
    assert Durability(first.durability) is Durability.MEMORY
    assert Durability(second.durability) is Durability.ARCHIVED
    assert ReadLevel(third.header.read_level) is ReadLevel.LINEARIZABLE


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (refusing(Fenced("another took over", own_epoch=1, newer_epoch=2)), 4, "another took over"),
        (bare(UNIMPLEMENTED, "nobody knows Put"), 2, "nobody knows Put"),
        (refusing(QueueFull("full", retry_after_ms=60_000)), 10, "Nothing was changed"),
        (bare(UNAVAILABLE, "gone"), 11, "is not known"),
    ],
    ids=["fenced", "absent", "full", "unknown"],
)
async def test_failures_tell_what_is_certain(
    run: Run, server: DictServer, how: Failure, code: int, words: str
) -> None:
    """The exit code and the last line say whether the write may have been applied."""
    server.state.failures.extend([how] * 10)
    result = await run(put, "k", "v")
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stdout == ""


async def test_timeouts_are_kept(run: Run, server: DictServer) -> None:
    """--timeout-ms ends the wait for a server that does not answer."""
    server.state.failures.append(silent())
    result = await run(get, "k", "--timeout-ms", "50")
    assert result.exit_code == 11


async def test_interrupts_have_an_exit_code(server: DictServer) -> None:
    """Ctrl-C ends a command that waits for an answer, with code 130 and without a traceback."""
    server.state.failures.append(silent())
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shalekv.cli.main", "get", "k", "--addr", server.address),
        stderr=asyncio.subprocess.PIPE,
    )
    await server.state.begun.wait()
    command.send_signal(signal.SIGINT)
    _, said = await command.communicate()
    assert (command.returncode, said) == (130, b"Interrupted.\n")


async def test_no_server_is_said_plainly(run: Run, server: DictServer) -> None:
    """Without a server the message names the address and what to do, and the exit code is 9."""
    await server.stop()
    result = await run(get, "k")
    assert result.exit_code == 9
    assert f"{server.address}: no connection to the server" in result.stderr
    assert "--addr" in result.stderr


@pytest.mark.parametrize("address", ["7654", "localhost", "http://localhost:7654"])
async def test_bad_addresses_are_refused(run: Run, address: str) -> None:
    """--addr is HOST:PORT, and anything else a usage error."""
    result = await run(get, "k", "--addr", address)
    assert result.exit_code == 2
    assert "HOST:PORT" in result.stderr


@pytest.mark.parametrize("args", [["--hex", "xyz"], ["--escaped", r"\q"], ["--base64", "!"]])
async def test_misspelt_keys_are_refused(run: Run, server: DictServer, args: list[str]) -> None:
    """A key that is not what its flag says is a usage error, and nothing is sent."""
    result = await run(get, *args)
    assert result.exit_code == 2
    assert "KEY" in result.stderr
    assert server.state.requests == []
