"""server/docs/formats.md says what the code does: a reader written from it reads the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from shalekv.format import coding
from shalekv.format.filter import key_hash, parse_filter
from shalekv.v1 import kv_pb2, manifest_pb2
from tests.golden.spec_reader import may_contain, read

SETS = Path(__file__).parent
PAGE = (SETS.parents[1] / "server" / "docs" / "formats.md").read_text()
CONTENTS = "min_seq max_seq put_count tombstone_count range_tombstone_count other_count".split()


def as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


def test_the_checksum_is_crc32c() -> None:
    """The checksum of the code has the check value of CRC-32C."""
    assert coding.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("key", [b"", b"a", b"ShaleKV", bytes(range(64))])
def test_the_page_shows_hashes(key: bytes) -> None:
    """The hashes that the page shows are those of the code."""
    assert f"0x{key_hash(key):016X}" in PAGE


@pytest.mark.parametrize("stem", ["level_zstd", "level_filter"])
def test_filters_are_as_the_page_says(stem: str) -> None:
    """A filter lets all keys of its SST through, and of others both readers the same."""
    found = read((SETS / "v1_levels" / f"{stem}.sst").read_bytes())
    filter_bytes, keys = found["filter"], {row["key"] for row in found["entries"]}
    own = parse_filter("x", 0, filter_bytes)
    assert own is not None
    assert own.keys == len(keys) == int.from_bytes(filter_bytes[8:16], "little")
    assert own.lines > 1
    assert all(may_contain(filter_bytes, key) for key in keys)
    others = [b"absent %d" % n for n in range(2_000)]
    answers = [may_contain(filter_bytes, key) for key in others]
    assert answers == [own.may_contain(key) for key in others]
    assert 0 < sum(answers) < len(others) / 4


@pytest.mark.parametrize("path", sorted(SETS.glob("v1*/*.sst")), ids=lambda path: path.stem)
def test_an_sst_is_as_the_page_says(path: Path) -> None:
    """The second reader finds in a golden SST what its description says."""
    expected = json.loads(path.with_suffix(".json").read_text("ascii"))
    properties, contents = expected["properties"], expected["contents"]
    found = as_json(read(path.read_bytes()))
    for field in ("checksum", "filter", "entries", "range_tombstones"):
        assert found[field] == expected[field]
    assert found["system"] == expected.get("system", [])
    fields = ("key", "seq", "value", "load_id")
    control = expected.get("control", [])
    loads = [{name: row[name] for name in fields} for row in control]
    assert found["control"] == loads
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


def test_a_reply_is_plain_protobuf() -> None:
    """The reply in a record is the message of the API that its number names, without a header."""
    messages = (
        kv_pb2.PutReply,
        kv_pb2.DeleteReply,
        kv_pb2.DeleteRangeReply,
        kv_pb2.WriteReply,
        kv_pb2.TxnReply,
    )
    system = json.loads((SETS / "v1_system" / "wal_system.json").read_text("ascii"))["system"]
    rows = [row for row in system if "reply" in row]
    replies = [
        (
            row["reply_kind"],
            messages[row["reply_kind"] - 1].FromString(row["reply"].encode("latin-1")),
        )
        for row in rows
    ]
    assert not any(reply.HasField("header") for _, reply in replies)
    assert {kind: MessageToDict(reply) for kind, reply in replies} == {
        1: {"durability": "DURABILITY_DURABLE"},
        2: {},
        3: {"durability": "DURABILITY_DURABLE"},
        4: {"durability": "DURABILITY_DURABLE", "counters": ["-1", str(2**63 - 1)]},
        5: {
            "succeeded": True,
            "results": [
                {"get": {"found": True, "value": "cmVhZA==", "seq": "20"}},
                {"counter": "-7"},
                {},
            ],
            "durability": "DURABILITY_DURABLE",
        },
    }


def test_a_control_record_is_plain_protobuf() -> None:
    """The files in the record of a load are the message that the page names."""
    description = json.loads((SETS / "v1_ingest" / "wal_load_system.json").read_text("ascii"))
    for row in description["control"]:
        table = manifest_pb2.SstTable.FromString(row["value"].encode("latin-1")[8:])
        assert table.count == len(row["ssts"])
        assert table.ids.hex() == "".join(info["id"] for info in row["ssts"])
        assert not any(table.levels + table.min_seqs + table.max_seqs)


def test_a_manifest_is_as_the_page_says() -> None:
    """The envelope is that of the page, and what is in it is plain protobuf."""
    data = (SETS / "v1" / "manifest_full.manifest").read_bytes()
    expected = json.loads((SETS / "v1" / "manifest_full.json").read_text("ascii"))
    assert data[:12] == b"ShaleMan\x01\x00\x00\x00"
    assert int.from_bytes(data[12:16], "little") == len(data) - 20
    assert int.from_bytes(data[16:20], "little") == coding.crc32c(data[:16] + data[20:])
    message = MessageToDict(
        manifest_pb2.Manifest.FromString(data[20:]), preserving_proto_field_name=True
    )
    for field, value in expected.items():
        if isinstance(value, int):
            assert int(message[field]) == value
    ids = expected["leveled_ssts"]
    assert message["leveled_ssts"]["count"] == len(ids)
    assert [load["load_id"] for load in message["recent_loads"]] == ["products/5", "products/6"]
