"""Processes that are killed in the middle of writing leave a log that is sound and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shalekv.core.quorum.messages import Health
from shalekv.errors import StoreRefused
from shalekv.store.member_log.folder import DataFolder
from tests.kit.disks.member_logs import ALL
from tests.unit.store.member_log.appender import SEGMENT_BYTES, payload_of

ROOT = Path(__file__).resolve().parents[4]
KILLS = 8


def start(folder: Path, epoch: int) -> subprocess.Popen[str]:
    """A process that appends."""
    command = [sys.executable, "-m", f"{__package__}.appender", str(folder), str(epoch)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_what_was_told_before_a_kill_is_there(tmp_path: Path) -> None:
    """After each of some kills, all that was called durable is there, in one sound chain."""
    for epoch in range(1, KILLS + 1):
        child = start(tmp_path / "data", epoch)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(epoch * 15)]
        if epoch == 1:
            with pytest.raises(StoreRefused, match="another safekeeper"):
                DataFolder.open(tmp_path / "data")
        child.kill()
        lines += child.stdout.read().splitlines()
        child.stdout.close()
        child.wait(60)
        folder = DataFolder.open(tmp_path / "data", segment_bytes=SEGMENT_BYTES)
        (log,), set_aside = folder.open_logs()
        assert not set_aside
        assert log.recovered.health is Health.SOUND
        assert log.recovered.promise.epoch == epoch
        assert log.durable_lsn >= int(lines[-1].split()[1])
        records = log.read(1, ALL, ALL)
        assert len(records) == log.durable_lsn
        for record in records:
            assert record.payload == payload_of(record.epoch, record.lsn)
        log.close()
        folder.close()
