"""Loads: the commit of SST files that were written into the object store beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shalekv.v1 import admin_pb2, manifest_pb2
from shalekv_client.error_table import too_large
from shalekv_client.operations import ADMIN, Method
from shalekv_client.policies import Destination
from shalekv_client.routing.fleet import Fleet

_INGEST = Method(f"/{ADMIN}/IngestSst", admin_pb2.IngestSstRequest, admin_pb2.IngestSstReply)
PER_FILE_MS = 20  # added to the timeout: the writer checks each file before it commits


@dataclass(frozen=True, slots=True)
class Ingested:
    """A load that is committed."""

    seq: int  # of the whole load; for a batch of a stream it may be that of a later batch
    wal_id: int | None  # the WAL object that commits it; None: it was committed before
    already_applied: bool  # it had been committed before: this call changed nothing


class IngestCalls:
    """The call of a client that commits files; see `Client`."""

    address: str
    fleet: Fleet
    _timeout_ms: int
    _message_bytes_max: int

    async def ingest(
        self,
        load_id: str,
        ssts: Iterable[manifest_pb2.SstInfo],
        *,
        timeout_ms: int | None = None,
    ) -> Ingested:
        """Commit files that are in the folder of the levels, listed in the order of their keys.

        They become one commit, newer than all writes before and older than all after. `load_id`,
        1 to 256 bytes, identifies the load: a load is committed once, however often the call is
        made, so an attempt without an answer is repeated. Ids of the form ``<stream>-<number>`` are
        batches, which are committed in order: when one is committed, all before it count as
        committed.

        The default of `timeout_ms` is the client's timeout and some more for each file. Raises
        `InvalidRequest`, whose `field` names the file that is missing or not as listed;
        `LeaseLost` when the files may have been collected; `LoadUnknown` when the load may have
        been committed longer ago than is remembered; and the errors of every write.
        """
        request = admin_pb2.IngestSstRequest(load_id=load_id, ssts=ssts)
        size_bytes = request.ByteSize()
        if size_bytes > self._message_bytes_max:
            raise too_large(self.address, "IngestSst", size_bytes, self._message_bytes_max)
        if timeout_ms is None:
            timeout_ms = self._timeout_ms + PER_FILE_MS * len(request.ssts)
        elif timeout_ms <= 0:
            raise ValueError(f"timeout_ms must be positive, not {timeout_ms}")
        reply = await self.fleet.unary(
            _INGEST,
            request,
            destination=Destination.WRITER,
            is_repeatable=True,
            timeout_ms=timeout_ms,
        )
        header = reply.header
        wal_id = header.wal_id if header.HasField("wal_id") else None
        return Ingested(header.seq, wal_id, reply.already_applied)
