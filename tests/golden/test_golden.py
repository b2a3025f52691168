"""What was written once can be read, and is still written the same."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from shalekv.core.entry import Kind
from shalekv.core.manifest import Manifest
from shalekv.format.block_frame import Codec
from shalekv.format.idempotency import ReplyKind, decode_record
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import manifest_name
from shalekv.format.section import Section
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from tests.golden.contents import (
    LEVEL_BLOCKS,
    LEVEL_SYSTEM,
    MANIFEST_CLONE,
    MANIFEST_FULL,
    MANIFEST_QUORUM,
    RECORDS,
    WAL_SYSTEM_ALONE,
    GoldenSst,
)
from tests.golden.descriptions import (
    ARGUMENTS,
    Json,
    arguments_in,
    contents_in,
    control_in,
    describe_manifest,
    describe_sst,
    entries_in,
    manifest_in,
    properties_in,
    range_tombstones_in,
    statement,
    system_in,
)
from tests.golden.make_golden import MANIFESTS, SSTS, encode, make

SETS = Path(__file__).parent
ALL_SSTS = sorted(SETS.glob("v*/*.sst"))
ALL_MANIFESTS = sorted(SETS.glob("v*/*.manifest"))


def label(path: Path) -> str:
    """Set and file."""
    return f"{path.parent.name}/{path.stem}"


def description_of(path: Path) -> Json:
    """What the file at `path` must hold."""
    description: Json = json.loads(path.with_suffix(".json").read_text("ascii"))
    return description


def test_there_are_golden_files() -> None:
    """The tests below have something to read."""
    assert {label(path) for path in ALL_SSTS} >= {
        f"{name}/{stem}" for name, ssts in SSTS.items() for stem in ssts
    }
    assert [label(path) for path in ALL_MANIFESTS] == sorted(
        f"{name}/{stem}" for name, manifests in MANIFESTS.items() for stem in manifests
    )


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
    assert list(sst.system_entries()) == system_in(description)
    assert list(sst.control_entries()) == control_in(description)
    arguments = {name: description[name] for name in ARGUMENTS if name in description}
    assert describe_sst(sst, arguments) == description


@pytest.mark.parametrize("path", [path for path in ALL_SSTS if path.parent.name in SSTS], ids=label)
def test_golden_ssts_are_written(path: Path) -> None:
    """What a description of the current version says is written as the very bytes of its file.

    Where blocks are compressed, the file that is written says the same: its bytes are up to the
    version of the compressor.
    """
    description = description_of(path)
    data = encode_sst(
        properties_in(description),
        entries_in(description),
        range_tombstones_in(description),
        system_in(description),
        control_in(description),
        **arguments_in(description),
    )
    if "codec" not in description:
        assert data == path.read_bytes()
    sst = open_sst(properties_in(description).name, data, database_id=None)
    arguments = {name: description[name] for name in ARGUMENTS if name in description}
    assert statement(describe_sst(sst, arguments)) == statement(description)


@pytest.mark.parametrize("path", ALL_MANIFESTS, ids=label)
def test_golden_manifests_are_read(path: Path) -> None:
    """Every golden manifest holds what its description says."""
    manifest = manifest_in(description_of(path))
    assert decode_manifest(manifest_name(manifest.manifest_id), path.read_bytes()) == manifest
    assert describe_manifest(manifest) == description_of(path)


@pytest.mark.parametrize(
    "path", [path for path in ALL_MANIFESTS if path.parent.name in MANIFESTS], ids=label
)
def test_golden_manifests_are_written(path: Path) -> None:
    """What a description of the current version says is written as the very bytes of its file."""
    assert encode_manifest(manifest_in(description_of(path))) == path.read_bytes()


def written(folder: Path) -> dict[str, object]:
    """The files of a set: their bytes, or what they say if those depend on a compressor."""
    files: dict[str, object] = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.glob("*.sst"):
        description = description_of(path)
        if "codec" in description:
            files[path.name] = None
            files[f"{path.stem}.json"] = statement(description)
    return files


@pytest.mark.parametrize("name", sorted(SSTS))
def test_the_set_is_what_the_script_writes(name: str, tmp_path: Path) -> None:
    """The script writes the sets of the current version, and never over files that exist."""
    make(tmp_path / name)
    assert written(tmp_path / name) == written(SETS / name)
    with pytest.raises(FileExistsError):
        make(tmp_path / name)


def test_golden_files_have_every_feature() -> None:
    """The sets show several blocks, sections and versions, every column, and every field."""
    assert _flags(LEVEL_BLOCKS, Section.POINTS) == {0, 6, 7}
    assert _flags(LEVEL_BLOCKS, Section.RANGE_TOMBSTONES) == {2}
    assert _flags(LEVEL_SYSTEM, Section.SYSTEM) == {1, 3, 4}
    assert _flags(WAL_SYSTEM_ALONE, Section.SYSTEM) == {7}
    assert describe_manifest(MANIFEST_FULL) == description_of(SETS / "v1" / "manifest_full")
    described = describe_manifest(MANIFEST_CLONE).keys() | describe_manifest(MANIFEST_QUORUM).keys()
    assert described == {each.name for each in fields(Manifest)}
    codecs = {row["codec"] for row in description_of(SETS / "v1_levels" / "level_zstd")["blocks"]}
    assert codecs == {Codec.NONE, Codec.ZSTD}
    codecs = {row["codec"] for row in description_of(SETS / "v1_levels" / "wal_lz4")["blocks"]}
    assert codecs == {Codec.NONE, Codec.LZ4}
    records = [decode_record("", entry.value) for entry in RECORDS if entry.kind is Kind.PUT]
    assert {record.reply_kind for record in records} == set(ReplyKind)


def _flags(golden: GoldenSst, section: Section) -> set[int]:
    """The flags of the blocks of a section."""
    sst = open_sst(golden.properties.name, encode(golden), database_id=None)
    return {sst.decode_block(number).flags for number in sst.index.blocks_of(section)}
