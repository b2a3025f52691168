"""Names of objects, in databases and in repositories of backups."""

from __future__ import annotations

from collections.abc import Callable

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
from tests.kit.samples import SST_ID

BACKUP_ID = new_backup_id(1_769_832_000_123, b"rand")


def text_of(data: bytes) -> str:
    """Bytes as the text of a name, whatever they are."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _named(parse: Callable[[str], object], *samples: str) -> Decoder:
    return Decoder(
        name=parse.__name__,
        covers=(parse,),
        decode=lambda data: parse(text_of(data)),
        samples=[sample.encode() for sample in samples],
        errors=(),
        refused=None,
    )


DECODERS = (
    _named(parse_manifest_name, manifest_name(0), manifest_name(2**64 - 1)),
    _named(parse_wal_name, wal_name(7), wal_name(2**64 - 1)),
    _named(parse_election_name, election_name(7)),
    _named(parse_level_name, level_name(SST_ID)),
    _named(parse_temporary_name, str(TemporaryName(wal_name(7), SST_ID, 0xC0FFEE))),
    _named(parse_backup_name, backup_name(BACKUP_ID)),
    _named(parse_mark, str(Mark(BACKUP_ID, Work.CREATION))),
    _named(parse_copy, str(LevelCopy(SST_ID, 0xC0FFEE)), str(WalCopy(7, b"identifies bytes", 1))),
    Decoder(
        name="id of a backup",
        covers=(is_backup_id,),
        decode=lambda data: is_backup_id(text_of(data)),
        samples=[BACKUP_ID.encode()],
        errors=(),
        refused=False,
    ),
)
