"""Logs and results of the library in a program: logs go where the program sends them, not
to stdout.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shalekv.errors import InvalidSetting
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.loading.load import LoadResult
from shalekv_spark.place import Place, route_logs

OWN = "shalekv.jobs.compact.claim"


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    """Reset structlog, as in a program that does not configure it."""
    config = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if config is not None:
        structlog.configure(**config)


def warn(module: str) -> None:
    code = "structlog.get_logger().warning('lease not renewed', error='100% broken')"
    exec(code, {"structlog": structlog, "__name__": module})  # noqa: S102 - as if it stood there


async def test_warnings_are_those_of_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings go to `logging` by the names of modules, at their level, and not to stdout."""
    async with Place(f"file://{tmp_path}").open():
        warn(OWN)
    assert capsys.readouterr().out == ""
    (record,) = caplog.records
    assert (record.name, record.levelno) == (OWN, logging.WARNING)
    assert record.getMessage() == "lease not renewed: error='100% broken'"


@pytest.mark.parametrize("is_before", [True, False])
def test_who_has_configured_structlog_is_obeyed(
    caplog: pytest.LogCaptureFixture, *, is_before: bool
) -> None:
    """A configuration of structlog is respected, made before the first store is opened or
    after it.
    """
    found = io.StringIO()
    if not is_before:
        route_logs()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(found))
    if is_before:
        route_logs()
    warn(OWN)
    assert "lease not renewed" in found.getvalue()
    assert not caplog.records


def test_results_count_in_words() -> None:
    """The text of a result has the right plurals."""
    result = LoadResult("x", 7, rows=1, deletes=1, files=1, size_bytes=2_000)
    assert str(result) == (
        "load 'x' is committed as 7: 1 row, 1 delete among them, in 1 file of 2,000 bytes"
    )
    result = LoadResult("x", 7, rows=1_000, deletes=0, files=2, size_bytes=2_000)
    assert str(result) == (
        "load 'x' is committed as 7: 1,000 rows, 0 deletes among them, in 2 files of 2,000 bytes"
    )


def test_a_store_that_cannot_be_opened_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of opening a store is raised, also when its loop has ended before the wait
    for it.
    """

    def fail(_: Place) -> None:
        raise InvalidSetting("no such store")

    monkeypatch.setattr(Place, "open", fail)
    loop = StoreLoop(Place(f"file://{tmp_path}"))
    thread = loop._thread  # noqa: SLF001 - what else is late by chance
    start = thread.start

    def start_and_end() -> None:
        start()
        thread.join()

    monkeypatch.setattr(thread, "start", start_and_end)
    with pytest.raises(InvalidSetting, match="no such store"), loop:
        pass
