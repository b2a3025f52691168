"""Manifests, access policies, backups, and the records inside of SSTs."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError

from shalekv.errors import UnsupportedVersion
from shalekv.format.access import decode_policy, encode_policy, policy_message, policy_of
from shalekv.format.backup import decode_backup, encode_backup
from shalekv.format.coding import Piece, crc32c
from shalekv.format.election import decode_lease, encode_lease
from shalekv.format.manifest import decode_manifest, decode_message, encode_manifest, encode_message
from shalekv.format.names import policy_name
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    client_key,
    decode_idempotency_record,
    decode_load,
    encode_idempotency_record,
    load_entry,
    record_key,
)
from shalekv.format.sst_message import info_message, info_of, table_message, table_of
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.lease import ElectionLease
from shalekv.v1 import access_pb2, manifest_pb2
from tests.fuzz.decoders.decoder import Decoder
from tests.kit.forging import resealed_manifest
from tests.kit.manifests import BACKUP, FULL, MANIFEST, MANIFEST_ID, NAME, load, some_info
from tests.kit.policies import POLICY
from tests.kit.samples import DATABASE_ID, WAL_NAME

SMALL = replace(MANIFEST, manifest_id=MANIFEST_ID)
RECORD = IdempotencyRecord(b"hash of request!", 7, ReplyKind.WRITE, b"\x10\x05")
LEASE = ElectionLease("there:7654", b"nonce of holder!", 3_000, is_released=False)
LEASE_ID = 41


def _resealed_envelope(data: bytes) -> bytes:
    return resealed_manifest(data) if len(data) >= 20 else data


def _table(data: bytes) -> object:
    message = manifest_pb2.SstTable()
    message.ParseFromString(data)
    return [*table_of(message)]


def _info(data: bytes) -> object:
    message = manifest_pb2.SstInfo()
    message.ParseFromString(data)
    return info_of(message, Piece(NAME, 20, data))


def _policy(data: bytes) -> object:
    message = access_pb2.AccessPolicy()
    message.ParseFromString(data)
    return policy_of(message)


def _load_bytes(entry: Entry) -> bytes:
    """A control record as one string: how long its key is, the key, the value."""
    return len(entry.key).to_bytes(2, "little") + entry.key + entry.value


def _load(data: bytes) -> object:
    end = 2 + int.from_bytes(data[:2], "little")
    return decode_load(WAL_NAME, Entry(data[2:end], 9, Kind.INGEST, data[end:]))


def _resealed_lease(data: bytes) -> bytes:
    body = data[9:-1]
    return b"%08x %s\n" % (crc32c(body), body)


MESSAGES = (DecodeError, ValueError, UnsupportedVersion)

DECODERS = (
    Decoder(
        name="manifest",
        covers=(decode_manifest,),
        decode=lambda data: decode_manifest(NAME, data),
        samples=[encode_manifest(FULL), encode_manifest(SMALL)],
        is_sealed=True,
        reseal=_resealed_envelope,
    ),
    Decoder(
        name="message of a manifest",
        covers=(decode_message,),
        decode=lambda data: decode_message(Piece(NAME, 20, data)),
        samples=[encode_message(FULL), encode_message(SMALL)],
    ),
    Decoder(
        name="table of SSTs",
        covers=(table_of,),
        decode=_table,
        samples=[table_message(FULL.leveled_ssts).SerializeToString()],
        errors=MESSAGES,
        found=[manifest_pb2.SstTable(count=2**27).SerializeToString()],
    ),
    Decoder(
        name="row of an SST",
        covers=(info_of,),
        decode=_info,
        samples=[info_message(some_info(9)).SerializeToString()],
        errors=MESSAGES,
    ),
    Decoder(
        name="record of a load",
        covers=(decode_load,),
        decode=_load,
        samples=[_load_bytes(load_entry(load(), 9))],
    ),
    Decoder(
        name="idempotency record",
        covers=(decode_idempotency_record,),
        decode=lambda data: decode_idempotency_record(WAL_NAME, data),
        samples=[encode_idempotency_record(RECORD)],
    ),
    Decoder(
        name="key of an idempotency record",
        covers=(client_key,),
        decode=client_key,
        samples=[record_key(b"k" * 64)],
        errors=(ValueError,),
    ),
    Decoder(
        name="backup",
        covers=(decode_backup,),
        decode=lambda data: decode_backup(BACKUP.name, data),
        samples=[
            encode_backup(BACKUP),
            encode_backup(replace(BACKUP, policy=replace(POLICY, secret=b""))),
        ],
        found=[_resealed_envelope(encode_backup(BACKUP)[:20] + b"[" * 100_000)],
        is_sealed=True,
        reseal=_resealed_envelope,
    ),
    Decoder(
        name="access policy",
        covers=(decode_policy,),
        decode=lambda data: decode_policy(
            policy_name(POLICY.version), data, database_id=DATABASE_ID
        ),
        samples=[encode_policy(POLICY, database_id=DATABASE_ID, write_id=bytes(16))],
        is_sealed=True,
        reseal=_resealed_envelope,
    ),
    Decoder(
        name="message of an access policy",
        covers=(policy_of,),
        decode=_policy,
        samples=[policy_message(POLICY).SerializeToString()],
        errors=MESSAGES,
    ),
    Decoder(
        name="lease of an election",
        covers=(decode_lease,),
        decode=lambda data: decode_lease(LEASE_ID, data),
        samples=[encode_lease(LEASE_ID, LEASE)],
        found=[_resealed_lease(bytes(9) + b"[" * 100_000 + b"\n")],
        errors=(),
        refused=None,
        is_sealed=True,
        reseal=_resealed_lease,
    ),
)
