"""Object names are built and parsed without a doubt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.format import names

ids = st.integers(0, names.MAX_ID)
uuids = st.binary(min_size=16, max_size=16).map(
    lambda raw: raw[:6] + bytes([raw[6] & 0x0F | 0x70, raw[7], raw[8] & 0x3F | 0x80]) + raw[9:]
)

FOREIGN = [
    "",
    "wal/",
    "wal/7.sst",
    "wal/0000000000000000007.sst",  # 19 digits
    "wal/000000000000000000007.sst",  # 21 digits
    "wal/18446744073709551616.sst",  # 2^64
    "wal/99999999999999999999.sst",
    "wal/-0000000000000000007.sst",
    "wal/+0000000000000000007.sst",
    "wal/0000000000000000000_7.sst",
    "wal/00000000000000000007.SST",
    "wal/00000000000000000007.sst.tmp",
    "wal/00000000000000000007.sst\n",
    " wal/00000000000000000007.sst",
    "/wal/00000000000000000007.sst",
    "x/wal/00000000000000000007.sst",
    "wal//00000000000000000007.sst",
    "wal/00000000000000000007xsst",
    "wal/" + "\u0660" * 19 + "\u0667.sst",  # Arabic digits
    "manifest/00000000000000000007.sst",
    "manifest/00000000000000000007.manifest~",
    "wal/00000000000000000007.manifest",
    "levels/0198c0de-0000-7000-8000-000000000001",
    "levels/0198c0de-0000-7000-8000-00000000001.sst",
    "levels/0198C0DE-0000-7000-8000-000000000001.sst",  # upper case
    "levels/0198c0de-0000-4000-8000-000000000001.sst",  # version 4
    "levels/0198c0de-0000-7000-c000-000000000001.sst",  # another variant
    "levels/0198c0de000070008000000000000001.sst",
    "levels/{0198c0de-0000-7000-8000-000000000001}.sst",
]


def parsed(name: str) -> list[int | bytes]:
    """What each of the parsers that recognise a name makes of it."""
    found = (
        names.parse_manifest_name(name),
        names.parse_wal_name(name),
        names.parse_level_name(name),
    )
    return [result for result in found if result is not None]


@given(ids)
def test_numbered_names_come_back(number: int) -> None:
    """The name of an id is parsed as that id, by the parser of its folder alone."""
    assert parsed(names.manifest_name(number)) == [number]
    assert parsed(names.wal_name(number)) == [number]


@given(uuids)
def test_level_names_come_back(sst_id: bytes) -> None:
    """The name of a UUID is parsed as that UUID, by the parser of its folder alone."""
    assert parsed(names.level_name(sst_id)) == [sst_id]


def test_names_are_those_of_the_specification() -> None:
    """Names are spelled as server/docs/formats.md says."""
    assert names.manifest_name(0) == "manifest/00000000000000000000.manifest"
    assert names.wal_name(names.MAX_ID) == "wal/18446744073709551615.sst"
    sst_id = bytes.fromhex("0198c0de12347abc9def0123456789ab")
    assert names.level_name(sst_id) == "levels/0198c0de-1234-7abc-9def-0123456789ab.sst"


@given(ids, ids)
def test_names_order_as_their_ids(one: int, other: int) -> None:
    """A store that lists names in the order of their bytes lists ids in their order."""
    assert (names.wal_name(one) < names.wal_name(other)) == (one < other)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_names_are_not_misread(name: str) -> None:
    """A name that only resembles ours belongs to nobody."""
    assert parsed(name) == []


@given(st.text() | st.from_regex(r"(wal|manifest|levels)/[0-9a-f-]{18,38}\.(sst|manifest)"))
def test_a_name_has_one_spelling(name: str) -> None:
    """Whatever is parsed is built again as the very same name."""
    builders = (names.manifest_name, names.wal_name)
    parsers = (names.parse_manifest_name, names.parse_wal_name)
    for build, parse in zip(builders, parsers, strict=True):
        number = parse(name)
        assert number is None or build(number) == name
    sst_id = names.parse_level_name(name)
    assert sst_id is None or names.level_name(sst_id) == name


@pytest.mark.parametrize("number", [-1, 2**64])
def test_ids_beyond_64_bits_have_no_name(number: int) -> None:
    """An id that is not a 64-bit number is refused when a name is built."""
    with pytest.raises(ValueError, match="64"):
        names.wal_name(number)
    with pytest.raises(ValueError, match="64"):
        names.manifest_name(number)


@pytest.mark.parametrize("sst_id", [b"", bytes(15), bytes(16), bytes(17), b"\xff" * 16])
def test_other_uuids_have_no_name(sst_id: bytes) -> None:
    """Only a UUID of version 7 names an SST of the levels."""
    with pytest.raises(ValueError, match="version 7"):
        names.level_name(sst_id)


@given(st.from_regex(r"[a-z]{1,9}/[a-z0-9.]{1,20}", fullmatch=True), st.binary(), ids)
def test_temporary_names_come_back(destination: str, noise: bytes, number: int) -> None:
    """The name of a temporary object says what it is to be copied to, and is none of ours."""
    uuid, checksum = (noise + bytes(16))[:16], number % 2**32
    name = names.temporary_name(destination, uuid, checksum)
    found = names.parse_temporary_name(name)
    assert found == names.TemporaryName(destination, uuid, checksum)
    assert str(found) == name
    assert parsed(name) == []


def test_temporary_names_are_those_of_the_specification() -> None:
    """`<destination>.<uuid>.<checksum>`: a name of anything else is not temporary."""
    uuid = bytes.fromhex("0198c0de12344abc9def0123456789ab")
    name = names.temporary_name(names.wal_name(7), uuid, 0xABC)
    assert name == ("wal/00000000000000000007.sst.0198c0de-1234-4abc-9def-0123456789ab.00000abc")
    for foreign in ("wal/1.sst", name + "0", name.upper(), name[:-1], "." + name[29:]):
        assert names.parse_temporary_name(foreign) is None
    with pytest.raises(ValueError, match="16 bytes"):
        names.temporary_name("wal/1", bytes(15), 0)
    with pytest.raises(ValueError, match="16 bytes"):
        names.temporary_name("wal/1", bytes(16), 2**32)
