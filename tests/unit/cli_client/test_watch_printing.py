"""Printing of the commits of a watch, from events alone."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from shalekv.cli.commands.watch import EventPrinter
from shalekv.cli.console.keys import Encoding
from shalekv.cli.console.output import Format
from shalekv_client import ChangeKind, Entry, WatchChange, WatchCommit, WatchEvent, WatchProgress
from tests.unit.client.watch_server import History, WatchServer

BEFORE = Entry(b"k", b"old", 3, 99)
COMMIT = WatchCommit(
    7,
    5,
    (
        WatchChange(ChangeKind.DELETE_RANGE, b"a", end=b"b"),
        WatchChange(ChangeKind.PUT, b"k\t", b"new", 1_000, previous=BEFORE),
        WatchChange(ChangeKind.DELETE, b"l", previous_unknown=True),
        WatchChange(ChangeKind.EXPIRED, b"m", expire_at_ms=500),
        WatchChange(None, b"n"),
    ),
)


def printed(
    capsys: pytest.CaptureFixture[str],
    *events: WatchEvent,
    output_format: Format = Format.RAW,
    encoding: Encoding = Encoding.TEXT,
    has_previous: bool = False,
    shows_progress: bool = False,
) -> list[str]:
    printer = EventPrinter(
        encoding, output_format, has_previous=has_previous, shows_progress=shows_progress
    )
    for event in events:
        printer.print(event)
    return capsys.readouterr().out.splitlines()


def test_raw_is_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A line has number, kind, key, and value or end; unprintable characters are escaped."""
    assert printed(capsys, COMMIT) == [
        "7\tdelete_range\ta\tb",
        "7\tput\tk\\t\tnew",
        "7\tdelete\tl\t",
        "7\texpired\tm\t",
        "7\tunknown\tn\t",
    ]


def test_raw_has_the_value_before_when_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The previous value is empty if there was none, and ? if it is unknown."""
    lines = printed(capsys, COMMIT, has_previous=True)
    assert [line.split("\t")[-1] for line in lines] == ["", "old", "?", "", ""]


def test_json_is_one_object_for_each_commit(capsys: pytest.CaptureFixture[str]) -> None:
    """An object has exactly the members of its kinds of changes."""
    (line,) = printed(capsys, COMMIT, output_format=Format.JSON, has_previous=True)
    assert json.loads(line) == {
        "seq": 7,
        "wal_id": 5,
        "changes": [
            {"kind": "delete_range", "key": "a", "end": "b"},
            {
                "kind": "put",
                "key": "k\t",
                "value": "new",
                "expire_at_ms": 1_000,
                "previous": {"value": "old", "seq": 3, "expire_at_ms": 99},
            },
            {"kind": "delete", "key": "l", "previous_unknown": True},
            {"kind": "expired", "key": "m", "expire_at_ms": 500, "previous": None},
            {"kind": "unknown", "key": "n", "previous": None},
        ],
    }


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        (Format.RAW, ["7\tprogress\t\t"]),
        (Format.JSON, ['{"progress_seq": 7}']),
        (Format.TABLE, ["seq  change    key  value", "  7  progress"]),
    ],
)
def test_progress_is_printed_when_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], output_format: Format, expected: list[str]
) -> None:
    """Progress is printed only if it was requested."""
    event = WatchProgress(7)
    found = printed(capsys, event, output_format=output_format, shows_progress=True)
    assert [line.rstrip(" ") for line in found] == expected
    assert printed(capsys, event, output_format=output_format) == []


async def test_a_watch_beyond_the_newest_commit_says_what_it_waits_for() -> None:
    """What nobody has written yet is waited for, and stderr says so at once."""
    history = History()
    await history.put(b"k")
    async with WatchServer(history) as server:
        watch = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shalekv.cli.main", "watch", "--from-seq", "3", "--limit", "1"),
            *("--format", "raw", "--addr", server.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert watch.stderr is not None
        said = await watch.stderr.readline()
        await history.put(b"k", value=b"second")
        await history.put(b"k", value=b"third")
        printed, _ = await watch.communicate()
    assert said.endswith(b": waiting for seq 3.\n")  # this server reports no newest commit
    assert (watch.returncode, printed) == (0, b"3\tput\tk\tthird\n")
