"""Names of objects, in databases and in repositories of backups."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from shalekv.format.backup_names import (
    LevelCopy,
    Mark,
    WalCopy,
    Work,
    backup_name,
    is_backup_id,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.format.names import (
    TemporaryName,
    election_name,
    level_name,
    manifest_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_temporary_name,
    parse_wal_name,
    wal_name,
)
from tests.fuzz.decoders.decoder import Decoder
from tests.kit.manifests import ids, u32s, u64s
from tests.kit.samples import SST_ID

MILLISECONDS_MAX = 253_402_300_799_999  # the end of the year 9999

uuids7 = st.builds(
    lambda head, a, tail, b: head + bytes([0x70 | a]) + tail[:1] + bytes([0x80 | b]) + tail[1:],
    st.binary(min_size=6, max_size=6),
    st.integers(0, 15),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 63),
)
backup_ids = st.builds(
    new_backup_id, st.integers(0, MILLISECONDS_MAX), st.binary(min_size=4, max_size=4)
)
copies = st.builds(LevelCopy, uuids7, u32s) | st.builds(WalCopy, u64s, ids, u32s)
marks = st.builds(Mark, backup_ids, st.sampled_from(Work))
temporary = st.builds(TemporaryName, st.builds(wal_name, u64s), ids, u32s)

BACKUP_ID = new_backup_id(1_769_832_000_123, b"rand")


def text_of(data: bytes) -> str:
    """Bytes as the text of a name, whatever they are."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _named(
    name: str,
    parse: Callable[[str], object],
    samples: list[str],
    encodings: st.SearchStrategy[tuple[str, object]],
) -> Decoder:
    return Decoder(
        name=name,
        covers=(parse,),
        decode=lambda data: parse(text_of(data)),
        samples=[sample.encode() for sample in samples],
        errors=(),
        refused=None,
        encodings=encodings.map(lambda made: (made[0].encode(), made[1])),
    )


DECODERS = (
    _named(
        "name of a manifest",
        parse_manifest_name,
        [manifest_name(0), manifest_name(2**64 - 1)],
        u64s.map(lambda id_: (manifest_name(id_), id_)),
    ),
    _named(
        "name of a WAL object",
        parse_wal_name,
        [wal_name(7), wal_name(2**64 - 1)],
        u64s.map(lambda id_: (wal_name(id_), id_)),
    ),
    _named(
        "name of a lease",
        parse_election_name,
        [election_name(7)],
        u64s.map(lambda id_: (election_name(id_), id_)),
    ),
    _named(
        "name of an SST of the levels",
        parse_level_name,
        [level_name(SST_ID)],
        uuids7.map(lambda id_: (level_name(id_), id_)),
    ),
    _named(
        "name of a temporary object",
        parse_temporary_name,
        [str(TemporaryName(wal_name(7), SST_ID, 0xC0FFEE))],
        temporary.map(lambda each: (str(each), each)),
    ),
    _named(
        "name of a backup",
        parse_backup_name,
        [backup_name(BACKUP_ID)],
        backup_ids.map(lambda id_: (backup_name(id_), id_)),
    ),
    _named(
        "name of a mark",
        parse_mark,
        [str(Mark(BACKUP_ID, Work.CREATION))],
        marks.map(lambda each: (str(each), each)),
    ),
    _named(
        "name of a copy",
        parse_copy,
        [str(LevelCopy(SST_ID, 0xC0FFEE)), str(WalCopy(7, b"identifies bytes", 1))],
        copies.map(lambda each: (str(each), each)),
    ),
    Decoder(
        name="id of a backup",
        covers=(is_backup_id,),
        decode=lambda data: is_backup_id(text_of(data)),
        samples=[BACKUP_ID.encode()],
        errors=(),
        refused=False,
    ),
)
