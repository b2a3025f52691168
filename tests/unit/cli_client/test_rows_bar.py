"""The bar that counts rows, where somebody looks."""

from __future__ import annotations

import sys

import pytest

from shalekv.cli.rows_bar import rows_bar
from shalekv.cli.rows_told import RowsTold, telling


def test_the_bar_tells_rows_bytes_and_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it counts; `telling` draws it only there, and for files."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = RowsTold(rows=1_234, bytes=5 << 20)
    with rows_bar(told):
        pass
    drawn = capsys.readouterr().err
    assert "1,234 rows, 5.0 MiB, " in drawn
    assert "rows/s" in drawn
    with telling(told, to_file=True):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with telling(told, to_file=True):
        pass
    assert "1,234 rows" in capsys.readouterr().err
