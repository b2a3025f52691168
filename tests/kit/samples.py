"""Entries, properties and whole SSTs for the tests of the format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from shalekv.errors import CorruptObject
from shalekv.format.block_frame import Codec
from shalekv.format.coding import MAX_U64
from shalekv.format.filter import BITS_PER_KEY, FilterKeys
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name, wal_name
from shalekv.format.records import record_key
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind

DATABASE_ID = bytes(range(16))
SST_ID = bytes.fromhex("0198c0de000070008000000000000001")
WAL_NAME = wal_name(7)
LEVEL_NAME = level_name(SST_ID)


def properties(name: str = WAL_NAME) -> SstProperties:
    return SstProperties(
        name=name,
        database_id=DATABASE_ID,
        writer_epoch=3,
        writer_nonce=b"nonce of writer!",
        write_id=b"identifies bytes",
        logical_time_ms=1_700_000_000_000,
    )


def build_filter(keys: Iterable[bytes], bits_per_key: float = BITS_PER_KEY) -> bytes:
    """The filter of these keys; adjacent versions of one key count once."""
    filter_keys = FilterKeys(bits_per_key)
    filter_keys.add(keys)
    return filter_keys.build()


def put(key: bytes, seq: int, value: bytes = b"", expire_at_ms: int = 0) -> Entry:
    return Entry(key, seq, Kind.PUT, value, expire_at_ms)


def tombstone(key: bytes, seq: int) -> Entry:
    return Entry(key, seq, Kind.TOMBSTONE)


def range_tombstone(start: bytes, end: bytes, seq: int) -> Entry:
    return Entry(start, seq, Kind.RANGE_TOMBSTONE, end)


POINTS = [
    put(b"", 4, b"the empty key"),
    put(b"apple", 9, b"newest"),
    tombstone(b"apple", 5),
    put(b"apple", 1, b"oldest"),
    put(b"banana", 2, b"", 1_800_000_000_000),
    tombstone(b"cherry", 3),
    put(b"\xff\xff", 8, b"\x00" * 20),
]
RANGES = [range_tombstone(b"b", b"d", 6), range_tombstone(b"x", b"", 7)]
SYSTEM = [
    put(record_key(b"k"), 9, b"a record of 24 bytes, so", 1_700_086_400_000),
    tombstone(record_key(b"l"), 3),
]


def sample(
    name: str = WAL_NAME,
    *,
    block_bytes: int = 24,
    filter_bytes: bytes = b"",
    codec: Codec = Codec.NONE,
    filter_bits_per_key: float | None = None,
) -> bytes:
    """An SST with every feature of the format, in several blocks."""
    return encode_sst(
        properties(name),
        POINTS,
        RANGES,
        SYSTEM,
        block_bytes=block_bytes,
        filter_bytes=filter_bytes,
        codec=codec,
        filter_bits_per_key=filter_bits_per_key,
    )


def opened(data: bytes, name: str = WAL_NAME) -> Sst:
    return open_sst(name, data, database_id=DATABASE_ID)


def refusal(read: Callable[[], object]) -> CorruptObject | None:
    """The typed error that reading ends in, if it does; any other error is a failure."""
    try:
        read()
    except CorruptObject as error:
        return error
    return None


def in_order(entries: list[Entry]) -> list[Entry]:
    """The entries as an SST holds them; of equal key and sequence number, one."""
    unique = {(entry.key, entry.seq): entry for entry in entries}
    return sorted(unique.values(), key=lambda entry: (entry.key, -entry.seq))


# Few different keys, so that versions, prefixes and neighbours are frequent.
keys = st.binary(max_size=3) | st.sampled_from([b"k", b"k\x00", b"k\x00\x00", b"\xff" * 4])
seqs = st.integers(0, 5) | st.integers(0, MAX_U64)
puts = st.builds(put, keys, seqs, st.binary(max_size=40), st.just(0) | st.integers(0, MAX_U64))
points = st.lists(puts | st.builds(tombstone, keys, seqs), max_size=30).map(in_order)
ranges = st.lists(
    st.builds(range_tombstone, keys, keys, seqs).filter(
        lambda entry: not entry.value or entry.key < entry.value
    ),
    max_size=6,
).map(in_order)

# System keys, most of which differ from their neighbour in the last byte only.
system_keys = st.builds(
    record_key,
    st.binary(min_size=1, max_size=3) | st.binary(max_size=64).map(lambda key: b"k" + key[1:]),
)
system = st.lists(
    st.builds(put, system_keys, seqs, st.binary(max_size=40), st.just(0) | st.integers(0, MAX_U64))
    | st.builds(tombstone, system_keys, seqs),
    max_size=12,
).map(in_order)
