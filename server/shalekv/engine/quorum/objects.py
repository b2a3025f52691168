"""The objects of the archive: what the records of one are as the bytes of one SST.

The bytes are a function of the records alone, so that any safekeeper may archive, and whoever comes
second finds what it wanted to write (CE16). No setting is asked, no clock, nothing is drawn. So
these may never change:

- one record with a payload: its payload, byte by byte. Records without one leave no trace.
- several: the entries of all their SSTs, section by section, by key and then newest first; every
  version stays, since watches are told of each commit.
- name, database, epoch, nonce, write id and logical time are those of the last SST.
- no filter. Blocks of `MERGED_BLOCK_BYTES` before compression, with the codec of the first block
  of the records that is compressed; without one, nothing is.

What compresses is a library, of which another version may find other bytes for the same block. So
bytes that differ are compared once more by what they say: see `says_the_same`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter

from shalekv.errors import BadStructure, CorruptObject
from shalekv.format.block_frame import Codec, codec_of
from shalekv.format.footer import SstProperties
from shalekv.format.footer_codec import read_footer
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.quorum_records import Record

MERGED_BLOCK_BYTES = 64 << 10

# The entries of each section, in the order in which `encode_sst` takes them.
SECTIONS: Sequence[Callable[[Sst], Iterator[Entry]]] = (
    Sst.entries,
    Sst.range_tombstones,
    Sst.system_entries,
    Sst.control_entries,
)
_KEY = itemgetter(0)  # of an Entry
_WRITTEN = attrgetter("properties", "footer.contents")


def object_bytes(name: str, records: Sequence[Record]) -> bytes:
    """The object `name`, which these records make: all of it, in the order of the log.

    Takes some milliseconds for a megabyte: run it in a worker. Raises `CorruptObject` when a
    payload is no WAL object of this name, when two are of different databases, when sequence
    numbers don't rise from record to record, and when there is nothing in them.
    """
    payloads = [record.payload for record in records if record.payload]
    if not payloads:
        raise BadStructure(name, 0, f"none of its {len(records)} records has a payload")
    last = open_sst(name, payloads[-1], database_id=None)
    if len(payloads) == 1:
        return payloads[0]
    database_id = last.properties.database_id
    ssts = [*(open_sst(name, each, database_id=database_id) for each in payloads[:-1]), last]
    _check_order(name, ssts)
    try:
        return encode_sst(
            last.properties,
            *(_merged(map(entries, ssts)) for entries in SECTIONS),
            block_bytes=MERGED_BLOCK_BYTES,
            codec=_codec(ssts),
        )
    except ValueError as error:
        raise BadStructure(name, 0, f"its records don't follow each other: {error}") from error


def last_properties(name: str, records: Iterable[Record]) -> SstProperties:
    """What the object `name` says of itself, by the last records of it. As `object_bytes`."""
    payloads = [record.payload for record in records if record.payload]
    if not payloads:
        raise BadStructure(name, 0, "none of its last records has a payload")
    data = payloads[-1]
    return read_footer(name, data, len(data), database_id=None).properties


def says_the_same(name: str, one: bytes, other: bytes) -> bool:
    """Whether two objects of this name are the same SST, in blocks that may be stored otherwise.

    The write id is a part of that: two that were not made from the same records differ. What can't
    be decoded is the same as nothing else.
    """
    try:
        ssts = [open_sst(name, each, database_id=None) for each in (one, other)]
        first, second = ((_WRITTEN(sst), *map(list, _all_entries(sst))) for sst in ssts)
    except CorruptObject:
        return False
    return first == second


def _all_entries(sst: Sst) -> Iterable[Iterator[Entry]]:
    return (entries(sst) for entries in SECTIONS)


def _check_order(name: str, ssts: Iterable[Sst]) -> None:
    last_seq = 0
    for contents in (sst.footer.contents for sst in ssts if sst.footer.contents.entry_count):
        if contents.min_seq <= last_seq:
            problem = f"a record begins with sequence number {contents.min_seq}, behind {last_seq}"
            raise BadStructure(name, 0, problem)
        last_seq = contents.max_seq


def _merged(runs: Iterable[Iterator[Entry]]) -> list[Entry]:
    """By key, and then newest first; later runs are newer."""
    newest_first = reversed([list(run) for run in runs])
    return sorted(chain.from_iterable(newest_first), key=_KEY)  # stable


def _codec(ssts: Iterable[Sst]) -> Codec:
    """That of the first block that is compressed."""
    for sst in ssts:
        for handle in sst.index:
            codec = codec_of(sst.data, handle.offset)
            if codec is not Codec.NONE:
                return codec
    return Codec.NONE
