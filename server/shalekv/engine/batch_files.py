"""A large batch as SSTs of the levels, encoded before its sequence number is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.section import Section
from shalekv.format.sst_writer import FinishedSst, SstWriter
from shalekv.protocol.lease import leased_sst_id
from shalekv.protocol.opening import WriterId
from shalekv.protocol.transaction import Change
from shalekv.settings import LevelSettings

ROWS_AT_ONCE = 512
WRITE_ID_BYTES = 16
SST_RANDOM_BYTES = 8
_KEY = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Authorship:
    """Who writes files, of which database, under ids of which stem, and as of which time."""

    database_id: bytes
    own: WriterId
    stem_id: bytes  # as the id of a lease: the ids of the files derive from it
    logical_time_ms: int


def encode_batch(
    changes: Sequence[Change],
    author: Authorship,
    settings: LevelSettings,
    random_bytes: Callable[[int], bytes],
) -> list[FinishedSst]:
    """The SSTs of these changes, by key; an SST is closed when it has `sst_bytes`.

    Takes about 3 us for a change: call it off the event loop. REQUIRES: there is a change, and
    each key stands once.
    """
    ordered = sorted(changes, key=_KEY)
    ends = [*accumulate((len(each.key) + len(each.value) for each in ordered), initial=0)]
    finished: list[FinishedSst] = []
    begin = 0
    while begin < len(ordered):
        writer = _begin(author, settings, random_bytes)
        while begin < len(ordered) and writer.size_bytes < settings.sst_bytes:
            room_bytes = settings.sst_bytes - writer.size_bytes
            stop = max(bisect_right(ends, ends[begin] + room_bytes) - 1, begin + 1)
            stop = min(stop, begin + ROWS_AT_ONCE)
            keys, kinds, values, expire_at_ms = zip(*ordered[begin:stop], strict=True)
            seqs = [UNNUMBERED] * len(keys)
            writer.add(Section.POINTS, Columns(keys, seqs, bytes(kinds), values, expire_at_ms))
            begin = stop
        finished.append(writer.finish())
    return finished


def _begin(
    author: Authorship, settings: LevelSettings, random_bytes: Callable[[int], bytes]
) -> SstWriter:
    sst_id = leased_sst_id(author.stem_id, random_bytes(SST_RANDOM_BYTES))
    properties = SstProperties(
        name=level_name(sst_id),
        database_id=author.database_id,
        writer_epoch=author.own.epoch,
        writer_nonce=author.own.nonce,
        write_id=random_bytes(WRITE_ID_BYTES),
        logical_time_ms=author.logical_time_ms,
    )
    return SstWriter(
        properties,
        block_bytes=settings.block_bytes,
        codec=Codec[settings.codec.name],
        filter_bits_per_key=settings.filter_bits or None,
    )
