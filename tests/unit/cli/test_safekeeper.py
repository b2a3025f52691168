"""`shalekv safekeeper`: its flags, and the commands below it."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from shalekv.cli.main import shalekv
from shalekv.cli.safekeeper import MEMBERS

URL = ("--url", "file:///tmp/databases")
DATA = ("--data", "/tmp/data")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SHALEKV_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (URL, "--data is missing"),
        (DATA, "--url"),
        ((*DATA, "--url", "nowhere"), "nowhere"),
        ((*DATA, "--url", "memory://trial"), "memory"),
        ((*DATA, *URL, "--listen", "0.0.0.0:0"), "--insecure"),
        ((*DATA, *URL, "--segment-bytes", "7"), "--segment-bytes"),
        ((*DATA, *URL, "nonsense"), "nonsense"),
        ((*DATA, *URL, "--nonsense"), "--nonsense"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], problem: str) -> None:
    """What is missing or wrong is named, and nothing is done."""
    result = CliRunner().invoke(shalekv, ["safekeeper", *flags])
    assert result.exit_code == 2, result.output
    assert problem in result.output


@pytest.mark.parametrize("name", MEMBERS)
def test_commands_below(name: str) -> None:
    """Each command about safekeepers has a help of its own, and needs no flag of a node."""
    result = CliRunner().invoke(shalekv, ["safekeeper", name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Exit codes" in result.output


def test_help_lists_settings_and_commands() -> None:
    """The help names the settings of a node, and the commands."""
    output = CliRunner().invoke(shalekv, ["safekeeper", "--help"]).output
    for name in ("--data", "--unarchived-bytes-max", "--archive-unasked-ms", *MEMBERS):
        assert name in output
