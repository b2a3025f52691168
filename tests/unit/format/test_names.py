"""Names of objects, and descriptions of backups, are built and parsed without ambiguity."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadMagic, BadStructure, CorruptObject, UnsupportedVersion, WrongObject
from shalekv.format import names
from shalekv.format.backup import (
    RESTORATION_NAME,
    LevelCopy,
    WalCopy,
    backup_name,
    begun_ms,
    decode_backup,
    encode_backup,
    is_backup_id,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.format.coding import crc32c
from shalekv.protocol.lease import leased_sst_id, new_lease_id
from shalekv.store.api import check_new_name
from tests.kit.manifests import BACKUP
from tests.kit.policies import POLICY

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
    found = (
        names.parse_manifest_name(name),
        names.parse_wal_name(name),
        names.parse_level_name(name),
    )
    return [result for result in found if result is not None]


@given(ids, uuids)
def test_names_come_back(number: int, sst_id: bytes) -> None:
    """The name of an id is parsed as that id, and only by the parser of its folder."""
    assert parsed(names.manifest_name(number)) == [number]
    assert parsed(names.wal_name(number)) == [number]
    assert parsed(names.level_name(sst_id)) == [sst_id]


def test_names_are_those_of_the_specification() -> None:
    """Names are spelled as server/docs/formats.md says."""
    assert names.manifest_name(0) == "manifest/00000000000000000000.manifest"
    assert names.wal_name(names.MAX_ID) == "wal/18446744073709551615.sst"
    sst_id = bytes.fromhex("0198c0de12347abc9def0123456789ab")
    assert names.level_name(sst_id) == "levels/0198c0de-1234-7abc-9def-0123456789ab.sst"


@given(ids, ids)
def test_names_order_as_their_ids(one: int, other: int) -> None:
    """The byte order of names is the order of their ids."""
    assert (names.wal_name(one) < names.wal_name(other)) == (one < other)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_names_are_not_misread(name: str) -> None:
    """A name that only resembles an object name is not parsed."""
    assert parsed(name) == []


@given(st.text() | st.from_regex(r"(wal|manifest|levels)/[0-9a-f-]{18,38}\.(sst|manifest)"))
def test_a_name_has_one_spelling(name: str) -> None:
    """A name that is parsed is built again as the same name."""
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
    """The name of a temporary object has its destination, and is no other object's."""
    uuid, checksum = (noise + bytes(16))[:16], number % 2**32
    name = names.temporary_name(destination, uuid, checksum)
    found = names.parse_temporary_name(name)
    assert found == names.TemporaryName(destination, uuid, checksum)
    assert str(found) == name
    assert parsed(name) == []


def test_temporary_names_are_those_of_the_specification() -> None:
    """Only `<destination>.<uuid>.<checksum>` is the name of a temporary object."""
    uuid = bytes.fromhex("0198c0de12344abc9def0123456789ab")
    name = names.temporary_name(names.wal_name(7), uuid, 0xABC)
    assert name == ("wal/00000000000000000007.sst.0198c0de-1234-4abc-9def-0123456789ab.00000abc")
    for foreign in ("wal/1.sst", name + "0", name.upper(), name[:-1], "." + name[29:]):
        assert names.parse_temporary_name(foreign) is None
    with pytest.raises(ValueError, match="16 bytes"):
        names.temporary_name("wal/1", bytes(15), 0)
    with pytest.raises(ValueError, match="16 bytes"):
        names.temporary_name("wal/1", bytes(16), 2**32)


CHECKSUMS = st.integers(0, 2**32 - 1)
TIMES_MS = st.integers(0, 253_402_300_799_999)
WAL_COPIES = st.builds(
    WalCopy, st.integers(0, names.MAX_ID), st.binary(min_size=16, max_size=16), CHECKSUMS
)
LEVEL_COPIES = st.builds(
    LevelCopy,
    st.builds(
        lambda at, drawn: leased_sst_id(new_lease_id(at, drawn), drawn[2:]),
        st.integers(0, 2**47),
        st.binary(min_size=10, max_size=10),
    ),
    CHECKSUMS,
)


@given(WAL_COPIES | LEVEL_COPIES)
def test_the_name_of_a_copy_identifies_it(copy: WalCopy | LevelCopy) -> None:
    """The name of a copy is parsed back, is valid in every store, and is not one of a database."""
    assert parse_copy(str(copy)) == copy
    check_new_name(str(copy))
    folder = str(copy).partition("/")[0] + "/"
    assert folder not in {names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER}


@given(TIMES_MS, TIMES_MS, st.binary(min_size=4, max_size=4))
def test_ids_order_by_time(one_ms: int, other_ms: int, random_bytes: bytes) -> None:
    """Ids of backups are ordered by time, and have it to the millisecond."""
    one, other = new_backup_id(one_ms, random_bytes), new_backup_id(other_ms, random_bytes)
    assert (one < other) == (one_ms < other_ms)
    assert begun_ms(one) == one_ms
    assert is_backup_id(one)
    assert parse_backup_name(backup_name(one)) == one
    check_new_name(backup_name(one))


@pytest.mark.parametrize(
    "name",
    [
        "backup_wal/00000000000000000007.sst",
        "backup_wal/7.00000000000000000000000000000000.00000000.sst",
        "backup_wal/99999999999999999999.00000000000000000000000000000000.00000000.sst",
        "backup_levels/0198c0de-0000-4000-8000-000000000001.00000000.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.0000000.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.0000000A.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.00000000.sst.tmp",
        "wal/00000000000000000007.sst",
        "backups/20260230T040000123Z-1f2e3d4c.backup",
        "backups/20260131T040000123Z-1f2e3d4.backup",
        "backup_marks/20260131T040000123Z-1f2e3d4c.creation.20260230T040000123Z-1f2e3d4c",
        RESTORATION_NAME,
    ],
)
def test_other_names_are_not_parsed(name: str) -> None:
    """Names of other objects in a repository are not parsed."""
    assert (parse_copy(name), parse_backup_name(name), parse_mark(name)) == (None, None, None)


DATA = encode_backup(BACKUP)


def test_a_backup_is_read_back() -> None:
    """Every field of a backup is decoded as it was encoded."""
    assert decode_backup(BACKUP.name, DATA) == BACKUP
    assert BACKUP.size_bytes == 2**40 + 12
    assert BACKUP.begun_ms == 1_769_832_000_123


def test_a_backup_with_an_access_policy_is_of_version_2() -> None:
    """Older readers refuse it: they would restore it without. Others are written as before."""
    with_policy = replace(BACKUP, policy=replace(POLICY, secret=b""))
    data = encode_backup(with_policy)
    assert decode_backup(BACKUP.name, data) == with_policy
    assert (DATA[8:10], data[8:10]) == (b"\1\0", b"\2\0")
    assert b"policy" not in DATA


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [(0, b"ShaleMan", BadMagic), (8, b"\3\0", UnsupportedVersion), (10, b"\1", UnsupportedVersion)],
)
def test_other_versions_are_distinguished_from_damage(
    at: int, value: bytes, error: type[CorruptObject]
) -> None:
    """Another version, magic or flag is an error of its own, although the checksum is right."""
    changed = DATA[:at] + value + DATA[at + len(value) :]
    checksum = crc32c(changed[20:], crc32c(changed[:16]))
    with pytest.raises(error):
        decode_backup(BACKUP.name, changed[:16] + struct.pack("<I", checksum) + changed[20:])


def test_another_backup_under_the_name_is_refused() -> None:
    """An intact backup under the name of another one is refused."""
    other = replace(BACKUP, backup_id="20260131T040000123Z-00000000")
    with pytest.raises(WrongObject):
        decode_backup(backup_name(BACKUP.backup_id), encode_backup(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", "7"),
        ("seq", True),
        ("seq", None),
        ("manifest", "!"),
        ("manifest", ""),
        ("manifest_id", 8),
        ("copies", [["wal/00000000000000000007.sst", 1]]),
        ("copies", [["backup_wal/x", 1]]),
        ("copies", [[str(BACKUP.copies[0][0])]]),
        ("copies", None),
        ("database_id", None),
    ],
)
def test_wrong_fields_of_a_backup_are_refused(field: str, value: object) -> None:
    """A wrong field is an error, although the checksum is right."""
    fields = json.loads(DATA[20:]) | {field: value}
    body = json.dumps(fields).encode()
    header = DATA[:12] + struct.pack("<I", len(body))
    sealed = header + struct.pack("<I", crc32c(body, crc32c(header))) + body
    with pytest.raises((BadStructure, WrongObject)):
        decode_backup(BACKUP.name, sealed)
