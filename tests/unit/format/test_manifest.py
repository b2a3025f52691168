"""A manifest is decoded as it was encoded, or refused with a typed error."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given

from shalekv.errors import (
    BadChecksum,
    BadMagic,
    BadStructure,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format import envelope
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import Lease, Manifest, Snapshot
from shalekv.v1 import manifest_pb2
from tests.kit.forging import patched, resealed_manifest
from tests.kit.manifests import FULL, NAME, manifests

DATA = encode_manifest(FULL)
BODY_AT = 20


def message() -> manifest_pb2.Manifest:
    return manifest_pb2.Manifest.FromString(DATA[BODY_AT:])


def stored(changed: Message) -> bytes:
    return resealed_manifest(DATA[:BODY_AT] + changed.SerializeToString())


def unset(found: Message, path: str = "") -> list[str]:
    """Return the fields that no message of their type has set, by path."""
    missing: list[str] = []
    for field in found.DESCRIPTOR.fields:
        value = getattr(found, field.name)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            missing += [] if value else [f"{path}{field.name}"]
        elif field.is_repeated:
            missing += unset(value[0], f"{path}{field.name}.") if value else [field.name]
        else:
            missing += unset(value, f"{path}{field.name}.")
    return missing


@given(manifests)
def test_manifests_come_back(manifest: Manifest) -> None:
    """Every field of a manifest survives, and the same manifest has the same bytes."""
    data = encode_manifest(manifest)
    assert decode_manifest(NAME, data) == manifest
    assert encode_manifest(decode_manifest(NAME, data)) == data


def test_every_field_of_the_message_is_used() -> None:
    """A manifest that differs from the defaults everywhere sets every field of the message."""
    defaults = Manifest(database_id=bytes(16), manifest_id=0, write_id=bytes(16))
    for field in fields(Manifest):
        assert getattr(FULL, field.name) != getattr(defaults, field.name), field.name
    assert unset(message()) == []
    assert decode_manifest(NAME, DATA) == FULL


@pytest.mark.parametrize(
    "name", [manifest_name(41), "wal/00000000000000000042.sst", "manifest/42.manifest", ""]
)
def test_another_name_is_found(name: str) -> None:
    """An intact manifest under the name of another object is refused."""
    with pytest.raises(WrongObject, match="manifest 42"):
        decode_manifest(name, DATA)


def test_envelopes_that_are_not_ours_are_refused() -> None:
    """Magic, checksum, version and flags are verified, each with an error of its own."""
    with pytest.raises(BadMagic):
        decode_manifest(NAME, patched(DATA, 0, b"s"))
    with pytest.raises(BadChecksum):
        decode_manifest(NAME, patched(DATA, 8, b"\x02"))
    with pytest.raises(UnsupportedVersion, match="version 2"):
        decode_manifest(NAME, resealed_manifest(patched(DATA, 8, b"\x02")))
    with pytest.raises(BadStructure, match="version 0"):
        decode_manifest(NAME, resealed_manifest(patched(DATA, 8, b"\x00")))
    with pytest.raises(UnsupportedVersion, match="flags"):
        decode_manifest(NAME, resealed_manifest(patched(DATA, 10, b"\x01")))


def test_later_versions_of_messages_are_refused() -> None:
    """An unknown version is refused, in the manifest and in the SSTs of a load."""
    for version, error in ((2, UnsupportedVersion), (0, BadStructure)):
        changed = message()
        changed.manifest_format_version = version
        with pytest.raises(error, match="version"):
            decode_manifest(NAME, stored(changed))
        changed = message()
        changed.pending_loads[0].ssts[0].sstinfo_format_version = version
        with pytest.raises(error, match="version"):
            decode_manifest(NAME, stored(changed))


def test_unknown_modes_are_refused() -> None:
    """A mode that is unknown or not set is never taken for another one."""
    for field in ("cas_mode", "wal_mode"):
        for number, error in ((0, BadStructure), (3, UnsupportedVersion), (99, UnsupportedVersion)):
            changed = message()
            setattr(changed, field, number)
            with pytest.raises(error, match=field):
                decode_manifest(NAME, stored(changed))


def test_unknown_fields_are_refused() -> None:
    """A field that this version would lose when it edits the manifest is refused, at any depth."""
    unknown = b"\xa2\x3f\x01x"  # field 1012, one byte
    with pytest.raises(UnsupportedVersion, match="fields"):
        decode_manifest(NAME, resealed_manifest(DATA + unknown))
    changed = message()
    changed.leases[0].MergeFromString(unknown)
    with pytest.raises(UnsupportedVersion, match="fields"):
        decode_manifest(NAME, stored(changed))


@pytest.mark.parametrize(
    "field", ["database_id", "write_id", "writer_nonce", "compactor_nonce", "snapshots", "leases"]
)
def test_ids_have_16_bytes(field: str) -> None:
    """An id of another length is refused, when it is read and when it is written."""
    changed = message()
    if field in {"snapshots", "leases"}:
        getattr(changed, field)[0].id = b"short"
    else:
        setattr(changed, field, b"short")
    with pytest.raises(BadStructure, match=field):
        decode_manifest(NAME, stored(changed))
    wrong: dict[str, Any] = {
        "snapshots": (Snapshot(b"short", 0, 0),),
        "leases": (Lease(b"short", 0, ""),),
    }
    with pytest.raises(ValueError, match=field):
        encode_manifest(replace(FULL, **{field: wrong.get(field, b"short")}))


def test_columns_that_do_not_fit_are_refused() -> None:
    """A table whose columns disagree is refused by the name of the column."""
    changed = message()
    changed.leveled_ssts.max_seqs += b"\x00"
    with pytest.raises(BadStructure, match="max_seqs"):
        decode_manifest(NAME, stored(changed))
    changed = message()
    changed.pending_loads[0].ssts[0].id = b""
    with pytest.raises(BadStructure, match="ids"):
        decode_manifest(NAME, stored(changed))


def test_text_that_is_no_utf8_is_refused() -> None:
    """A name that is not UTF-8 is a typed error."""
    body = DATA[BODY_AT:].replace(b"nightly", b"night\xff\xfe")
    with pytest.raises(BadStructure):
        decode_manifest(NAME, resealed_manifest(DATA[:BODY_AT] + body))


def test_a_manifest_too_big_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose length does not fit the envelope is refused when it is written."""
    monkeypatch.setattr(envelope, "MAX_U32", len(DATA) - BODY_AT - 1)
    with pytest.raises(ValueError, match="limit"):
        encode_manifest(FULL)
