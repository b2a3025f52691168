"""Tables, records and JSON; failing output, the bar that counts rows, and shell completion."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import (
    ELLIPSIS,
    Format,
    RowsWritten,
    TablePrinter,
    print_rows,
    rows_progress,
)
from shalekv.cli.console.progress import rows_bar
from shalekv.cli.console.units import cell_format, headings
from shalekv.cli.main import COMMANDS, shalekv


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_output_that_fails_ends_with_its_exit_code(tmp_path: Path, count: int) -> None:
    """Failing output is reported in one line, for a write and for the final flush."""
    script = (
        "from shalekv.cli.console.output import print_line, printing\n"
        f"with printing():\n    print_line('x' * {count})"
    )
    file = tmp_path / "output"
    file.touch()
    with file.open("rb") as only_to_be_read:
        run = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            stdout=only_to_be_read,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == ExitCode.OUTPUT
    why = os.strerror(errno.EBADF)
    assert run.stderr.splitlines() == [f"Error: standard output cannot be written: {why}"]


def test_the_bar_shows_rows_bytes_and_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar counts rows and bytes; `rows_progress` shows it only on a terminal, for files."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    reported = RowsWritten(rows=1_234, bytes=5 << 20)
    with rows_bar(reported):
        pass
    drawn = capsys.readouterr().err
    assert "1,234 rows, 5.0 MiB, " in drawn
    assert "rows/s" in drawn
    with rows_progress(reported, to_file=True):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with rows_progress(reported, to_file=True):
        pass
    assert "1,234 rows" in capsys.readouterr().err


ONLY_FOR_COMMANDS = ("grpc", "pydantic", "shalekv_client")


def asked(words: str, number: int) -> list[str]:
    """The completions in bash for word `number` of `words`, and the imported modules."""
    script = (
        "import sys\nfrom shalekv.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(number)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"_SHALEKV_COMPLETE": "bash_complete"} | typed,
    )
    offered = [line.partition(",")[2] for line in run.stdout.splitlines()]
    return [*offered, *(m for m in run.stderr.split() if m in ONLY_FOR_COMMANDS)]


def test_commands_are_completed_without_importing_them() -> None:
    """All commands with the typed prefix are offered, without importing them."""
    assert asked("shalekv ", 1) == list(COMMANDS)
    assert asked("shalekv sc", 1) == ["scan"]
    assert asked("shalekv --ver", 1) == ["--version"]


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


NAMES = ("id", "address", "made_at_ms", "size_bytes", "age_ms")
NOON_MS = 1_798_200_000_000  # 2026-12-25 12:00:00Z
ROW = ("0198c0de-0000-7000-8000-00000000ab01", "10.0.0.5:7654", NOON_MS, 3 << 20, 34_000)


def printed(monkeypatch: pytest.MonkeyPatch, columns: int, write: Callable[[], None]) -> list[str]:
    """The lines that are written to a terminal of this width, without colours."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        write()
    return re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()


def test_rows_that_are_too_wide_become_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table that fits has one line, otherwise each value has one; nothing is cut."""

    def write() -> None:
        print_rows(Format.TABLE, NAMES, [ROW, ROW])

    assert printed(monkeypatch, 200, write)[:2] == [
        "id                                    address        made                     size   age",
        "0198c0de-0000-7000-8000-00000000ab01  10.0.0.5:7654  2026-12-25 12:00:00Z  3.0 MiB  34 s",
    ]
    record = [
        "id       0198c0de-0000-7000-8000-00000000ab01",
        "address  10.0.0.5:7654",
        "made     2026-12-25 12:00:00Z",
        "size     3.0 MiB",
        "age      34 s",
    ]
    assert printed(monkeypatch, 80, write) == [*record, "", *record]
    assert printed(monkeypatch, 20, write) == [*record, "", *record]
    empty = printed(monkeypatch, 20, lambda: print_rows(Format.TABLE, NAMES, []))
    assert [line.split() for line in empty] == [["id", "address", "made", "size", "age"]]


def test_a_table_goes_on_with_records_where_a_later_page_is_wider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that were printed stay; from the page on that is too wide, rows are records."""

    def write() -> None:
        table = TablePrinter(("key", "seq"))
        table.print([("a", 1)])
        table.print([("b" * 40, 2)])
        table.print([("c", 3)])
        table.finish()

    wide = ["", f"key  {'b' * 40}", "seq  2", "", "key  c", "seq  3"]
    assert printed(monkeypatch, 30, write) == ["key  seq", "a      1", *wide]


@pytest.mark.parametrize(("columns", "first"), [(80, "key "), (20, f"key    {'k' * 30}")])
def test_only_a_column_that_may_be_cut_is(
    monkeypatch: pytest.MonkeyPatch, columns: int, first: str
) -> None:
    """A long value is cut to the terminal, and that is known; keys are never cut."""
    tables = []

    def write() -> None:
        table = TablePrinter(("key", "value", "seq"), may_cut="value")
        table.print([("k" * 30, "v" * 200, 7), ("k", "short", 8)])
        tables.append(table)

    lines = printed(monkeypatch, columns, write)
    assert max(len(line) for line in lines if "v" in line) == columns
    assert sum("k" * 30 in line for line in lines) == 1
    assert sum(line.count(ELLIPSIS) for line in lines) == 1
    assert lines[0].startswith(first)
    assert tables[0].has_cut


def test_a_pipe_gets_headings_and_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a table has its headings, and rows of any width."""
    print_rows(Format.TABLE, ("key", "value"), [("k", "v" * 300)])
    assert capsys.readouterr().out == f"key  value\nk    {'v' * 300}\n"
    print_rows(Format.TABLE, ("key", "value"), [])
    assert capsys.readouterr().out == "key  value\n"


@pytest.mark.parametrize(
    ("name", "value", "heading", "cell"),
    [
        ("size_bytes", 9_999, "size", "9999 B"),
        ("size_bytes", 1_900_000, "size", "1.8 MiB"),
        ("bytes", 0, "size", "0 B"),
        ("queued_bytes_max", 1 << 30, "queued_max", "1.0 GiB"),
        ("expire_at_ms", NOON_MS, "expires", "2026-12-25 12:00:00Z"),
        ("expire_time_s", NOON_MS // 1_000, "expires", "2026-12-25 12:00:00Z"),
        ("expires_at_ms", None, "expires", "never"),
        ("expire_time_s", 0, "expires", "never"),
        ("made_at_ms", None, "made", "-"),
        ("p50_ms", 1.24, "p50", "1.2 ms"),
        ("p50_us", 250.0, "p50", "250 us"),
        ("uptime_ms", 34_000, "uptime", "34 s"),
        ("stalled_s", 0, "stalled", "0 s"),
        ("age_ms", 600_000, "age", "10 min"),
        ("age_s", 20_000, "age", "5.6 h"),
        ("age_s", 864_000, "age", "10 d"),
        ("calls_per_s", 1_500, "calls_per_s", "1500"),
        ("seq", 1_795_411_237, "seq", "1795411237"),
        ("is_fence", True, "is_fence", "yes"),
        ("usd", 0.001_25, "usd", "0.0013"),
        ("writer.open_ms", 5, "writer.open", "5 ms"),
        ("memtable.bytes", 5, "memtable.size", "5 B"),
        ("problem", "full", "problem", "full"),
    ],
)
def test_cells_are_printed_by_the_unit_of_their_name(
    name: str, value: object, heading: str, cell: str
) -> None:
    """Sizes, times and durations have their units; ids and counts have all digits and no commas."""
    assert headings([name]) == [heading]
    assert cell_format(name)(value) == cell


def test_headings_differ() -> None:
    """A heading keeps its unit where another column would have the same."""
    assert headings(("read", "read_bytes", "age_ms")) == ["read", "read_bytes", "age"]


def test_a_record_is_one_line_of_json_unless_it_is_pretty(tmp_path: Path) -> None:
    """Rows and nested records are one line each; --pretty indents, and needs JSON."""
    file = tmp_path / "tokens"
    runner = CliRunner()

    def run(*words: str) -> Result:
        return runner.invoke(shalekv, ["token", *words, "--file", str(file)])

    made = run("create", "ann", "--format", "json")
    assert json.loads(made.stdout).keys() == {
        "token",
        "id",
        "name",
        "created_at_ms",
        "expires_at_ms",
    }
    listed = run("list", "--format", "json")
    assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == ["ann"]
    pretty = run("list", "--pretty", "--format", "json")
    assert pretty.stdout.startswith('{\n  "id": ')
    assert json.loads(pretty.stdout) == json.loads(listed.stdout)
    for words in (("list", "--pretty"), ("list", "--pretty", "--format", "raw")):
        refused = run(*words)
        assert refused.exit_code == ExitCode.USAGE
        assert "--pretty indents JSON: give --format json, too" in refused.stderr


# Commands without --format: what they print is no result, or has a form of its own.
WITHOUT_FORMAT = {
    **dict.fromkeys(("serve", "reader", "safekeeper", "compactor"), "logs, see --log-format"),
    **dict.fromkeys(("access enforce", "access open"), "a sentence on stderr"),
    **dict.fromkeys(
        ("role set", "role remove", "grant set", "grant remove"), "a sentence on stderr"
    ),
    **dict.fromkeys(("tls init", "tls revoke"), "files"),
    "completion": "a script",
    "admin profile": "a profile, see --output-format",
    "dump": "rows, see --output-format",
    "shell": "a prompt",
    "top": "a picture of `status`",
}


def test_every_command_with_output_has_formats() -> None:
    """Each command has --format and --pretty, or a reason why not."""
    found = {" ".join(name): options for name, options in commands(shalekv)}
    without = {name for name, options in found.items() if "--format" not in options}
    assert without == WITHOUT_FORMAT.keys()
    assert all(("--format" in each) == ("--pretty" in each) for each in found.values())


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """The names of all commands that can be run, and their options."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield (*path, name), {option for each in command.params for option in each.opts}
