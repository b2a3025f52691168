"""`shalekv compaction simulate`: rows, pictures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.compaction_sweep import COLUMNS, size_bytes
from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.main import shalekv

BRIEF = ("--written", "256MiB")


def run(*arguments: str) -> Result:
    """`shalekv compaction simulate` with these arguments."""
    return CliRunner().invoke(shalekv, ["compaction", "simulate", *arguments])


def test_each_setting_is_a_row_under_each_workload() -> None:
    """As JSON: the defaults first, then each value, for the workloads that are named."""
    result = run(
        "uniform", "timeseries", "--vary", "l0_trigger_count=2,8", *BRIEF, "--format", "json"
    )
    assert result.exit_code == ExitCode.OK, result.output
    found = [json.loads(line) for line in result.output.splitlines()]
    assert [(row["workload"], row["setting"]) for row in found] == [
        (workload, setting)
        for workload in ("uniform", "timeseries")
        for setting in ("defaults", "l0_trigger_count=2", "l0_trigger_count=8")
    ]
    for row in found:
        assert tuple(row) == COLUMNS
        assert row["write_amp"] > 1
        assert row["space_amp"] >= 1
        assert row["requests_usd"] > 0


def test_a_table_names_its_columns() -> None:
    """For people: the names of --help stand above the figures."""
    result = run("overwrite", "--vary", "none", *BRIEF, "--format", "table")
    assert result.output.split("\n")[0].split() == list(COLUMNS)
    assert result.output.count("\n") == 2


def test_how_it_went_on_is_told_over_time() -> None:
    """With --over-time each row is a moment; time goes on."""
    result = run("uniform", "--vary", "none", "--over-time", *BRIEF, "--format", "json")
    seconds = [json.loads(line)["elapsed_s"] for line in result.output.splitlines()]
    assert len(seconds) > 3
    assert seconds == sorted(seconds)


def test_the_picture_has_a_dot_for_each_row(tmp_path: Path) -> None:
    """The SVG is well formed, and shows every simulation."""
    file = tmp_path / "trade-offs.svg"
    result = run(
        "uniform", "overwrite", "--vary", "sst_bytes=32MiB", *BRIEF, "--picture", str(file)
    )
    assert result.exit_code == ExitCode.OK, result.output
    dots = ET.parse(file).iter("{http://www.w3.org/2000/svg}circle")  # noqa: S314 - ours
    assert len([*dots]) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("--vary", "sst_bytes"),
        ("--vary", "colour=1"),
        ("--vary", "sst_bytes=64"),
        ("--vary", "l0_trigger_count=0"),
        ("--vary", "l0_trigger_count=many"),
        ("--written", "2"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(arguments: tuple[str, ...]) -> None:
    """A workload, a setting or a size that does not exist ends it with the code of usage."""
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "Error: " in result.output


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """With the exit code of output that cannot be written."""
    file = tmp_path / "missing" / "picture.svg"
    result = run("uniform", "--vary", "none", *BRIEF, "--picture", str(file))
    assert result.exit_code == ExitCode.OUTPUT


def test_sizes_have_units() -> None:
    """Of 1024, by their names."""
    assert size_bytes("512B") == 512
    assert size_bytes("3MiB") == 3 * 1024 * 1024
