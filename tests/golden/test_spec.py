"""server/docs/formats.md says what the code does: a reader written from it reads the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from shalekv.format import coding
from shalekv.v1 import manifest_pb2
from tests.golden.spec_reader import crc32c, read

GOLDEN = Path(__file__).parent / "v1"
CONTENTS = "min_seq max_seq put_count tombstone_count range_tombstone_count other_count".split()


def as_json(value: Any) -> Any:
    """Bytes as the descriptions have them."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


def test_the_checksum_is_crc32c() -> None:
    """The checksum of the page has the check value of CRC-32C, and is the one of the code."""
    assert crc32c(b"123456789") == coding.crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == coding.crc32c(b"") == 0


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sst")), ids=lambda path: path.stem)
def test_an_sst_is_as_the_page_says(path: Path) -> None:
    """The second reader finds in a golden SST what its description says."""
    expected = json.loads(path.with_suffix(".json").read_text("ascii"))
    properties, contents = expected["properties"], expected["contents"]
    found = as_json(read(path.read_bytes()))
    for field in ("checksum", "filter", "entries", "range_tombstones"):
        assert found[field] == expected[field]
    for field in ("database_id", "writer_nonce", "write_id"):
        assert found[field] == properties[field]
    for field in ("first_key", "last_key"):
        assert found[field] == contents[field]
    assert found["numbers"] == (
        properties["writer_epoch"],
        properties["logical_time_ms"],
        *(contents[field] for field in CONTENTS),
        contents["key_bytes"],
        contents["value_bytes"],
    )
    name = properties["name"]
    if found["object_kind"] == 0:
        wal_id = int.from_bytes(bytes.fromhex(found["object_id"]), "little")
        assert name == f"wal/{wal_id:020d}.sst"
    else:
        assert name.replace("-", "") == f"levels/{found['object_id']}.sst"


def test_a_manifest_is_as_the_page_says() -> None:
    """The envelope is that of the page, and what is in it is plain protobuf."""
    data = (GOLDEN / "manifest_full.manifest").read_bytes()
    expected = json.loads((GOLDEN / "manifest_full.json").read_text("ascii"))
    assert data[:12] == b"ShaleMan\x01\x00\x00\x00"
    assert int.from_bytes(data[12:16], "little") == len(data) - 20
    assert int.from_bytes(data[16:20], "little") == crc32c(data[:16] + data[20:])
    message = MessageToDict(
        manifest_pb2.Manifest.FromString(data[20:]), preserving_proto_field_name=True
    )
    for field, value in expected.items():
        if isinstance(value, int):
            assert int(message[field]) == value
    ids = expected["leveled_ssts"]
    assert message["leveled_ssts"]["count"] == len(ids)
    assert [load["load_id"] for load in message["recent_loads"]] == ["products/5", "products/6"]
