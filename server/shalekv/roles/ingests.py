"""`Admin.IngestSst` at a writer: files that stand ready in the object store become one commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from shalekv.errors import CorruptObject, InvalidRequest
from shalekv.format.coding import Piece
from shalekv.format.names import is_uuid7
from shalekv.format.sst_message import info_of
from shalekv.protocol.loads import check_load_id, files_problem
from shalekv.protocol.sst_table import SstInfo
from shalekv.server import requests
from shalekv.v1 import admin_pb2, kv_pb2, manifest_pb2
from shalekv.write.ingest import Loads

Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


class Ingests:
    """Answers `IngestSst`."""

    def __init__(self, loads: Loads, header: Header) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id."""
        self._loads = loads
        self._header = header

    async def ingest_sst(self, request: admin_pb2.IngestSstRequest) -> admin_pb2.IngestSstReply:
        """Commit the files, unless the load was committed before.

        A call that ends early, by its deadline too, has committed the load, or will not.
        """
        check_header(request.header)
        load_id = check_load_id(request.load_id)
        loaded = await self._loads.ingest(load_id, file_infos(request.ssts))
        return admin_pb2.IngestSstReply(
            header=self._header(loaded.seq, loaded.wal_id), already_applied=loaded.already_applied
        )


def check_header(header: kv_pb2.RequestHeader) -> None:
    """The header of a load, whose id takes the place of an idempotency key."""
    requests.check_header(header)
    if header.idempotency_key:
        problem = "a load has its load_id for this: the same load is committed once"
        raise InvalidRequest("header.idempotency_key", problem)


def file_infos(messages: Sequence[manifest_pb2.SstInfo]) -> list[SstInfo]:
    """The files of a load, as they are listed."""
    if not messages:
        raise InvalidRequest("ssts", "at least one is needed")
    infos = []
    for at, message in enumerate(messages):
        try:
            info = info_of(message, Piece("the request", 0, b""))
        except (CorruptObject, ValueError) as error:
            raise InvalidRequest(f"ssts[{at}]", str(error)) from None
        if not is_uuid7(info.id):
            raise InvalidRequest(f"ssts[{at}].id", "is not a UUID of version 7, 16 bytes")
        infos.append(info)
    problem = files_problem(infos)
    if problem is not None:
        raise InvalidRequest(f"ssts[{problem[0]}]", problem[1])
    return infos
