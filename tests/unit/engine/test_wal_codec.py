"""Compression of the WAL: a setting of the writer that no reader needs to know."""

from __future__ import annotations

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.engine.commit import WalContents
from shalekv.engine.wal import encode_wal
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.sst import open_sst
from shalekv.settings import WalCodec, WriterSettings
from tests.kit.engine.databases import Database, contents
from tests.kit.samples import RANGES, SYSTEM, properties

ENTRIES = [Entry(b"key %04d" % n, 7, Kind.PUT, b"value %04d" % n * 9) for n in range(500)]


@pytest.mark.parametrize("codec", list(Codec))
def test_a_wal_object_comes_back(codec: Codec) -> None:
    """Points, range tombstones and records come back whatever the codec, from fewer bytes."""
    parts = WalContents(ENTRIES, RANGES, SYSTEM)
    data = encode_wal(properties(names.wal_name(1)), parts, 4_096, codec)
    sst = open_sst(names.wal_name(1), data, database_id=None)
    sst.audit()
    assert list(sst.entries()) == ENTRIES
    assert list(sst.range_tombstones()) == RANGES
    assert list(sst.system_entries()) == SYSTEM
    plain = encode_wal(properties(names.wal_name(1)), parts, 4_096)
    assert (data == plain) == (codec is Codec.NONE)
    assert len(data) < len(plain) / 2 or codec is Codec.NONE


async def test_objects_of_all_codecs_are_replayed() -> None:
    """A WAL whose writers compressed differently is replayed whole, by a writer of any setting."""
    database = await Database.created()
    expected: dict[bytes, bytes] = {}
    for number, codec in enumerate([*WalCodec, *reversed(WalCodec)]):
        opened = await database.open(wal_codec=codec)
        assert contents(opened) == sorted(expected.items())
        seq = opened.first_seq
        entries = [
            Entry(b"key %04d" % n, seq, Kind.PUT, b"%d" % number * 50) for n in range(number, 99)
        ]
        wal_id = opened.last_wal_id + 1
        assert await opened.slots.create(wal_id, WalContents(entries), position=0) is None
        assert database.data(names.wal_name(wal_id))[0] == Codec[codec.name]
        expected |= {entry.key: entry.value for entry in entries}
    assert contents(await database.open()) == sorted(expected.items())


def test_nothing_is_compressed_unless_asked_for() -> None:
    """By default WAL objects are as version 0.1 reads them; each setting has its codec."""
    assert WriterSettings().wal_codec is WalCodec.NONE
    assert {codec.name for codec in WalCodec} == {codec.name for codec in Codec}
