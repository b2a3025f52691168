"""What a commit of a quorum stands on, measured bare: a message there and back, and one sync.

Messages go over streams of the same method as the log's, and are as large as its; the safekeeper
answers them from memory. Syncs are of files beside its logs, without the safekeeper.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from shalekv.engine.quorum.links import DatabasePlace
from shalekv.v1 import safekeeper_pb2 as wire

PROPOSE = "/shalekv.v1.Safekeeper/Propose"
PADDING_FIELD = 1_000  # of a later version, for all that a safekeeper knows: it is skipped
LENGTH_DELIMITED = 2
FILE_BYTES = 1 << 20


class Trips:
    """A stream to each safekeeper."""

    def __init__(self, calls: Sequence[Any]) -> None:
        """Each has had its first answer."""
        self._calls = calls

    async def alone_ms(self, size_bytes: int, count: int) -> float:
        """A message there and back, while nothing else is under way; the median safekeeper."""
        data = padded(size_bytes)
        took_ms = []
        for _ in range(count):
            each_ms = []
            for call in self._calls:
                began_s = time.perf_counter()
                await call.write(data)
                await call.read()
                each_ms.append((time.perf_counter() - began_s) * 1_000)
            took_ms.append(median(each_ms))
        return median(took_ms)

    async def at_once_ms(self, size_bytes: int, count: int) -> float:
        """One to each at once, until the median safekeeper has answered."""
        data = padded(size_bytes)
        took_ms = []
        for _ in range(count):
            began_s = time.perf_counter()
            ends_s: list[float] = []
            async with asyncio.TaskGroup() as tasks:
                for call in self._calls:
                    tasks.create_task(_there_and_back(call, data, ends_s))
            took_ms.append((median(ends_s) - began_s) * 1_000)
        return median(took_ms)


@asynccontextmanager
async def trips_to(addresses: Sequence[str], place: DatabasePlace) -> AsyncIterator[Trips]:
    """Streams to the members of a database, beside those of its writer."""
    calls: list[Any] = []
    async with AsyncExitStack() as stack:
        for address in addresses:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=options)
            )
            call: Any = channel.stream_stream(PROPOSE)()
            stack.callback(call.cancel)
            database = wire.DatabasePlace(database_id=place.database_id, url=place.url)
            first = wire.ProposeRequest(database=database, greet=wire.Greet())
            await call.write(first.SerializeToString())
            await call.read()
            calls.append(call)
        yield Trips(calls)


def sync_ms(folders: Sequence[Path], size_bytes: int, count: int) -> float:
    """A write and a sync of so many bytes, in space that is there; the median disk each time."""
    with ExitStack() as stack:
        files = [stack.enter_context(_file(folder / "bench")) for folder in folders]
        data = os.urandom(size_bytes)
        took_ms = []
        for number in range(count):
            offset = number * size_bytes % (FILE_BYTES - size_bytes)
            took_ms.append(median([_sync_ms(file, data, offset) for file in files]))
    return median(took_ms)


def padded(size_bytes: int) -> bytes:
    """A question that is answered from memory, about so large."""
    question = wire.ProposeRequest(greet=wire.Greet()).SerializeToString()
    tag = _varint(PADDING_FIELD << 3 | LENGTH_DELIMITED)
    return question + tag + _varint(size_bytes) + bytes(size_bytes)


async def _there_and_back(call: Any, data: bytes, ends_s: list[float]) -> None:
    await call.write(data)
    await call.read()
    ends_s.append(time.perf_counter())


@contextmanager
def _file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, bytes(FILE_BYTES), 0)
        os.fsync(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def _sync_ms(descriptor: int, data: bytes, offset: int) -> float:
    began_s = time.perf_counter()
    os.pwrite(descriptor, data, offset)
    os.fdatasync(descriptor)
    return (time.perf_counter() - began_s) * 1_000


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
