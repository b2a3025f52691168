"""The source as Spark calls it, driver and tasks in one process, beside a writer that serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from shalekv.core.entry import Entry, Kind
from shalekv.core.sst_table import SstInfo
from shalekv.engine.consumer_leases import consumers_of
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv.format.sst_message import info_message
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_client import Client
from shalekv_spark.feed.keeping import Keeping
from shalekv_spark.feed.offset import OffsetValue
from shalekv_spark.feed.options import FeedOptions
from shalekv_spark.feed.source import ChangesReader
from shalekv_spark.place import Place
from tests.conformance.playing import new_uuid7
from tests.kit.processes.in_process import Served, real_runtime, serving

ALL = ReadAllAvailable()


def reader_of(url: str, **options: str) -> ChangesReader:
    return ChangesReader(FeedOptions.of({"url": url, "startingOffset": "earliest", **options}))


def batch(reader: ChangesReader, start: OffsetValue) -> tuple[OffsetValue, list[Any]]:
    """The end of the next batch, and its rows."""
    end = reader.latestOffset(start, ALL)
    parts = reader.partitions(start, end)
    found = [each for part in parts for each in reader.read(part)]
    return end, [row for each in found for row in each.to_pylist()]


def feed_threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("shalekv")}


@asynccontextmanager
async def served(url: str) -> AsyncIterator[Served]:
    with real_runtime() as runtime:
        store = open_store(url, runtime, StoreSettings())
        async with serving(store) as found:
            yield found


def file_in(folder: Path, database_id: bytes, entries: list[Entry]) -> SstInfo:
    """A file that a tool has put into the folder of the levels."""
    name = level_name(new_uuid7())
    properties = SstProperties(
        name=name,
        database_id=database_id,
        writer_epoch=0,
        writer_nonce=bytes(16),
        write_id=bytes(16),
    )
    data = encode_sst(properties, entries, block_bytes=1_024, filter_bits_per_key=10)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return open_sst(name, data, database_id=database_id).footer.info(0)


async def test_files_that_a_writer_commits_are_told(tmp_path: Path) -> None:
    """Puts and deletes of a load, as one commit between others, with the epoch of the writer."""
    url = f"file://{tmp_path}"
    reader = reader_of(url)
    async with served(url) as server, Client(server.listen) as client:
        start = await asyncio.to_thread(reader.initialOffset)
        await client.put(b"a", b"before")
        puts = [Entry(b"%03d" % each, 0, Kind.PUT, b"%d" % each) for each in range(300)]
        files = [[Entry(b"!", 0, Kind.TOMBSTONE), *puts[:200]], puts[200:]]
        database_id = bytes.fromhex(str(start["databaseId"]))
        infos = [file_in(tmp_path, database_id, entries) for entries in files]
        loaded = await client.ingest("monday", map(info_message, infos))
        await client.put(b"a", b"behind")
        end, rows = await asyncio.to_thread(batch, reader, start)
    assert [row["value"] for row in rows if row["key"] == b"a"] == [b"before", b"behind"]
    assert len({row["epoch"] for row in rows}) == 1
    told = [row for row in rows if row["seq"] == loaded.seq]
    assert {row["wal_id"] for row in told} == {loaded.wal_id}
    assert [(row["op"], row["key"], row["value"]) for row in told] == [
        ("delete", b"!", None),
        *(("put", entry.key, entry.value) for entry in puts),
    ]
    await asyncio.to_thread(reader.commit, end)
    await asyncio.to_thread(reader.stop)
    assert not feed_threads()


@pytest.mark.parametrize("failure", [None, TimeoutError(), RuntimeError("planted")])
async def test_a_query_that_ends_leaves_its_lease_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """No thread, whatever it meets at its end; the lease stands behind what was processed."""
    url = f"file://{tmp_path}"
    reader = reader_of(url, consumer="totals")
    async with served(url) as server, Client(server.listen) as client:
        await client.put(b"a", b"")
        start = await asyncio.to_thread(reader.initialOffset)
        end, _ = await asyncio.to_thread(batch, reader, start)
    await asyncio.to_thread(reader.commit, end)
    if failure is not None:

        async def fail(_: Keeping) -> None:
            raise failure

        monkeypatch.setattr(Keeping, "end", fail)
    is_bug = isinstance(failure, RuntimeError)
    with pytest.raises(RuntimeError, match="planted") if is_bug else nullcontext():
        await asyncio.to_thread(reader.stop)
    assert not feed_threads()
    async with Place.of(url).open() as store:
        [consumer] = consumers_of(await StoredManifest(store).refresh())
    assert consumer.lease.wal_id_min == (end if failure is None else start)["walId"]
    await asyncio.to_thread(reader.stop)
