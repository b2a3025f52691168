"""`IngestSst` refuses what cannot be a load, naming the field that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.loads import check_load_id
from shalekv.core.sst_table import SstInfo
from shalekv.errors import InvalidRequest
from shalekv.format.sst_message import info_message
from shalekv.roles.ingests import Ingests, file_infos
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.loading import file_of, loading
from tests.unit.format.test_load_record import info

GOOD = [info(0, b"a", b"b"), info(1, b"c", b"d")]


def request(*infos: SstInfo, load_id: str = "x", key: bytes = b"") -> admin_pb2.IngestSstRequest:
    """A request to load these files."""
    return admin_pb2.IngestSstRequest(
        header=kv_pb2.RequestHeader(idempotency_key=key),
        load_id=load_id,
        ssts=map(info_message, infos),
    )


def header(seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
    """The header of a reply."""
    return kv_pb2.ReplyHeader(seq=seq, wal_id=wal_id)


async def test_a_load_is_committed_once() -> None:
    """The reply tells the number and object of the load; a repeat, that it was applied before."""
    database = await Database.created()
    sst = await file_of(database, 1, [Entry(b"a", 0, Kind.PUT, b"1")])
    async with loading(database) as writer:
        ingests = Ingests(writer.loads, header)
        first = await ingests.ingest_sst(request(sst))
        again = await ingests.ingest_sst(request(sst))
    [(load, _)] = writer.landed
    assert (first.header.seq, first.header.wal_id) == (load.seq, load.wal_id)
    assert not first.already_applied
    assert again.already_applied
    assert again.header.seq == load.seq
    assert not again.header.HasField("wal_id")


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (request(*GOOD, load_id=""), "load_id"),
        (request(*GOOD, load_id="\u00e4" * 129), "load_id"),
        (request(*GOOD, load_id="shalekv:batch:1"), "load_id"),
        (request(*GOOD, key=b"k"), "header.idempotency_key"),
        (request(), "ssts"),
        (request(GOOD[1], GOOD[0]), "ssts[1]"),
        (request(GOOD[0], GOOD[0]), "ssts[1]"),
        (request(GOOD[0], replace(GOOD[1], first_key=b"b")), "ssts[1]"),
        (request(replace(GOOD[0], level=1)), "ssts[0]"),
        (request(replace(GOOD[0], level=99)), "ssts[0]"),
        (request(replace(GOOD[0], min_seq=1, max_seq=1)), "ssts[0]"),
        (request(replace(GOOD[0], size_bytes=0)), "ssts[0]"),
        (request(GOOD[0], replace(GOOD[1], id=b"short")), "ssts[1].id"),
        (request(GOOD[0], replace(GOOD[1], id=bytes(16))), "ssts[1].id"),
    ],
)
async def test_requests_are_checked(sent: admin_pb2.IngestSstRequest, field: str) -> None:
    """What cannot be a load is refused before the store is asked for anything."""
    database = await Database.created()
    async with loading(database) as writer:
        with pytest.raises(InvalidRequest) as caught:
            await Ingests(writer.loads, header).ingest_sst(sent)
        assert caught.value.field == field
        assert writer.store.creates == 0


@pytest.mark.parametrize("version", [0, 2])
def test_versions_of_a_listing_are_checked(version: int) -> None:
    """A listing of a version that does not exist here is refused."""
    message = info_message(GOOD[0])
    message.sstinfo_format_version = version
    with pytest.raises(InvalidRequest, match=r"ssts\[0\].*version"):
        file_infos([message])


def test_ids_have_a_length_in_bytes() -> None:
    """The longest id has 256 bytes, however few characters."""
    assert check_load_id("\u00e4" * 128) == "\u00e4" * 128
    assert check_load_id("x") == "x"
