"""Exit codes."""

from __future__ import annotations

import errno

import pytest

from shalekv import errors
from shalekv.cli.exit_codes import MEANING, ExitCode, exit_code_of, exit_codes_text


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
def test_the_code_says_what_happened(error: BaseException, code: int) -> None:
    """The numbers are documented, and don't change."""
    assert exit_code_of(error) == code


def test_every_code_is_documented() -> None:
    """In the table that --help shows."""
    assert set(MEANING) == set(ExitCode)
    for code in ExitCode:
        assert f" {code.value}  " in exit_codes_text()
