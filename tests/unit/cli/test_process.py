"""Parts of every process: log lines, garbage collection, and stop signals."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from shalekv.cli.process import gc_tuning
from shalekv.cli.process.gc_tuning import (
    Growth,
    collect_when_grown,
    freeze_on_standby,
    tune_garbage_collector,
)
from shalekv.cli.process.lifecycle import serving_settings
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.reader import read_database
from shalekv.cli.process.shutdown import StopRequest
from shalekv.cli.process.writer import serve_database
from shalekv.clock import LoopClock
from shalekv.errors import DatabaseNotFound, InvalidSetting
from shalekv.settings import LogFormat, LogLevel, ReaderConfig, WriterConfig
from tests.kit.virtual_time import virtual_time

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)


def _fail(secret: str) -> None:
    raise ValueError(f"no {len(secret)}")


def test_a_logger_does_not_outlive_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """One that was used under a command's configuration follows the next one."""
    log = structlog.get_logger("shalekv")
    configure_logs(LogFormat.JSON, LogLevel.INFO)
    log.info("first")
    structlog.reset_defaults()
    with capture_logs() as lines:
        log.info("second")
    assert [line["event"] for line in lines] == ["second"]
    assert "second" not in capsys.readouterr().err


def test_json_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of all loggers begin with timestamp, level and event, and include tracebacks."""
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


def test_texts_of_clients_make_no_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a line nor a terminal ends where a text in a log line wants it to."""
    configure_logs(LogFormat.CONSOLE, LogLevel.INFO)
    structlog.get_logger("shalekv").info("serving", name="a\n2026 [info] forged", other="\x1b[2J\r")
    logging.getLogger("some.library").warning("refused %s", "a\nforged\u2028forged")
    written = capsys.readouterr().err
    assert len(written.splitlines()) == 2
    assert written.count("\n") == 2
    assert "\x1b" not in written


def test_lines_name_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of all loggers have the role, since processes share their stderr."""
    configure_logs(LogFormat.JSON, LogLevel.INFO, role="compactor")
    structlog.get_logger("shalekv").info("compacting")
    logging.getLogger("some.library").warning("careful")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["role"] for line in lines] == ["compactor", "compactor"]


ENTRIES = 200_000


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_no_full_collection_interrupts_a_growing_memtable() -> None:
    """While a memtable grows only young objects are collected."""
    tune_garbage_collector()
    before = [generation["collections"] for generation in gc.get_stats()]
    kept = {number: [number] for number in range(ENTRIES)}
    after = [generation["collections"] for generation in gc.get_stats()]
    young, middle, full = (b - a for a, b in zip(before, after, strict=True))
    assert len(kept) == ENTRIES
    assert young > 10
    assert middle > 0
    assert full == 0


def test_existing_objects_are_frozen() -> None:
    """Existing objects are frozen, so that later collections skip them."""
    kept = {number: [number] for number in range(ENTRIES)}
    tune_garbage_collector()
    assert gc.get_freeze_count() >= len(kept)


def test_what_was_frozen_on_standby_is_not_looked_at_again() -> None:
    """A process that has been elected collects what is new alone; on standby it collects all."""

    def leave_a_cycle() -> weakref.ref[_Account]:
        account = _Account()
        account.itself = account
        return weakref.ref(account)

    frozen = leave_a_cycle()
    gc.freeze()
    new = leave_a_cycle()
    tune_garbage_collector()
    assert (frozen() is not None, new()) == (True, None)
    freeze_on_standby()
    assert frozen() is None


def test_growth_is_due_at_half_as_much_again() -> None:
    """Growth counts above the minimum only; shrinking and growing back is not due."""
    measures = iter((1_000, 1_800, 1_801, 100, 1_800, 10_000, 15_000, 15_001))
    growth = Growth(lambda: next(measures), growth_min=800)
    assert [growth.is_due for _ in range(4)] == [False, True, False, False]
    growth.reset()
    assert [growth.is_due for _ in range(2)] == [False, True]


@virtual_time()
async def test_cycles_that_have_grown_old_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles that survived young collections are freed once memory has grown enough."""
    monkeypatch.setattr(gc_tuning, "GROWTH_PERCENT", 0)
    monkeypatch.setattr(gc_tuning, "GROWTH_BLOCKS_MIN", ENTRIES)
    gc.enable()
    tune_garbage_collector()
    collecting = asyncio.create_task(collect_when_grown(LoopClock()))
    await asyncio.sleep(0)
    before = sys.getallocatedblocks()
    for fraction, is_freed in ((4, False), (1, True)):
        cycles: list[list[object]] = [[] for _ in range(ENTRIES // fraction)]
        for cycle in cycles:
            cycle.append(cycle)
        del cycle, cycles
        await LoopClock().sleep_ms(2 * gc_tuning.CHECK_MS)
        assert (sys.getallocatedblocks() - before < ENTRIES // 10) is is_freed
    collecting.cancel()


@dataclass
class _Account:
    used_bytes: int = 0
    itself: _Account | None = None


@virtual_time()
async def test_memory_that_is_accounted_for_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full collection follows growth, unless the account of the process has grown as much."""
    monkeypatch.setattr(gc_tuning, "GROWTH_PERCENT", 0)
    monkeypatch.setattr(gc_tuning, "GROWTH_BLOCKS_MIN", ENTRIES)
    account = _Account()
    tune_garbage_collector(account)
    collecting = asyncio.create_task(collect_when_grown(LoopClock()))
    await asyncio.sleep(0)
    began = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(2 * ENTRIES)]
    account.used_bytes = len(kept) * 2 * gc_tuning.BLOCK_BYTES
    await LoopClock().sleep_ms(2 * gc_tuning.CHECK_MS)
    assert gc.get_stats()[2]["collections"] == began
    account.used_bytes = 0
    await LoopClock().sleep_ms(2 * gc_tuning.CHECK_MS)
    assert gc.get_stats()[2]["collections"] > began
    collecting.cancel()


async def test_what_may_be_interrupted_is_cancelled() -> None:
    """A signal ends an interruptible wait without an error, and the task continues."""
    with StopRequest() as stop:
        with stop.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        assert stop.requested.is_set()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_cancellation_by_others_is_not_swallowed() -> None:
    """Only the cancellation by the signal is swallowed."""

    async def open_for_ever(stop: StopRequest, opening: asyncio.Event) -> None:
        with stop.interruptible():
            opening.set()
            await asyncio.Event().wait()

    with StopRequest() as stop:
        opening = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(open_for_ever(stop, opening))
            await opening.wait()
            task.cancel()
    assert task.cancelled()
    assert not stop.requested.is_set()


async def test_a_server_whose_database_is_not_opened_gives_up_its_address(tmp_path: Path) -> None:
    """The socket's path is removed, as it is at the end of a server that has served."""
    path = tmp_path / "socket"
    flags = {"url": f"file://{tmp_path}/none", "listen": f"unix:{path}"}
    with pytest.raises(DatabaseNotFound):
        await serve_database(serving_settings(flags, None, WriterConfig), _never)
    assert not path.exists()
    with pytest.raises(DatabaseNotFound):
        await read_database(serving_settings(flags, None, ReaderConfig), _never)
    assert not path.exists()


def _never(_listen: str) -> None:
    raise AssertionError


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:7654"])
def test_port_on_a_network_needs_tls_or_consent(listen: str) -> None:
    """An address other than loopback is refused, and the message says both ways."""
    flags = {"url": "memory://x", "listen": listen}
    for allowed in ({"insecure": "true"}, {"tls_cert": "a.crt", "tls_key": "a.key"}):
        assert serving_settings(flags | allowed, None, WriterConfig).server.listen == listen
    with pytest.raises(InvalidSetting, match=r"--tls-cert and --tls-key.* --insecure"):
        serving_settings(flags, None, WriterConfig)
