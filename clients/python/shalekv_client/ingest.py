"""Loads: SST files that were written into the object store beforehand become one commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shalekv.v1 import admin_pb2, manifest_pb2
from shalekv_client.error_table import too_large
from shalekv_client.fleet import Fleet
from shalekv_client.operations import Method
from shalekv_client.policies import Destination
from shalekv_client.servers import Server

PER_FILE_MS = 20  # added to the time of a call: the writer looks at each file before it commits


@dataclass(frozen=True, slots=True)
class Ingested:
    """A load that is committed."""

    seq: int  # the one sequence number of all of it; of a stream's batch that of a later one, maybe
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
        """Commit files that stand ready in the folder of the levels, in the order of their keys.

        They become one commit, which is newer than all that was written before, and older than
        what is written next. `load_id`, 1 to 256 bytes, says which load this is: the same one is
        committed once, however often it is asked for, which is why an attempt without an answer is
        repeated. Ids of the form ``<stream>-<number>`` are batches, which come in order: with one
        of them all before it count as committed.

        Without `timeout_ms` a call has that of the client and some more for each file. Raises
        `InvalidRequest`, whose `field` names the file that is missing or not as it is listed;
        `LeaseLost` when the files may have been collected; `LoadUnknown` when the load may have
        been committed longer ago than is remembered; and what every write raises.
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
            _ingest,
            request,
            destination=Destination.WRITER,
            is_repeatable=True,
            timeout_ms=timeout_ms,
        )
        header = reply.header
        wal_id = header.wal_id if header.HasField("wal_id") else None
        return Ingested(header.seq, wal_id, reply.already_applied)


def _ingest(server: Server) -> Method[admin_pb2.IngestSstRequest, admin_pb2.IngestSstReply]:
    return server.admin.IngestSst
