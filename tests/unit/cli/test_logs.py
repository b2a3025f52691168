"""Log lines, of ours and of libraries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from shalekv.cli.logs import configure_logs
from shalekv.settings import LogFormat, LogLevel

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


def _fail(secret: str) -> None:
    raise ValueError(f"no {len(secret)}")


def test_json_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    """With timestamp, level and event first, whoever wrote them, tracebacks inside."""
    configure_logs(LogFormat.JSON, LogLevel.INFO)
    structlog.get_logger("shalekv").info("serving", listen="127.0.0.1:1")
    structlog.get_logger("shalekv").debug("not shown")
    logging.getLogger("some.library").warning("careful with %s", "it")
    try:
        _fail(secret=SECRET)
    except ValueError:
        structlog.get_logger("shalekv").exception("failed")
    written = capsys.readouterr()
    lines = [json.loads(line) for line in written.err.splitlines()]
    assert [list(line)[:3] for line in lines] == [["timestamp", "level", "event"]] * 3
    assert [(line["level"], line["event"]) for line in lines] == [
        ("info", "serving"),
        ("warning", "careful with it"),
        ("error", "failed"),
    ]
    assert lines[0]["listen"] == "127.0.0.1:1"
    assert "ValueError: no 7" in lines[2]["exception"]
    assert SECRET not in written.err
    assert written.out == ""


def test_lines_name_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of libraries as well: processes of several roles share their stderr."""
    configure_logs(LogFormat.JSON, LogLevel.INFO, role="compactor")
    structlog.get_logger("shalekv").info("compacting")
    logging.getLogger("some.library").warning("careful")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["role"] for line in lines] == ["compactor", "compactor"]
