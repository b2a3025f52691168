"""The bytes of a manifest: the message `Manifest` of protos/shalekv/v1/manifest.proto, in an
envelope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError

from shalekv.errors import UnsupportedVersion, WrongObject
from shalekv.format.coding import Piece
from shalekv.format.envelope import Envelope
from shalekv.format.names import UUID_BYTES, parse_manifest_name
from shalekv.format.sst_message import info_message, info_of, table_message, table_of
from shalekv.protocol.manifest import (
    MANIFEST_FORMAT_VERSION,
    CasMode,
    Lease,
    Manifest,
    Origin,
    PendingLoad,
    RecentLoad,
    Snapshot,
    WalMode,
)
from shalekv.protocol.sst_table import SstTable
from shalekv.v1 import manifest_pb2

ENVELOPE = Envelope(b"ShaleMan", MANIFEST_FORMAT_VERSION)

Mode = TypeVar("Mode", CasMode, WalMode)

_CAS_MODES = {
    CasMode.NATIVE: manifest_pb2.CAS_MODE_NATIVE,
    CasMode.TWO_PHASE: manifest_pb2.CAS_MODE_TWO_PHASE,
}
_WAL_MODES = {
    WalMode.OBJECT_STORE: manifest_pb2.WAL_MODE_OBJECT_STORE,
    WalMode.QUORUM: manifest_pb2.WAL_MODE_QUORUM,
}
_CAS_MODE_OF = {int(number): mode for mode, number in _CAS_MODES.items()}
_WAL_MODE_OF = {int(number): mode for mode, number in _WAL_MODES.items()}


def encode_message(manifest: Manifest) -> bytes:
    """Return the bytes of the message. `ValueError`: a field is out of its limits."""
    message = manifest_pb2.Manifest(
        manifest_format_version=MANIFEST_FORMAT_VERSION,
        writer_epoch=manifest.writer_epoch,
        compactor_epoch=manifest.compactor_epoch,
        wal_id_last_compacted=manifest.wal_id_last_compacted,
        wal_id_last_seen=manifest.wal_id_last_seen,
        leveled_ssts=table_message(manifest.leveled_ssts) if manifest.leveled_ssts else None,
        snapshots=map(_snapshot_message, manifest.snapshots),
        database_id=_id("database_id", manifest.database_id),
        manifest_id=manifest.manifest_id,
        write_id=_id("write_id", manifest.write_id),
        cas_mode=_CAS_MODES[manifest.cas_mode],
        writer_nonce=_id("writer_nonce", manifest.writer_nonce),
        compactor_nonce=_id("compactor_nonce", manifest.compactor_nonce),
        last_compacted_seq=manifest.last_compacted_seq,
        max_parallel_writes=manifest.max_parallel_writes,
        fence_width=manifest.fence_width,
        gc_cutoff_ms=manifest.gc_cutoff_ms,
        logical_time_ms=manifest.logical_time_ms,
        wal_mode=_WAL_MODES[manifest.wal_mode],
        wal_generation=manifest.wal_generation,
        wal_members=manifest.wal_members,
        wal_members_next=manifest.wal_members_next,
        wal_ids_left_out=map(_range_message, manifest.wal_ids_left_out),
        writer_address=manifest.writer_address,
        writer_first_seq=manifest.writer_first_seq,
        leases=map(_lease_message, manifest.leases),
        pending_loads=map(_pending_load_message, manifest.pending_loads),
        recent_loads=map(_recent_load_message, manifest.recent_loads),
        loads_forgotten_ms=manifest.loads_forgotten_ms,
        origins=map(_origin_message, manifest.origins),
        time_reset_wal_id=manifest.time_reset_wal_id,
        is_dropped=manifest.is_dropped,
    )
    return message.SerializeToString(deterministic=True)


def decode_message(piece: Piece) -> Manifest:
    """Return the manifest whose message is `piece`.

    REQUIRES: `piece` is a part of an object whose checksum is verified.
    """
    message = manifest_pb2.Manifest()
    try:
        message.ParseFromString(piece.data)
        if message.manifest_format_version > MANIFEST_FORMAT_VERSION:
            problem = f"manifest format version {message.manifest_format_version}"
            raise UnsupportedVersion(piece.name, piece.offset, problem)
        # An edit writes the whole manifest: a field that is unknown here would be lost.
        message.DiscardUnknownFields()
        if message.ByteSize() != len(piece.data):
            problem = "the message has fields that are for a later version"
            raise UnsupportedVersion(piece.name, piece.offset, problem)
        return _manifest_of(message, piece)
    except (DecodeError, ValueError) as error:
        raise piece.malformed(0, f"the message is malformed: {error}") from error


def _manifest_of(message: manifest_pb2.Manifest, piece: Piece) -> Manifest:
    if message.manifest_format_version == 0:
        raise ValueError("manifest_format_version: 0 does not exist")
    has_last_compacted = message.HasField("wal_id_last_compacted")
    has_last_seen = message.HasField("wal_id_last_seen")
    has_time_reset = message.HasField("time_reset_wal_id")
    has_ssts = message.HasField("leveled_ssts")
    return Manifest(
        database_id=_id("database_id", message.database_id),
        manifest_id=message.manifest_id,
        write_id=_id("write_id", message.write_id),
        cas_mode=_mode(piece, "cas_mode", message.cas_mode, _CAS_MODE_OF),
        wal_mode=_mode(piece, "wal_mode", message.wal_mode, _WAL_MODE_OF),
        wal_generation=message.wal_generation,
        wal_members=tuple(message.wal_members),
        wal_members_next=tuple(message.wal_members_next),
        wal_ids_left_out=tuple(map(_range_of, message.wal_ids_left_out)),
        writer_epoch=message.writer_epoch,
        writer_nonce=_id("writer_nonce", message.writer_nonce),
        writer_address=message.writer_address,
        writer_first_seq=message.writer_first_seq,
        compactor_epoch=message.compactor_epoch,
        compactor_nonce=_id("compactor_nonce", message.compactor_nonce),
        wal_id_last_compacted=message.wal_id_last_compacted if has_last_compacted else None,
        wal_id_last_seen=message.wal_id_last_seen if has_last_seen else None,
        last_compacted_seq=message.last_compacted_seq,
        max_parallel_writes=message.max_parallel_writes,
        fence_width=message.fence_width,
        gc_cutoff_ms=message.gc_cutoff_ms,
        logical_time_ms=message.logical_time_ms,
        leveled_ssts=table_of(message.leveled_ssts) if has_ssts else SstTable(),
        snapshots=tuple(map(_snapshot_of, message.snapshots)),
        leases=tuple(map(_lease_of, message.leases)),
        pending_loads=tuple(_pending_load_of(load, piece) for load in message.pending_loads),
        recent_loads=tuple(map(_recent_load_of, message.recent_loads)),
        loads_forgotten_ms=message.loads_forgotten_ms,
        origins=tuple(map(_origin_of, message.origins)),
        time_reset_wal_id=message.time_reset_wal_id if has_time_reset else None,
        is_dropped=message.is_dropped,
    )


def _range_message(wal_ids: range) -> manifest_pb2.WalIdRange:
    return manifest_pb2.WalIdRange(first=wal_ids[0], last=wal_ids[-1])


def _range_of(message: manifest_pb2.WalIdRange) -> range:
    if message.first > message.last:
        raise ValueError(f"wal_ids_left_out: {message.first} to {message.last} is no range")
    return range(message.first, message.last + 1)


def _snapshot_message(snapshot: Snapshot) -> manifest_pb2.Snapshot:
    return manifest_pb2.Snapshot(
        id=_id("snapshots.id", snapshot.id),
        manifest_id=snapshot.manifest_id,
        snapshot_expire_time_s=snapshot.snapshot_expire_time_s,
        name=snapshot.name,
        manifest_checksum=snapshot.manifest_checksum,
        created_ms=snapshot.created_ms,
        ssts_only=snapshot.ssts_only,
    )


def _snapshot_of(message: manifest_pb2.Snapshot) -> Snapshot:
    return Snapshot(
        id=_id("snapshots.id", message.id),
        manifest_id=message.manifest_id,
        snapshot_expire_time_s=message.snapshot_expire_time_s,
        name=message.name,
        manifest_checksum=message.manifest_checksum,
        created_ms=message.created_ms,
        ssts_only=message.ssts_only,
    )


def _lease_message(lease: Lease) -> manifest_pb2.Lease:
    return manifest_pb2.Lease(
        id=_id("leases.id", lease.id),
        expire_time_s=lease.expire_time_s,
        holder=lease.holder,
        wal_id_min=lease.wal_id_min,
        reserved_seq=lease.reserved_seq,
    )


def _lease_of(message: manifest_pb2.Lease) -> Lease:
    return Lease(
        id=_id("leases.id", message.id),
        expire_time_s=message.expire_time_s,
        holder=message.holder,
        wal_id_min=message.wal_id_min if message.HasField("wal_id_min") else None,
        reserved_seq=message.reserved_seq if message.HasField("reserved_seq") else None,
    )


def _pending_load_message(load: PendingLoad) -> manifest_pb2.PendingLoad:
    return manifest_pb2.PendingLoad(load_id=load.load_id, ssts=map(info_message, load.ssts))


def _pending_load_of(message: manifest_pb2.PendingLoad, piece: Piece) -> PendingLoad:
    infos = [info_of(info, piece) for info in message.ssts]
    return PendingLoad(message.load_id, SstTable.from_infos(infos))


def _recent_load_message(load: RecentLoad) -> manifest_pb2.RecentLoad:
    return manifest_pb2.RecentLoad(
        load_id=load.load_id, seq=load.seq, logical_time_ms=load.logical_time_ms
    )


def _recent_load_of(message: manifest_pb2.RecentLoad) -> RecentLoad:
    return RecentLoad(message.load_id, message.seq, message.logical_time_ms)


def _origin_message(origin: Origin) -> manifest_pb2.Origin:
    _check_origin(origin)
    return manifest_pb2.Origin(
        database_id=origin.database_id,
        url=origin.url,
        snapshot_id=origin.snapshot_id,
        sst_ids=origin.sst_ids,
    )


def _origin_of(message: manifest_pb2.Origin) -> Origin:
    origin = Origin(message.database_id, message.url, message.snapshot_id, message.sst_ids)
    _check_origin(origin)
    return origin


def _check_origin(origin: Origin) -> None:
    _id("origins.database_id", origin.database_id)
    if len(origin.snapshot_id) != (UUID_BYTES if origin.url else 0):
        raise ValueError("origins.snapshot_id: expected 16 bytes with a URL, and none without")
    if len(origin.sst_ids) % UUID_BYTES:
        raise ValueError(f"origins.sst_ids: has {len(origin.sst_ids)} bytes, not a multiple of 16")


def _id(field: str, value: bytes) -> bytes:
    """Return `value`; `ValueError` if it cannot be an id or a nonce."""
    if len(value) != UUID_BYTES:
        raise ValueError(f"{field}: has {len(value)} bytes, expected {UUID_BYTES}")
    return value


def _mode(piece: Piece, field: str, number: int, modes: Mapping[int, Mode]) -> Mode:
    """Return the mode with this number.

    Raises `ValueError` for 0, which is not set, and `UnsupportedVersion` for an unknown number.
    """
    if number == 0:
        raise ValueError(f"{field}: is not set")
    if number not in modes:
        raise UnsupportedVersion(piece.name, piece.offset, f"{field}: {number} is unknown")
    return modes[number]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the object that holds this manifest. `ValueError`: a field is out of its limits."""
    return ENVELOPE.seal(encode_message(manifest))


def decode_manifest(name: str, data: bytes) -> Manifest:
    """Return the manifest in `data`, the bytes of the object `name`.

    Raises a `CorruptObject`: `WrongObject` if it is intact, but not the manifest with this name.
    """
    piece = ENVELOPE.unseal(name, data)
    manifest = decode_message(piece)
    if manifest.manifest_id != parse_manifest_name(name):
        problem = f"these are the bytes of manifest {manifest.manifest_id}"
        raise WrongObject(name, piece.offset, problem)
    return manifest
