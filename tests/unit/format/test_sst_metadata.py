"""Footer, index and filter come in one piece, and are what the manifest speaks of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import Entry
from shalekv.core.sst_table import SstInfo
from shalekv.errors import WrongObject
from shalekv.format.block_frame import Codec
from shalekv.format.sst import read_block
from shalekv.format.sst_encode import encode_sst
from shalekv.format.sst_metadata import SstMetadata, metadata_range, read_metadata
from tests.kit.forging import patched, resealed
from tests.kit.samples import (
    DATABASE_ID,
    LEVEL_NAME,
    SST_ID,
    opened,
    points,
    properties,
    ranges,
    sample,
    system,
)

DATA = sample(LEVEL_NAME, codec=Codec.ZSTD, filter_bits_per_key=10)
INFO = opened(DATA, LEVEL_NAME).footer.info(1)


def fetched(data: bytes, info: SstInfo, *, with_filter: bool = True) -> bytes:
    """What one request brings."""
    start, length = metadata_range(info, with_filter=with_filter)
    return data[start : start + length]


def read(data: bytes, info: SstInfo = INFO, *, with_filter: bool = True) -> SstMetadata:
    """The metadata in what was fetched."""
    return read_metadata(info, data, database_id=DATABASE_ID, with_filter=with_filter)


@given(
    points,
    ranges,
    system,
    st.sampled_from([None, 10.0]),
    st.sampled_from([Codec.NONE, Codec.LZ4]),
    st.booleans(),
)
def test_one_request_brings_all(
    entries: list[Entry],
    range_tombstones: list[Entry],
    records: list[Entry],
    bits: float | None,
    codec: Codec,
    with_filter: bool,  # noqa: FBT001 - hypothesis passes it
) -> None:
    """One range of an SST holds footer, index and filter, which are those of the whole object."""
    data = encode_sst(
        properties(LEVEL_NAME),
        entries,
        range_tombstones,
        records,
        block_bytes=30,
        codec=codec,
        filter_bits_per_key=bits,
    )
    whole = opened(data, LEVEL_NAME)
    info = whole.footer.info(3)
    part = fetched(data, info, with_filter=with_filter)
    assert data.endswith(part)
    found = read(part, info, with_filter=with_filter)
    assert (found.footer, found.index) == (whole.footer, whole.index)
    has_filter = with_filter and bits is not None and whole.footer.contents.entry_count > 0
    assert (found.filter is not None) == has_filter
    if found.filter is not None:
        assert all(found.filter.may_contain(entry.key) for entry in entries)
    blocks = [
        read_block(found.index, number, data[handle.offset : handle.offset + handle.length])
        for number, handle in enumerate(found.index)
    ]
    assert blocks == [whole.decode_block(number) for number in range(len(whole.index))]


@pytest.mark.parametrize(
    "change",
    [
        {"checksum": INFO.checksum ^ 1},
        {"filter_offset": INFO.filter_offset + 8, "filter_len": INFO.filter_len - 8},
        {"block_meta_offset": INFO.block_meta_offset + 8},
        {"block_meta_len": INFO.block_meta_len - 8},
        {"filter_len": 0},
        {"id": SST_ID[:-1] + b"\x09"},
    ],
)
def test_what_the_manifest_does_not_speak_of_is_refused(change: dict[str, int | bytes]) -> None:
    """An object that is intact, but not as the manifest lists it, is refused."""
    info = replace(INFO, **change)  # type: ignore[arg-type]
    with pytest.raises(WrongObject):
        read(fetched(DATA, info), info)


def test_a_filter_of_a_later_kind_is_none() -> None:
    """What this version can't ask is not there, and everything else is."""
    forged = resealed(LEVEL_NAME, DATA, patched(DATA, INFO.filter_offset, b"\x07"))
    info = opened(forged, LEVEL_NAME).footer.info(1)
    found = read(fetched(forged, info), info)
    assert found.filter is None
    assert len(found.index) == len(opened(DATA, LEVEL_NAME).index)
