"""What commands say of keys that they count, delete, or take for counters."""

from __future__ import annotations

import grpc
import pytest

from shalekv.cli.commands.count import count
from shalekv.cli.commands.delete import delete, deleted_text
from shalekv.cli.commands.get import counter_of
from shalekv.cli.console.units import ttl_ms
from shalekv.errors import PermissionDenied
from shalekv_client import Commit, Value
from tests.kit.serving.dict_server import DictServer, bare, refusing
from tests.unit.cli_client.conftest import Run

DELETED = "seq 1\n"


async def test_who_may_not_read_may_still_delete(run: Run, server: DictServer) -> None:
    """A delete that may not be counted is done all the same, and says so."""
    denied = refusing(PermissionDenied("not allowed", verb="read"))
    server.state.failures.append(denied)
    result = await run(delete, "--prefix", "k")
    assert (result.exit_code, result.stdout) == (0, DELETED)
    assert "not counted: you may not read the keys" in result.stderr
    assert [request.count_deleted for request in server.state.requests] == [True, False]
    server.state.failures.append(denied)
    assert (await run(delete, "k", "--no-count")).exit_code == 14
    server.state.failures.append(refusing(PermissionDenied("not allowed", verb="write")))
    assert (await run(delete, "k")).exit_code == 14


async def test_an_older_server_deletes_without_counting(run: Run) -> None:
    """A reply without a number is a success, and the reason is told."""
    result = await run(delete, "--prefix", "k")
    assert (result.exit_code, result.stdout) == (0, DELETED)
    assert result.stderr == "not counted: the server is older than this client\n"


async def test_an_older_server_does_not_count(run: Run, server: DictServer) -> None:
    """A count at a server that has no counts is an error in plain words."""
    server.state.failures.append(bare(grpc.StatusCode.UNIMPLEMENTED))
    result = await run(count)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "does not know the call Count: it may be older than this client" in result.stderr


@pytest.mark.parametrize(
    ("deleted", "more", "key", "words"),
    [
        (0, False, "k", "not found: k"),
        (1, False, "k", "deleted 1 key"),
        (0, False, None, "deleted 0 keys"),
        (10_000, True, None, "deleted at least 10,000 keys"),
    ],
)
def test_deletes_say_what_they_found(
    *, deleted: int, more: bool, key: str | None, words: str
) -> None:
    """The number is that of keys that had a value, or a bound of it."""
    commit = Commit(1, None, 1, None, deleted=deleted, deleted_more=more)
    assert deleted_text(commit, key, "") == words


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (bytes(8), 0),
        ((-1).to_bytes(8, "little", signed=True), -1),
        (b"\n" + bytes(7), 10),
        (b"8 bytes!", None),
        (b"a\tb\r\ncde", None),
        ("\N{SNOWMAN}12345".encode(), None),
        (b"", None),
        (bytes(9), None),
    ],
)
def test_counters_are_told_from_texts(value: bytes, number: int | None) -> None:
    """A value of 8 bytes is a number unless it is a text."""
    assert counter_of(Value(value, 1, None)) == number


def test_a_time_to_live_may_be_endless() -> None:
    """`never` is a time to live, and no time at all is not."""
    assert (ttl_ms("never"), ttl_ms("2m")) == (0, 120_000)
    with pytest.raises(ValueError, match="'0s'"):
        ttl_ms("0s")
