"""The generated pages of server/docs, and exit codes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from click.testing import CliRunner

from shalekv import errors
from shalekv.cli.commands.serve import serve
from shalekv.cli.console.exit_codes import MEANING, ExitCode, exit_code_of, exit_codes_text
from shalekv.cli.console.settings_flags import settings_of
from shalekv.cli.reference import PAGES, write_pages
from shalekv.rpc.status import TABLE
from shalekv.settings import WriterConfig

DOCS = Path(__file__).parents[3] / "server" / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    """Each page equals the output of `python -m shalekv.cli.reference`."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name]()


def test_the_command_writes_every_page(tmp_path: Path) -> None:
    """The command writes all pages into the given folder."""
    result = CliRunner().invoke(write_pages, [str(tmp_path / "docs")])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "docs").iterdir()} == set(PAGES)


def test_pages_are_complete() -> None:
    """The pages have every setting with all of its names, and every reason of errors."""
    settings, errors = PAGES["settings.md"](), PAGES["errors.md"]()
    for setting in settings_of(WriterConfig):
        for name in (setting.flag, setting.variable, setting.toml_key):
            assert f"`{name}" in settings
    for kind in TABLE:
        assert f"| `{kind.reason}` |" in errors


def test_secrets_are_marked() -> None:
    """The reference and --help warn against giving a secret as a flag."""
    secrets = [setting for setting in settings_of(WriterConfig) if setting.is_secret]
    assert [setting.toml_key for setting in secrets] == ["store.records_url"]
    _, entry = PAGES["settings.md"]().split("\n### records_url\n")
    assert "| secret | " in entry.split("\n### ")[0]
    text = " ".join(CliRunner().invoke(serve, ["--help"]).stdout.split())
    assert "a secret: not as a flag, which `ps` shows; SHALEKV_STORE__RECORDS_URL" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DatabaseNotFound("none"), 3),
        (errors.Fenced("taken over", own_epoch=1, newer_epoch=2), 4),
        (errors.Stopping("before all was durable"), 6),
        (errors.IllegalState("impossible"), 5),
        (errors.BadChecksum("wal/1", 0, "differs"), 5),
        (errors.UnsupportedVersion("manifest/1", 8, "version 2"), 5),
        (errors.ObjectNotFound("file:///db", "get", "wal/1", "gone"), 5),
        (errors.StoreBroken("file:///db", "create", "wal/1", "fsync failed"), 6),
        (errors.StoreUnavailable("file:///db", "list", "wal/", "no answer"), 6),
        (errors.InvalidUrl("s4://"), 2),
        (errors.InvalidSetting("--listen"), 2),
        (errors.ManifestVersionExists("manifest 7"), 8),
        (errors.ManifestConflict("manifest 7"), 8),
        (OSError(errno.EADDRINUSE, "in use"), 7),
        (OSError(errno.ENOSPC, "no space"), 1),
        (ZeroDivisionError(), 1),
        (ExceptionGroup("tasks", [errors.IllegalState("impossible")]), 5),
        (ExceptionGroup("tasks", [errors.IllegalState("impossible"), ZeroDivisionError()]), 1),
    ],
)
def test_errors_have_their_exit_codes(error: BaseException, code: int) -> None:
    """Each error has its documented exit code; the numbers do not change."""
    assert exit_code_of(error) == code


def test_every_code_is_documented() -> None:
    """The table in --help has every exit code."""
    assert set(MEANING) == set(ExitCode)
    for code in ExitCode:
        assert f" {code.value}  " in exit_codes_text()
