"""Writes the files of a load: rows in the order of their keys become SSTs in the store."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from operator import add
from random import Random

from shalekv.core.tree import L0
from shalekv.engine.bulk.job import LoadTicket
from shalekv.engine.bulk.rows import check_rows
from shalekv.errors import IllegalState
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.section import Section
from shalekv.format.sst_writer import SstWriter
from shalekv.protocol.lease import leased_sst_id
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken

UPLOADS_AT_ONCE = 2  # finished files in memory, beside the one that is being written
ROWS_AT_ONCE = 512  # so few that the processor's cache still has them when they are looked at again
_NO_NONCE = bytes(16)
_LEASED_RANDOM_BYTES = 8
_WRITE_ID_BYTES = 16


class LoadFiles:
    """Files of one sorted run of rows; of the parts of a load each has one of these.

    In memory are a file that is being written, `UPLOADS_AT_ONCE` that are uploaded, and the rows
    that were added last. After an error nothing can be added.
    """

    def __init__(self, store: CasStore, ticket: LoadTicket) -> None:
        """Nothing is sent to the store before the first file is full, or `finish`."""
        self._store = store
        self._ticket = ticket
        self._open: SstWriter | None = None
        self._last_key = b""  # of all rows so far
        self._uploads: list[asyncio.Task[SstInfo]] = []  # in the order of the keys
        self._infos: list[SstInfo] = []
        self.row_count = 0
        self.size_bytes = 0  # of the files that are finished

    async def add(self, rows: Columns) -> None:
        """Take the next rows: puts, with or without an expiry, and tombstones.

        Keys ascend, over all calls; sequence numbers are 0. Raises `InvalidRequest` for rows that
        are not so, or over the limits of the ticket, and what an upload has raised: `StoreError`.
        """
        if not rows.keys:
            return
        try:
            await self._add(rows)
        except BaseException:
            await self._cancel()
            raise

    async def finish(self) -> list[SstInfo]:
        """All files, by key, as a load lists them: they are in the store. None without rows.

        Raises as `add`.
        """
        try:
            if self._open is not None:
                await self._close(self._open)
            await self._collect(0)
        except BaseException:
            await self._cancel()
            raise
        return self._infos

    async def _add(self, rows: Columns) -> None:
        run = self._store.runtime.workers.run
        await run(check_rows, rows, self._ticket, self.row_count, self._last_key)
        ends = [*accumulate(map(add, map(len, rows.keys), map(len, rows.values)), initial=0)]
        at = 0
        while at < len(rows.keys):
            if self._open is None:
                self._open = begin_file(self._ticket, self._store.runtime.random)
            at = await run(_fill, self._open, rows, ends, at, self._ticket.levels.sst_bytes)
            if self._open.size_bytes >= self._ticket.levels.sst_bytes:
                await self._close(self._open)
        self._last_key = rows.keys[-1]
        self.row_count += len(rows.keys)

    async def _close(self, writer: SstWriter) -> None:
        self._open = None
        await self._collect(UPLOADS_AT_ONCE - 1)
        self._uploads.append(asyncio.create_task(self._upload(writer)))

    async def _upload(self, writer: SstWriter) -> SstInfo:
        info = await create_file(self._store, writer)
        self.size_bytes += info.size_bytes
        return info

    async def _collect(self, left: int) -> None:
        """Wait until only so many uploads are under way."""
        while len(self._uploads) > left:
            self._infos.append(await self._uploads[0])
            del self._uploads[0]

    async def _cancel(self) -> None:
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)


def begin_file(ticket: LoadTicket, random: Random) -> SstWriter:
    """A file of the load that is empty yet, under an id that the lease protects."""
    sst_id = leased_sst_id(ticket.lease_id, random.randbytes(_LEASED_RANDOM_BYTES))
    properties = SstProperties(
        name=level_name(sst_id),
        database_id=ticket.database_id,
        writer_epoch=0,  # it belongs to no opening
        writer_nonce=_NO_NONCE,
        write_id=random.randbytes(_WRITE_ID_BYTES),
        logical_time_ms=ticket.logical_time_ms,
    )
    return SstWriter(
        properties,
        block_bytes=ticket.levels.block_bytes,
        codec=Codec[ticket.levels.codec.name],
        filter_bits_per_key=ticket.levels.filter_bits or None,
    )


async def create_file(store: CasStore, writer: SstWriter) -> SstInfo:
    """Put a finished file into the store, and say how a load lists it. Raises `StoreError`."""
    data, footer = await store.runtime.workers.run(writer.finish)
    name = footer.properties.name
    if isinstance(await store.claim(name, data), Taken):
        message = f"{name} exists with other bytes, although its id was drawn at random"
        raise IllegalState(message)
    return replace(footer.info(L0), first_expiry_ms=writer.first_expiry_ms)


def _fill(writer: SstWriter, rows: Columns, ends: list[int], at: int, sst_bytes: int) -> int:
    """Add rows from `at` on until the SST is full or there are no more; where it went on to.

    `ends` are the bytes of keys and values before each row, and of all.
    """
    count = len(rows.keys)
    while at < count and writer.size_bytes < sst_bytes:
        room_bytes = sst_bytes - writer.size_bytes
        stop = max(bisect_right(ends, ends[at] + room_bytes) - 1, at + 1)
        stop = min(stop, at + ROWS_AT_ONCE)
        writer.add(Section.POINTS, rows.rows(at, stop))
        at = stop
    return at
