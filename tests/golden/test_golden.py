"""What was written once can be read, and is still written the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import manifest_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from tests.golden.contents import MANIFEST_FULL
from tests.golden.descriptions import (
    Json,
    contents_in,
    describe_manifest,
    describe_sst,
    entries_in,
    manifest_in,
    properties_in,
    range_tombstones_in,
)
from tests.golden.make_golden import SSTS, encode, make

SETS = Path(__file__).parent
ALL_SSTS = sorted(SETS.glob("v*/*.sst"))
ALL_MANIFESTS = sorted(SETS.glob("v*/*.manifest"))
CURRENT = SETS / "v1"


def label(path: Path) -> str:
    """Set and file."""
    return f"{path.parent.name}/{path.stem}"


def description_of(path: Path) -> Json:
    """What the file at `path` must hold."""
    description: Json = json.loads(path.with_suffix(".json").read_text("ascii"))
    return description


def test_there_are_golden_files() -> None:
    """The tests below have something to read."""
    assert {label(path) for path in ALL_SSTS} >= {f"v1/{stem}" for stem in SSTS}
    assert [label(path) for path in ALL_MANIFESTS] == ["v1/manifest_full"]


@pytest.mark.parametrize("path", ALL_SSTS, ids=label)
def test_golden_ssts_are_read(path: Path) -> None:
    """Every golden SST holds what its description says."""
    description = description_of(path)
    properties = properties_in(description)
    sst = open_sst(
        properties.name,
        path.read_bytes(),
        database_id=properties.database_id,
        checksum=int(description["checksum"], 16),
    )
    sst.audit()
    assert sst.properties == properties
    assert sst.footer.contents == contents_in(description)
    assert list(sst.entries()) == entries_in(description)
    assert list(sst.range_tombstones()) == range_tombstones_in(description)
    assert describe_sst(sst, description["block_bytes"]) == description


@pytest.mark.parametrize("path", sorted(CURRENT.glob("*.sst")), ids=label)
def test_golden_ssts_are_written(path: Path) -> None:
    """What a description of the current version says is written as the very bytes of its file."""
    description = description_of(path)
    data = encode_sst(
        properties_in(description),
        entries_in(description),
        range_tombstones_in(description),
        block_bytes=description["block_bytes"],
        filter_bytes=description["filter"].encode("latin-1"),
    )
    assert data == path.read_bytes()


@pytest.mark.parametrize("path", ALL_MANIFESTS, ids=label)
def test_golden_manifests_are_read(path: Path) -> None:
    """Every golden manifest holds what its description says."""
    manifest = manifest_in(description_of(path))
    assert decode_manifest(manifest_name(manifest.manifest_id), path.read_bytes()) == manifest
    assert describe_manifest(manifest) == description_of(path)


@pytest.mark.parametrize("path", sorted(CURRENT.glob("*.manifest")), ids=label)
def test_golden_manifests_are_written(path: Path) -> None:
    """What a description of the current version says is written as the very bytes of its file."""
    assert encode_manifest(manifest_in(description_of(path))) == path.read_bytes()


def test_the_set_is_what_the_script_writes(tmp_path: Path) -> None:
    """The script writes the current set, and never over files that exist."""
    make(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in CURRENT.iterdir()
    }
    with pytest.raises(FileExistsError):
        make(tmp_path)


def test_golden_files_have_every_feature() -> None:
    """The set shows several blocks, sections and versions, every column, and every field."""
    sst = open_sst(
        SSTS["level_blocks"].properties.name, encode(SSTS["level_blocks"]), database_id=None
    )
    assert {sst.decode_block(number).flags for number in range(len(sst.index))} == {0, 2, 6, 7}
    assert describe_manifest(MANIFEST_FULL).keys() == description_of(ALL_MANIFESTS[0]).keys()
