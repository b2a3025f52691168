"""Writes a golden set: ``python -m tests.golden.make_golden tests/golden/v1_levels``.

The name of the folder says which. When a format gets more to say, add a set and keep the older
ones: they prove that what was written then can still be read. Files that exist are never
overwritten.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shalekv.format.manifest import encode_manifest
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from tests.golden.contents import (
    LEVEL_BLOCKS,
    LEVEL_FILTER,
    LEVEL_SYSTEM,
    LEVEL_UNNUMBERED,
    LEVEL_ZSTD,
    MANIFEST_CLONE,
    MANIFEST_FULL,
    MANIFEST_LOADS,
    MANIFEST_QUORUM,
    MANIFEST_RESERVED,
    MANIFEST_SNAPSHOTS,
    WAL_ENTRIES,
    WAL_FENCE,
    WAL_LOAD,
    WAL_LOAD_SYSTEM,
    WAL_LZ4,
    WAL_SYSTEM,
    WAL_SYSTEM_ALONE,
    GoldenSst,
)
from tests.golden.descriptions import Json, describe_arguments, describe_manifest, describe_sst

# What each set has: SSTs, manifests.
SSTS = {
    "v1": {"wal_entries": WAL_ENTRIES, "wal_fence": WAL_FENCE, "level_blocks": LEVEL_BLOCKS},
    "v1_system": {
        "wal_system": WAL_SYSTEM,
        "wal_system_alone": WAL_SYSTEM_ALONE,
        "level_system": LEVEL_SYSTEM,
    },
    "v1_levels": {"wal_lz4": WAL_LZ4, "level_zstd": LEVEL_ZSTD, "level_filter": LEVEL_FILTER},
    "v1_ingest": {
        "wal_load": WAL_LOAD,
        "wal_load_system": WAL_LOAD_SYSTEM,
        "level_unnumbered": LEVEL_UNNUMBERED,
    },
    "v1_snapshots": {},
    "v1_clone": {},
    "v1_reserved": {},
    "v1_quorum": {},
}
MANIFESTS = {
    "v1": {"manifest_full": MANIFEST_FULL},
    "v1_system": {},
    "v1_levels": {},
    "v1_ingest": {"manifest_loads": MANIFEST_LOADS},
    "v1_snapshots": {"manifest_snapshots": MANIFEST_SNAPSHOTS},
    "v1_clone": {"manifest_clone": MANIFEST_CLONE},
    "v1_reserved": {"manifest_reserved": MANIFEST_RESERVED},
    "v1_quorum": {"manifest_quorum": MANIFEST_QUORUM},
}


def make(folder: Path) -> None:
    """Writes the set that `folder` is named after. `FileExistsError`: a file is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, golden in SSTS[folder.name].items():
        data = encode(golden)
        sst = open_sst(golden.properties.name, data, database_id=None)
        arguments = describe_arguments(
            block_bytes=golden.block_bytes,
            codec=golden.codec,
            filter_bits_per_key=golden.filter_bits_per_key,
        )
        _write(folder / f"{stem}.sst", data, describe_sst(sst, arguments))
    for stem, manifest in MANIFESTS[folder.name].items():
        data = encode_manifest(manifest)
        _write(folder / f"{stem}.manifest", data, describe_manifest(manifest))


def encode(golden: GoldenSst) -> bytes:
    """The bytes of a golden SST."""
    return encode_sst(
        golden.properties,
        golden.entries,
        golden.range_tombstones,
        golden.system,
        golden.control,
        block_bytes=golden.block_bytes,
        codec=golden.codec,
        filter_bits_per_key=golden.filter_bits_per_key,
        filter_bytes=golden.filter_bytes,
    )


def _write(path: Path, data: bytes, description: Json) -> None:
    with path.open("xb") as file:
        file.write(data)
    with path.with_suffix(".json").open("x", encoding="ascii") as file:
        file.write(json.dumps(description, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
