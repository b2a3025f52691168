"""Filling a database that is far larger than the memory of its server: memory, WAL, L0 and space
stay bounded, amplification is as foretold, and everything is there that was acknowledged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.protocol.compaction.outcome import Amplification, Setup
from shalekv.protocol.compaction.simulate import simulate
from shalekv.protocol.compaction.workload import KeyOrder, Workload, operations
from shalekv.protocol.manifest import Manifest, Version
from shalekv.settings import GIB, MIB, DatabaseSettings, MemorySettings, WriterConfig
from shalekv.settings.budget import with_memory_shares
from shalekv.write.wal import WAL_BLOCK_BYTES
from shalekv_client import Batch, Client, RetryPolicy
from tests.kit.processes.child import Child
from tests.kit.processes.process_memory import most_resident_bytes, resident_bytes
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import manifest_ids, manifest_path
from tests.kit.seeds import random_of


@dataclass(slots=True)
class Footprint:
    """The most that was seen of each, and all WAL objects that were seen."""

    folder: Path
    l0_count_max: int = 0
    open_wal_bytes_max: int = 0  # of WAL objects that are not compacted
    needed_bytes: int = 0  # at the last measurement: the levels, and the WAL that is not compacted
    disk_bytes_max: int = 0  # of all files, including those that wait for the collector
    _wal_bytes: dict[int, int] = field(default_factory=dict)  # of each object ever seen

    @property
    def wal_bytes(self) -> int:
        return sum(self._wal_bytes.values())

    def measure(self) -> Version:
        """Measure the files; return the version of the newest manifest."""
        sizes = self._sizes()
        manifest = self._newest_manifest()
        version = Version.of(manifest)
        wal_bytes = {
            wal_id: size_bytes
            for name, size_bytes in sizes.items()
            if (wal_id := names.parse_wal_name(name)) is not None
        }
        self._wal_bytes |= wal_bytes
        after = -1 if version.wal_id is None else version.wal_id
        open_bytes = sum(size for wal_id, size in wal_bytes.items() if wal_id > after)
        self.needed_bytes = version_bytes(version) + open_bytes
        self.l0_count_max = max(self.l0_count_max, len(version.l0))
        self.open_wal_bytes_max = max(self.open_wal_bytes_max, open_bytes)
        self.disk_bytes_max = max(self.disk_bytes_max, sum(sizes.values()))
        return version

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for file in self.folder.rglob("*"):
            try:
                if file.is_file():
                    sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
            except FileNotFoundError:  # collected meanwhile
                continue
        return sizes

    def _newest_manifest(self) -> Manifest:
        while True:
            path = manifest_path(self.folder, manifest_ids(self.folder)[-1])
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # collected meanwhile: there is a newer one
                continue
            return decode_manifest(path.relative_to(self.folder).as_posix(), data)


def version_bytes(version: Version) -> int:
    runs = [info for run in version.runs for info in run.ssts]
    return sum(info.size_bytes for info in (*version.l0, *runs))


BATCH_COUNT = 100
PATIENT = RetryPolicy(attempts_max=1_000)  # a refused write was not applied
TIMEOUT_MS = 120_000


class Filling:
    """The operations of a workload, and what a database must hold that has acknowledged them."""

    def __init__(self, workload: Workload) -> None:
        ops = operations(workload)
        self._keys: list[int] = ops.keys.tolist()
        self._lengths: list[int] = (ops.logical_bytes - workload.key_bytes).tolist()
        self._deletes: list[bool] = ops.deletes.tolist()
        self._put_by: dict[bytes, int] = {}  # key -> number of the operation
        self.logical_bytes = int(ops.logical_bytes.sum())
        self._live_bytes: list[int] = ops.live_bytes.tolist()

    def live_bytes(self, count: int = 0) -> int:
        """Return the bytes of live keys and values after this many operations; 0: after all."""
        return self._live_bytes[count - 1]

    @property
    def key_count(self) -> int:
        return len(self._put_by)

    async def write(self, address: str) -> AsyncIterator[int]:
        """Write all, batch after batch; the number of operations that are acknowledged."""
        async with Client(address, retry=PATIENT, timeout_ms=TIMEOUT_MS) as client:
            for first in range(0, len(self._keys), BATCH_COUNT):
                numbers = range(first, min(first + BATCH_COUNT, len(self._keys)))
                await client.write(self._batch(numbers))
                self._acknowledged(numbers)
                yield numbers.stop

    async def check(self, address: str) -> None:
        """Every key has the value that was acknowledged last, and there are no others."""
        expected = iter(sorted(self._put_by.items()))
        async with Client(address, timeout_ms=TIMEOUT_MS) as client:
            async for entry in client.scan():
                key, number = next(expected, (b"", -1))
                assert entry.key == key, f"{entry.key.hex()} instead of {key.hex()}"
                assert entry.value == self._value(number), self._confusion(key, number, entry.value)
        assert next(expected, None) is None

    async def check_gets(self, address: str, random: Random, count: int) -> None:
        """The same by gets of some of the keys, deleted ones included."""
        async with Client(address, timeout_ms=TIMEOUT_MS) as client:
            for _ in range(count):
                numbers = random.sample(range(len(self._keys)), 50)
                keys = [_key(self._keys[number]) for number in numbers]
                for key, got in zip(keys, await client.batch_get(keys), strict=True):
                    number = self._put_by.get(key)
                    expected = None if number is None else self._value(number)
                    assert (None if got is None else got.value) == expected, key.hex()

    def _confusion(self, key: bytes, number: int, value: bytes) -> str:
        others = [other for other, each in enumerate(self._keys) if _key(each) == key]
        written_by = [other for other in others if self._value(other) == value]
        return f"{key.hex()}: written by {written_by} of {others}, not by {number}"

    def _batch(self, numbers: range) -> Batch:
        batch = Batch()
        for number in numbers:
            key = _key(self._keys[number])
            _ = batch.delete(key) if self._deletes[number] else batch.put(key, self._value(number))
        return batch

    def _acknowledged(self, numbers: range) -> None:
        for number in numbers:
            key = _key(self._keys[number])
            if self._deletes[number]:
                self._put_by.pop(key, None)
            else:
                self._put_by[key] = number

    def _value(self, number: int) -> bytes:
        """Bytes that no codec makes smaller, so that bytes in the store can be foretold."""
        return Random(number).randbytes(self._lengths[number])


def _key(number: int) -> bytes:
    return b"key/" + number.to_bytes(12, "big")


SLACK_BYTES = 64 * MIB  # of memory, in addition to an idle process and its budget
MEASURE_EVERY_COUNT = 500  # operations between two measurements of the files
L0_FULL = 3  # times `l0_trigger_count`, where the policy adds nothing to L0
SPACE_MAX = 2.0  # bytes that are needed for a byte of keys and values, while writing
DISK_MAX = 6  # ... and those that wait for the collector: without it they are more than 8
LOCAL_JOB_S = 0.03  # of a compaction, in addition to its bytes, on a local disk
TOLERANCE = 0.2  # of the simulator's prediction


@dataclass(frozen=True, slots=True)
class Fill:
    """Sizes of the data that is written, and of the memory."""

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
        if not count % MEASURE_EVERY_COUNT:
            footprint.measure()
            if filling.live_bytes(count) > filling.live_bytes() // 2:
                space_max = max(space_max, footprint.needed_bytes / filling.live_bytes(count))
    elapsed_s = time.monotonic() - began_s
    footprint.measure()
    check_memory("writing", server, idle_bytes, fill)
    await server.kill()
    compactor = await processes.run(
        *("compactor", "--once", "--url", url, "--log-format", "json"),
        *("--wal-trigger-bytes", str(settings.compactor.wal_trigger_bytes)),
        *("--base-level-bytes", str(settings.compactor.base_level_bytes)),
        within_s=240,
        code=0,
    )
    version = footprint.measure()

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
            space=version_bytes(version) / filling.live_bytes(),
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
        wal_block_bytes=WAL_BLOCK_BYTES,
        uncompacted_bytes_max=settings.writer.memtable_bytes_max,
        compaction_bytes_per_s=measured.merged_bytes_per_s,
        job_s=LOCAL_JOB_S,
    )
    workload = replace(fill.workload, write_bytes_per_s=measured.bytes_per_s)
    return simulate(workload, setup).amplification


def merged_bytes_per_s(server: Child) -> float:
    """The speed of compactions of levels, without those of little data."""
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
