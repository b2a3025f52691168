"""Ten thousand watches on twenty streams, and the cost of a write with and without them.

Each write matches one watch, or none. CPU is that of the server's process. Nothing is asserted
about time; each watch must get exactly its own commits.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client
from tests.bench.sizes import sized
from tests.kit.processes.processes import Processes

pytestmark = pytest.mark.timeout(600)

STREAMS = sized(20, 2)
WATCHES = sized(10_000, 20)
WRITES = sized(8_000, 100)
WRITES_PER_S = 1_000
WRITERS = 32
CASES = [
    ("no watch", 0, b"w/"),
    ("100 watches that do not match", 100, b"x/"),
    (f"{WATCHES:,} watches that do not match", WATCHES, b"x/"),
    (f"{WATCHES:,} watches, one of which matches", WATCHES, b"w/"),
][sized(0, 2) :]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Streams:
    """Watches on some streams; each has a prefix of its own."""

    def __init__(self, address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for _ in range(STREAMS)]
        self._calls: list[grpc.aio.StreamStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchReply]] = []
        self._reading: list[asyncio.Task[None]] = []
        self._event = asyncio.Event()
        self.opened = 0
        self.seqs: dict[int, list[int]] = defaultdict(list)  # received by each watch
        self.count = 0
        self.delays_ms: list[float] = []
        self.sent: dict[bytes, float] = {}

    async def open(self, watches: int, prefix: bytes) -> None:
        """Open this many, and wait until they are open."""
        self._calls = [kv_pb2_grpc.KVStub(channel).Watch() for channel in self._channels]
        self._reading = [asyncio.create_task(self._read(call)) for call in self._calls]
        for number in range(watches):
            create = kv_pb2.WatchCreate(
                watch_id=number, range=kv_pb2.KeyRange(prefix=prefix + b"%05d/" % number)
            )
            await self._calls[number % STREAMS].write(kv_pb2.WatchRequest(create=create))
        await self._until(lambda: self.opened == watches)

    async def all_reported(self, count: int) -> None:
        await self._until(lambda: self.count >= count)

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        for channel in self._channels:
            await channel.close()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._event.clear()
            await self._event.wait()

    async def _read(
        self, call: grpc.aio.StreamStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchReply]
    ) -> None:
        async for reply in call:
            kind = reply.WhichOneof("event")
            if kind == "opened_at_seq":
                self.opened += 1
            elif kind == "commit":
                for change in reply.commit.changes:
                    began = self.sent[change.entry.key]
                    self.delays_ms.append((time.perf_counter() - began) * 1_000)
                    assert change.entry.key.split(b"/")[1] == b"%05d" % reply.watch_id
                self.seqs[reply.watch_id].append(reply.commit.seq)
                self.count += 1
            self._event.set()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def put_all(
    client: Client, streams: Streams, prefix: bytes, seqs: dict[int, list[int]]
) -> None:
    """Put keys of all the prefixes in turn, at the pace that was asked for."""
    began = time.perf_counter()
    numbers = iter(range(WRITES))

    async def work() -> None:
        for number in numbers:
            await asyncio.sleep(max(began + number / WRITES_PER_S - time.perf_counter(), 0))
            watch = number % WATCHES
            key = prefix + b"%05d/%d" % (watch, number)
            streams.sent[key] = time.perf_counter()
            seqs[watch].append((await client.put(key, bytes(100))).seq)

    await asyncio.gather(*(work() for _ in range(WRITERS)))


async def measure(
    processes: Processes, folder: Path, watches: int, *, written: bytes, at_reader: bool
) -> tuple[float, Streams]:
    """Return the server's CPU microseconds for a write, and the commits that watches got."""
    url = f"file://{folder}"
    flags = ("--watch-progress-ms", "3600000")
    writer = await processes.serve(url, *flags)
    watched = await processes.read(url, *flags) if at_reader else writer
    streams = Streams(watched.listen)
    seqs: dict[int, list[int]] = defaultdict(list)
    async with Client(writer.listen) as client:
        await streams.open(watches, b"w/")
        before = cpu_s(watched.pid)
        await put_all(client, streams, written, seqs)
        if written == b"w/" and watches:
            await streams.all_reported(WRITES)
            assert streams.seqs == {watch: sorted(each) for watch, each in seqs.items()}
        else:
            assert not streams.count
        used_s = cpu_s(watched.pid) - before
        await streams.close()
    if watched is not writer:
        await watched.stop()
    await writer.stop()
    return used_s / WRITES * 1e6, streams


@pytest.mark.parametrize("at_reader", [False, True], ids=["writer", "reader"])
async def test_writes_under_many_watches(tmp_path: Path, at_reader: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Print the CPU of a write without watches, with many that do not match, and with one of many
    that does, and how soon a watch gets it.
    """
    with Processes() as processes:
        rows: list[str] = []
        for name, watches, written in CASES:
            folder = tmp_path / f"{len(rows)}"
            used_us, streams = await measure(
                processes, folder, watches, written=written, at_reader=at_reader
            )
            delays = sorted(streams.delays_ms)
            text = ""
            if delays:
                late = delays[len(delays) * 99 // 100]
                text = f"; told after {statistics.median(delays):.1f} ms, 99%: {late:.1f} ms"
            rows.append(f"  {name:42} {used_us:6.0f} us of CPU for a write{text}\n")
        role = "reader" if at_reader else "writer"
        head = f"{WRITES_PER_S:,} writes/s, watched at the {role} on {STREAMS} streams"
        sys.stdout.write(f"\n{head}\n" + "".join(rows))
