"""Filling a database that is far larger than the memory of its server: memory, WAL, L0 and space
stay bounded, amplification is as foretold, and everything is there that was acknowledged.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shalekv.protocol.compaction.outcome import Amplification, Setup
from shalekv.protocol.compaction.simulate import predict
from shalekv.protocol.compaction.workload import KeyOrder, Workload
from shalekv.settings import GIB, MIB, DatabaseSettings, MemorySettings, WriterConfig
from shalekv.settings.budget import with_memory_shares
from tests.e2e.filling import Filling
from tests.e2e.footprint import Footprint, tree_bytes
from tests.kit.processes.child import Child
from tests.kit.processes.process_memory import most_resident_bytes, resident_bytes
from tests.kit.processes.processes import Processes
from tests.kit.seeds import random_of

SLACK_BYTES = 64 * MIB  # of memory, in addition to an idle process and its budget
CHECK_EVERY_COUNT = 500  # operations between two measurements of the files
L0_FULL = 3  # times `l0_trigger_count`, where the policy adds nothing to L0
SPACE_MAX = 2.0  # bytes that are needed for a byte of keys and values, while writing
DISK_MAX = 6  # ... and those that wait for the collector: without it they are more than 8
LOCAL_JOB_S = 0.03  # of a compaction, in addition to its bytes, on a local disk
TOLERANCE = 0.2  # of the simulator's prediction


@dataclass(frozen=True, slots=True)
class Fill:
    """How much is written, and with how much memory."""

    written_bytes: int
    memory_bytes: int

    @property
    def workload(self) -> Workload:
        """Random keys, 20% overwrites, 10% deletes, values of 100 bytes to 10 KiB."""
        return Workload(
            order=KeyOrder.UNIFORM,
            written_bytes=self.written_bytes,
            overwrite_share=0.2,
            delete_share=0.1,
        )

    def settings(self, url: str) -> WriterConfig:
        settings = WriterConfig(
            database=DatabaseSettings(url=url),
            memory=MemorySettings(memory_bytes=self.memory_bytes),
        )
        return with_memory_shares(settings)


SHORT = Fill(24 * MIB, 16 * MIB)  # too little for several levels, of which the rest is predicted


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(SHORT, id="24 MiB"),
        pytest.param(Fill(200 * MIB, 32 * MIB), id="200 MiB", marks=pytest.mark.soak),
        pytest.param(Fill(2 * GIB, 256 * MIB), id="2 GiB", marks=pytest.mark.soak),
    ],
)
async def test_fill(processes: Processes, tmp_path: Path, fill: Fill) -> None:
    """A server is filled, killed, compacted and read: memory, WAL, L0 and space are bounded, and
    nothing is lost.
    """
    url = f"file://{tmp_path}/db"
    settings = fill.settings(url)
    flags = ["--memory-bytes", str(fill.memory_bytes)]
    flags += ["--collect-interval-ms", "500", "--collect-age-s", "1"]
    flags += ["--wal-retention-s", "0"]
    filling, footprint = Filling(fill.workload), Footprint(tmp_path / "db")
    server = await processes.serve(url, *flags)
    idle_bytes = resident_bytes(server.pid)
    began_s = time.monotonic()
    space_max = 0.0
    async for count in filling.write(server.listen):
        if not count % CHECK_EVERY_COUNT:
            footprint.look()
            if filling.live_bytes(count) > filling.live_bytes() // 2:
                space_max = max(space_max, footprint.needed_bytes / filling.live_bytes(count))
    elapsed_s = time.monotonic() - began_s
    footprint.look()
    check_memory("writing", server, idle_bytes, fill)
    await server.kill()
    compactor = await processes.run(
        *("compactor", "--once", "--url", url, "--log-format", "json"),
        *("--wal-trigger-bytes", str(settings.compactor.wal_trigger_bytes)),
        *("--base-level-bytes", str(settings.compactor.base_level_bytes)),
        within_s=240,
        code=0,
    )
    version = footprint.look()

    level_bytes = written_bytes(server) + written_bytes(compactor)
    say(f"{filling.logical_bytes >> 20} MiB in {elapsed_s:.0f} s, {filling.key_count} keys left")
    say(f"at most {footprint.l0_count_max} SSTs in L0, {footprint.open_wal_bytes_max >> 10} KiB of")
    say(
        f"WAL to compact, {footprint.disk_bytes_max >> 20} MiB on disk, space up to {space_max:.2f}"
    )
    assert footprint.open_wal_bytes_max <= settings.writer.memtable_bytes_max
    assert footprint.l0_count_max <= L0_FULL * settings.compactor.l0_trigger_count
    if fill != SHORT:
        measured = Measured(
            write=(footprint.wal_bytes + level_bytes) / filling.logical_bytes,
            space=tree_bytes(version) / filling.live_bytes(),
            bytes_per_s=filling.logical_bytes / elapsed_s,
            merged_bytes_per_s=merged_bytes_per_s(server),
        )
        assert space_max <= SPACE_MAX
        assert footprint.disk_bytes_max <= DISK_MAX * filling.live_bytes()
        check_amplification(measured, fill, settings)

    again = await processes.serve(url, *flags, create=False)
    idle_bytes = resident_bytes(again.pid)
    await filling.check(again.listen)
    await filling.check_gets(again.listen, random_of("fill"), 10)
    check_memory("reading", again, idle_bytes, fill)
    assert await again.stop() == 0, again.report()
    await processes.run("fsck", "--url", url, code=0)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a fill."""

    write: float
    space: float
    bytes_per_s: float  # of written keys and values
    merged_bytes_per_s: float  # read by compactions of levels, while they ran


def check_memory(what: str, server: Child, idle_bytes: int, fill: Fill) -> None:
    """The process took no more than it takes idle, its budget, and a constant."""
    peak_bytes = most_resident_bytes(server.pid)
    budget_bytes = fill.memory_bytes + SLACK_BYTES
    say(f"{what}: {(peak_bytes - idle_bytes) >> 20} MiB over the {idle_bytes >> 20} MiB of idle")
    assert peak_bytes <= idle_bytes + budget_bytes


def check_amplification(measured: Measured, fill: Fill, settings: WriterConfig) -> None:
    """It is what the simulator foretells of the same workload at the same speeds."""
    foretold = predicted(fill, settings, measured)
    say(f"{measured.merged_bytes_per_s / 1e6:.0f} MB/s merged")
    say(f"write amplification {measured.write:.2f}, foretold {foretold.write:.2f}")
    say(f"space amplification {measured.space:.2f}, foretold {foretold.space:.2f}")
    assert abs(measured.write / foretold.write - 1) <= TOLERANCE
    assert abs(measured.space / foretold.space - 1) <= TOLERANCE


def predicted(fill: Fill, settings: WriterConfig, measured: Measured) -> Amplification:
    setup = Setup(
        compactor=settings.compactor,
        levels=settings.levels,
        flush_interval_ms=0,
        flush_bytes=settings.writer.flush_bytes,
        wal_block_bytes=settings.writer.wal_block_bytes,
        uncompacted_bytes_max=settings.writer.memtable_bytes_max,
        compaction_bytes_per_s=measured.merged_bytes_per_s,
        job_s=LOCAL_JOB_S,
    )
    return predict(replace(fill.workload, write_bytes_per_s=measured.bytes_per_s), setup)


def merged_bytes_per_s(server: Child) -> float:
    """How fast compactions of levels were that were worth the name."""
    merges = [
        line
        for line in server.lines()
        if line.get("event") == "compacted" and line["read_bytes"] > MIB and "from_level" in line
    ]
    read_bytes: int = sum(line["read_bytes"] for line in merges)
    elapsed_ms: int = sum(line["ms"] for line in merges)
    return 1_000 * read_bytes / elapsed_ms


def written_bytes(process: Child) -> int:
    """Return the bytes that the compactor, of a server or alone, reports as written."""
    return sum(
        line["written_bytes"] for line in process.lines() if line.get("event") == "compacted"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
