"""Speed of writing and reading SSTs and manifests. Nothing is asserted about time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from shalekv.format.block import Block
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Section
from shalekv.format.filter import Filter, key_hash, parse_filter
from shalekv.format.footer import SstProperties
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import manifest_name, wal_name
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.bench.sizes import sized
from tests.kit.samples import build_filter

ENTRIES = sized(500_000, 2_000)
SSTS = sized(100_000, 200)
SNAPSHOTS = 1_000
PROBES = sized(100_000, 1_000)
BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
NAME = wal_name(0)
PROPERTIES = SstProperties(
    name=NAME, database_id=bytes(16), writer_epoch=1, writer_nonce=bytes(16), write_id=bytes(16)
)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def entries() -> Iterator[list[Entry]]:
    """Puts of 16-byte keys and 100-byte values."""
    rows = [Entry(b"%016d" % n, n, Kind.PUT, b"%0100d" % n) for n in range(ENTRIES)]
    gc.collect()
    gc.freeze()  # in a server, too, the collector does not traverse all rows for each that is added
    yield rows
    gc.unfreeze()


def best_s(work: Callable[[], object], repeats: int = 1) -> float:
    """The processor time of the shortest of some runs of `repeats` calls, in seconds for a call."""
    shortest = float("inf")
    for _ in range(sized(3, 1)):
        started = time.process_time()
        for _ in range(repeats):
            work()
        shortest = min(shortest, time.process_time() - started)
    return shortest / repeats


def consumed(rows: Iterator[Entry]) -> int:
    count = 0
    for _ in rows:
        count += 1
    return count


def read(data: bytes) -> int:
    """Opens an SST and reads all of its entries."""
    return consumed(open_sst(NAME, data, database_id=None).entries())


def columns(sst: Sst) -> list[object]:
    return list(sst.columns(Section.POINTS))


def find_all(block: Block, keys: list[bytes]) -> None:
    find = block.find
    for key in keys:
        find(key)


def test_ssts(entries: list[Entry]) -> None:
    """Prints nanoseconds per entry to write and to read an SST, by entries and by columns."""
    print(f"\n{ENTRIES} entries of 16 B + 100 B: ns per entry")
    print(f"{'block':>8} {'write':>7} {'read':>7} {'columns':>8}")
    for block_bytes in BLOCK_BYTES:
        write = partial(encode_sst, PROPERTIES, entries, block_bytes=block_bytes)
        data = write()
        in_columns = partial(columns, open_sst(NAME, data, database_id=None))
        times = [best_s(run) / ENTRIES * 1e9 for run in (write, partial(read, data), in_columns)]
        print(f"{block_bytes >> 10:>4} KiB" + "".join(f"{ns:>8.0f}" for ns in times))


def test_find(entries: list[Entry]) -> None:
    """Prints nanoseconds to find a key in a block, and to decode the block instead."""
    print("\nns to find a key in a block that is not decoded; to decode it")
    for block_bytes in BLOCK_BYTES:
        data = encode_sst(PROPERTIES, entries[:20_000], block_bytes=block_bytes)
        block = open_sst(NAME, data, database_id=None).decode_block(0)
        keys = list(block.columns().keys)
        repeats = max(1, 20_000 // len(keys))
        finding = best_s(partial(find_all, block, keys), repeats) / len(keys) * 1e9
        decoding = best_s(block.columns, repeats) * 1e9
        print(f"{len(keys):>6} rows: {finding:>6.0f} {decoding:>9.0f}")


def words(count: int) -> list[Entry]:
    """Puts of 16-byte keys and about 100 bytes of words, names and numbers."""
    random = Random(1)
    letters = "etaoinshrdlucmfw"
    known = ["".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(2_000)]
    template = '{"name":"%s","city":"%s","n":%d,"text":"%s"}'
    return [
        Entry(
            b"user/%011d" % n,
            7,
            Kind.PUT,
            (
                template
                % (
                    *random.choices(known, k=2),
                    random.randrange(10**6),
                    " ".join(random.choices(known, k=9)),
                )
            )[:100].encode(),
        )
        for n in range(count)
    ]


def test_codecs() -> None:
    """Prints nanoseconds per entry to write and read with each codec, and with a filter."""
    entries = words(PROBES)
    print(f"\n{len(entries)} entries of 16 B + words: ns per entry; us for a block; bytes an entry")
    print(f"{'block':>8} {'codec':>12} {'write':>6} {'read':>6} {'block us':>8} {'bytes':>6}")
    for block_bytes in BLOCK_BYTES[:3]:
        for codec, bits in [*((codec, None) for codec in Codec), (Codec.NONE, 10.0)]:
            write = partial(
                encode_sst,
                PROPERTIES,
                entries,
                block_bytes=block_bytes,
                codec=codec,
                filter_bits_per_key=bits,
            )
            data = write()
            sst = open_sst(NAME, data, database_id=None)
            writing, reading = (
                best_s(run) / len(entries) * 1e9 for run in (write, partial(read, data))
            )
            decoding = best_s(partial(decode_all, sst)) / len(sst.index)
            label = codec.name.lower() + (" + filter" if bits else "")
            print(
                f"{block_bytes >> 10:>4} KiB {label:>12} {writing:>6.0f} {reading:>6.0f}"
                f" {decoding * 1e6:>8.1f} {len(data) / len(entries):>6.1f}"
            )


def decode_all(sst: Sst) -> None:
    """Decompress each block, without decoding its rows."""
    for number in range(len(sst.index)):
        sst.decode_block(number)


def probe_all(found: Filter, keys: list[bytes]) -> int:
    return sum(map(found.may_contain, keys))


def probe_hashes(found: Filter, hashes: list[int]) -> int:
    return sum(map(found.may_contain_hash, hashes))


def test_filters() -> None:
    """Prints what filters cost, and how many absent keys they let through."""
    keys = [b"user/%011d" % (7 * n) for n in range(ENTRIES)]
    absent = [b"user/%011d" % (7 * n + 3) for n in range(ENTRIES)]
    hashes = [*map(key_hash, absent[:PROBES])]
    print(f"\nfilter of {ENTRIES} keys: ns per key; % of absent keys let through")
    print(f"{'bits':>5} {'build':>6} {'there':>6} {'absent':>6} {'hashed':>6} {'through':>8}")
    for bits in (4, 6, 8, 10, 12, 16, 20):
        found = parse_filter(NAME, 0, build_filter(keys, bits))
        assert found is not None
        building = best_s(partial(build_filter, keys, bits)) / len(keys) * 1e9
        there, not_there = (
            best_s(partial(probe_all, found, probed[:PROBES])) / PROBES * 1e9
            for probed in (keys, absent)
        )
        hashed = best_s(partial(probe_hashes, found, hashes)) / len(hashes) * 1e9
        through = probe_all(found, absent) / len(absent) * 100
        print(
            f"{bits:>5} {building:>6.0f} {there:>6.0f} {not_there:>6.0f} {hashed:>6.0f}"
            f" {through:>8.3f}"
        )


def test_manifest() -> None:
    """Prints milliseconds to decode, edit and encode a manifest of 100,000 SSTs."""
    infos = [
        SstInfo(
            n.to_bytes(16, "big"), n % 7, b"key%013d" % n, b"key%013d~" % n,
            0, 0, 60_000, 1_000, n, n + 100, 5_000, 10, 64 << 20, n,
        )
        for n in range(SSTS)
    ]  # fmt: skip
    snapshots = (Snapshot(n.to_bytes(16, "big"), n, n, f"s{n}", n) for n in range(SNAPSHOTS))
    manifest = Manifest(
        database_id=bytes(16),
        manifest_id=9,
        write_id=bytes(16),
        leveled_ssts=SstTable.from_infos(infos),
        snapshots=tuple(snapshots),
    )
    data = encode_manifest(manifest)
    removed = [info.id for info in infos[SSTS // 2 : SSTS // 2 + 10]]
    added = [replace(info, id=b"added" + info.id[5:]) for info in infos[:10]]
    edited = manifest.leveled_ssts.replace(removed, added)
    runs: dict[str, Callable[[], object]] = {
        "decode": partial(decode_manifest, manifest_name(9), data),
        "edit 20 SSTs": partial(manifest.leveled_ssts.replace, removed, added),
        "encode": partial(encode_manifest, replace(manifest, leveled_ssts=edited)),
        "all SSTs as values": partial(list, manifest.leveled_ssts),
    }
    print(f"\nmanifest of {SSTS} SSTs, {SNAPSHOTS} snapshots, {len(data)} bytes: ms")
    for label, run in runs.items():
        print(f"{label:>20}: {best_s(run) * 1e3:6.1f}")
