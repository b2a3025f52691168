"""Writes a golden set: ``python -m tests.golden.make_golden tests/golden/v1``.

Run it when a format has got a new version, and keep the older sets: they prove that what was
written then can still be read. Files that exist are never overwritten.
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
    MANIFEST_FULL,
    WAL_ENTRIES,
    WAL_FENCE,
    GoldenSst,
)
from tests.golden.descriptions import Json, describe_manifest, describe_sst

SSTS = {"wal_entries": WAL_ENTRIES, "wal_fence": WAL_FENCE, "level_blocks": LEVEL_BLOCKS}


def make(folder: Path) -> None:
    """Writes the files of a set. `FileExistsError`: one of them is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, golden in SSTS.items():
        data = encode(golden)
        sst = open_sst(golden.properties.name, data, database_id=None)
        _write(folder / f"{stem}.sst", data, describe_sst(sst, golden.block_bytes))
    data = encode_manifest(MANIFEST_FULL)
    _write(folder / "manifest_full.manifest", data, describe_manifest(MANIFEST_FULL))


def encode(golden: GoldenSst) -> bytes:
    """The bytes of a golden SST."""
    return encode_sst(
        golden.properties,
        golden.entries,
        golden.range_tombstones,
        block_bytes=golden.block_bytes,
        filter_bytes=golden.filter_bytes,
    )


def _write(path: Path, data: bytes, description: Json) -> None:
    with path.open("xb") as file:
        file.write(data)
    with path.with_suffix(".json").open("x", encoding="ascii") as file:
        file.write(json.dumps(description, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
