"""Files written by earlier versions can be read, and are still written the same."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from shalekv.format.access import decode_policy, encode_policy
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Section
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import manifest_name, policy_name
from shalekv.format.records import ReplyKind
from shalekv.format.sst import open_sst
from shalekv.protocol.manifest import Manifest
from tests.golden.descriptions import (
    ARGUMENTS,
    Json,
    contents_in,
    control_in,
    describe_manifest,
    describe_policy,
    describe_sst,
    entries_in,
    ids_in,
    manifest_in,
    policy_in,
    properties_in,
    range_tombstones_in,
    statement,
    system_in,
)
from tests.golden.make_golden import sst_of

SETS = Path(__file__).parent
ALL_SSTS = sorted(SETS.glob("v*/*.sst"))
ALL_MANIFESTS = sorted(SETS.glob("v*/*.manifest"))
ALL_POLICIES = sorted(SETS.glob("v*/*.policy"))
COUNTS = (12, 9, 1)  # of the files above; a set may only be added


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def description_of(path: Path) -> Json:
    description: Json = json.loads(path.with_suffix(".json").read_text("ascii"))
    return description


def test_there_are_golden_files() -> None:
    """Each description has its file, and none is lost."""
    assert (len(ALL_SSTS), len(ALL_MANIFESTS), len(ALL_POLICIES)) == COUNTS
    stems = {path.with_suffix("") for path in (*ALL_SSTS, *ALL_MANIFESTS, *ALL_POLICIES)}
    assert stems == {path.with_suffix("") for path in SETS.glob("v*/*.json")}


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


@pytest.mark.parametrize("path", ALL_SSTS, ids=label)
def test_golden_ssts_are_written(path: Path) -> None:
    """A description is encoded to the very bytes of its file.

    If blocks are compressed, the contents are the same: the bytes depend on the version of the
    compressor.
    """
    description = description_of(path)
    data, described = sst_of(description)
    if "codec" not in description:
        assert data == path.read_bytes()
    assert statement(described) == statement(description)


@pytest.mark.parametrize("path", ALL_MANIFESTS, ids=label)
def test_golden_manifests_are_read_and_written(path: Path) -> None:
    """Every golden manifest holds what its description says, and is written as the same bytes."""
    manifest = manifest_in(description_of(path))
    assert decode_manifest(manifest_name(manifest.manifest_id), path.read_bytes()) == manifest
    assert describe_manifest(manifest) == description_of(path)
    assert encode_manifest(manifest) == path.read_bytes()


@pytest.mark.parametrize("path", ALL_POLICIES, ids=label)
def test_golden_policies_are_read_and_written(path: Path) -> None:
    """Every golden policy holds what its description says, and is written as the same bytes."""
    description = description_of(path)
    policy, ids = policy_in(description), ids_in(description)
    data = path.read_bytes()
    name = policy_name(policy.version)
    assert decode_policy(name, data, database_id=ids["database_id"]) == policy
    assert describe_policy(policy, **ids) == description
    assert encode_policy(policy, **ids) == data


def test_golden_files_have_every_feature() -> None:
    """The sets show several blocks, sections and versions, every column, and every field."""
    assert _flags("v1/level_blocks", Section.POINTS) == {0, 6, 7}
    assert _flags("v1/level_blocks", Section.RANGE_TOMBSTONES) == {2}
    assert _flags("v1_system/level_system", Section.SYSTEM) == {1, 3, 4}
    assert _flags("v1_system/wal_system_alone", Section.SYSTEM) == {7}
    described = {name for path in ALL_MANIFESTS for name in description_of(path)}
    assert described == {each.name for each in fields(Manifest)}
    for name, codec in (("level_zstd", Codec.ZSTD), ("wal_lz4", Codec.LZ4)):
        blocks = description_of(SETS / "v1_levels" / name)["blocks"]
        assert {row["codec"] for row in blocks} == {Codec.NONE, codec}
    system = description_of(SETS / "v1_system" / "wal_system")["system"]
    assert {row["reply_kind"] for row in system if "put" in row} == set(ReplyKind)


def _flags(name: str, section: Section) -> set[int]:
    path = SETS / f"{name}.sst"
    sst = open_sst(properties_in(description_of(path)).name, path.read_bytes(), database_id=None)
    return {sst.decode_block(number).flags for number in sst.index.blocks_of(section)}
