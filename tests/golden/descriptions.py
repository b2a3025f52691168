"""Contents of a golden file, as JSON that a reader in any language can be checked against.

Ids, nonces and checksums are hexadecimal. Keys and values are strings in which each character
from U+0000 to U+00FF stands for the byte with that number. An end of null is no end. An SST without
section 2 has no "system"; the puts of that section stand there as stored, and as what they say. So
do the records of section 3 in "control". What older manifests lack is left out where it is 0.
Blocks tell their codec where the writer was asked for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from shalekv.format.block_frame import Codec
from shalekv.format.contents import SstContents
from shalekv.format.footer import SstProperties
from shalekv.format.index import BlockHandle
from shalekv.format.records import client_key, decode_idempotency_record, decode_load
from shalekv.format.sst import Sst
from shalekv.protocol.access import Grant, Policy, Quota, Role, Rule, Verb
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.manifest import (
    CasMode,
    Lease,
    Manifest,
    Origin,
    PendingLoad,
    RecentLoad,
    Snapshot,
    WalMode,
)
from shalekv.protocol.sst_table import SstInfo, SstTable

Json = dict[str, Any]

ARGUMENTS = ("block_bytes", "codec", "filter_bits_per_key")

_IDS = frozenset(
    "id database_id writer_nonce write_id compactor_nonce checksum manifest_checksum snapshot_id "
    "sst_ids".split()
)


def describe_sst(sst: Sst, arguments: Json) -> Json:
    """An SST that was written with these arguments (see `arguments_in`)."""
    description = arguments | {
        "properties": _described(asdict(sst.properties)),
        "contents": _described(asdict(sst.footer.contents)),
        "checksum": f"{sst.footer.checksum:08x}",
        "filter": _text(sst.filter_bytes),
        "blocks": [_describe_block(handle) for handle in sst.index],
        "entries": [_describe_point(entry) for entry in sst.entries()],
        "range_tombstones": [_describe_range(entry) for entry in sst.range_tombstones()],
    }
    system, control = [*sst.system_entries()], [*sst.control_entries()]
    if system:
        description["system"] = [_describe_system(entry) for entry in system]
    if control:
        description["control"] = [_describe_control(entry) for entry in control]
    if "codec" in arguments:
        for block in description["blocks"]:
            block["codec"] = sst.data[block["offset"]]
    return description


def arguments_in(description: Json) -> Json:
    """Return the arguments of `encode_sst` for the described SST."""
    result = {name: description[name] for name in ARGUMENTS if name in description}
    if "codec" in result:
        result["codec"] = Codec[result["codec"].upper()]
    if "filter_bits_per_key" not in result:
        result["filter_bytes"] = _bytes(description["filter"])
    return result


def statement(description: Json) -> Json:
    """Return the description without what depends on the compressor: ends of blocks, checksums."""
    if "codec" not in description:
        return description
    blocks = [
        {name: block[name] for name in ("rows", "section", "first_key", "codec")}
        for block in description["blocks"]
    ]
    return {name: description[name] for name in description if name != "checksum"} | {
        "blocks": blocks
    }


def properties_in(description: Json) -> SstProperties:
    return SstProperties(**_values(description["properties"]))


def contents_in(description: Json) -> SstContents:
    """Return the properties of the entries in the footer of the described SST."""
    return SstContents(**_values(description["contents"]))


def entries_in(description: Json) -> list[Entry]:
    """The puts and tombstones of the SST that is described."""
    return [_point(row) for row in description["entries"]]


def range_tombstones_in(description: Json) -> list[Entry]:
    """The range tombstones of the SST that is described."""
    return [
        Entry(_bytes(row["start"]), row["seq"], Kind.RANGE_TOMBSTONE, _bytes(row["end"] or ""))
        for row in description["range_tombstones"]
    ]


def system_in(description: Json) -> list[Entry]:
    """The entries of the system in the SST that is described."""
    return [_point(row) for row in description.get("system", ())]


def control_in(description: Json) -> list[Entry]:
    """The control records in the SST that is described."""
    return [
        Entry(_bytes(row["key"]), row["seq"], Kind.INGEST, _bytes(row["value"]))
        for row in description.get("control", ())
    ]


def describe_manifest(manifest: Manifest) -> Json:
    values = {field.name: getattr(manifest, field.name) for field in fields(Manifest)}
    recent = _rows(manifest.recent_loads)
    values |= {
        "cas_mode": manifest.cas_mode.name,
        "wal_mode": manifest.wal_mode.name,
        "wal_members": list(manifest.wal_members),
        "wal_members_next": list(manifest.wal_members_next),
        "wal_ids_left_out": [[each[0], each[-1]] for each in manifest.wal_ids_left_out],
        "leveled_ssts": _rows(manifest.leveled_ssts),
        "snapshots": [
            _without_zero(_without_zero(row, "created_ms"), "ssts_only")
            for row in _rows(manifest.snapshots)
        ],
        "leases": [_without_zero(row, "reserved_seq") for row in _rows(manifest.leases)],
        "pending_loads": [
            {"load_id": load.load_id, "ssts": _rows(load.ssts)} for load in manifest.pending_loads
        ],
        "recent_loads": [_without_zero(row, "logical_time_ms") for row in recent],
        "origins": _rows(manifest.origins),
    }
    described = _described(values)
    later_fields = (
        "origins",
        "time_reset_wal_id",
        "wal_members_next",
        "wal_ids_left_out",
        "is_dropped",
    )
    for later in ("loads_forgotten_ms", *later_fields):
        described = _without_zero(described, later)
    return described


def manifest_in(description: Json) -> Manifest:
    values = _values(description)
    values |= {
        "cas_mode": CasMode[values["cas_mode"]],
        "wal_mode": WalMode[values["wal_mode"]],
        "wal_members": tuple(values["wal_members"]),
        "wal_members_next": tuple(values.get("wal_members_next", ())),
        "wal_ids_left_out": tuple(
            range(first, last + 1) for first, last in values.get("wal_ids_left_out", ())
        ),
        "leveled_ssts": _table(values["leveled_ssts"]),
        "snapshots": tuple(Snapshot(**_values(row)) for row in values["snapshots"]),
        "leases": tuple(Lease(**_values(row)) for row in values["leases"]),
        "pending_loads": tuple(
            PendingLoad(row["load_id"], _table(row["ssts"])) for row in values["pending_loads"]
        ),
        "recent_loads": tuple(RecentLoad(**row) for row in values["recent_loads"]),
        "origins": tuple(Origin(**_values(row)) for row in values.get("origins", ())),
    }
    return Manifest(**values)


def describe_policy(policy: Policy, database_id: bytes, write_id: bytes) -> Json:
    """Describe the object with this policy; a rule without start and end has all keys."""
    return _described({"database_id": database_id, "write_id": write_id}) | {
        "version": policy.version,
        "is_enforced": policy.is_enforced,
        "secret": policy.secret.hex(),
        "roles": [
            {"name": role.name, "rules": [_describe_rule(rule) for rule in role.rules]}
            for role in policy.roles
        ],
        "grants": [
            {"subject": grant.subject, "roles": list(grant.roles), "quota": asdict(grant.quota)}
            for grant in policy.grants
        ],
    }


def policy_in(description: Json) -> Policy:
    """Return the policy that is described."""
    return Policy(
        description["version"],
        description["is_enforced"],
        tuple(
            Role(row["name"], tuple(_rule(rule) for rule in row["rules"]))
            for row in description["roles"]
        ),
        tuple(
            Grant(row["subject"], tuple(row["roles"]), Quota(**row["quota"]))
            for row in description["grants"]
        ),
        bytes.fromhex(description["secret"]),
    )


def ids_in(description: Json) -> Json:
    """Return the arguments of `encode_policy` for the policy that is described."""
    return {name: bytes.fromhex(description[name]) for name in ("database_id", "write_id")}


def _describe_rule(rule: Rule) -> Json:
    verbs = sorted(verb.value for verb in rule.verbs)
    return {"verbs": verbs, "start": _text(rule.keys.start), "end": _text(rule.keys.end) or None}


def _rule(row: Json) -> Rule:
    keys = KeyRange(_bytes(row["start"]), _bytes(row["end"] or ""))
    return Rule(frozenset(Verb(verb) for verb in row["verbs"]), keys)


def _describe_point(entry: Entry) -> Json:
    row: Json = {"key": _text(entry.key), "seq": entry.seq}
    if entry.kind is Kind.TOMBSTONE:
        return row | {"tombstone": True}
    row["put"] = _text(entry.value)
    return row | ({"expire_at_ms": entry.expire_at_ms} if entry.expire_at_ms else {})


def _point(row: Json) -> Entry:
    return Entry(
        _bytes(row["key"]),
        row["seq"],
        Kind.PUT if "put" in row else Kind.TOMBSTONE,
        _bytes(row.get("put", "")),
        row.get("expire_at_ms", 0),
    )


def _describe_system(entry: Entry) -> Json:
    row = _describe_point(entry) | {"client_key": _text(client_key(entry.key))}
    if entry.kind is Kind.TOMBSTONE:
        return row
    record = decode_idempotency_record("a golden file", entry.value)
    return row | {
        "request_hash": record.request_hash.hex(),
        "wal_id": record.wal_id,
        "reply_kind": int(record.reply_kind),
        "reply": _text(record.reply),
    }


def _describe_control(entry: Entry) -> Json:
    load = decode_load("a golden file", entry)
    return {
        "key": _text(entry.key),
        "seq": entry.seq,
        "value": _text(entry.value),
        "load_id": load.load_id,
        "ssts": _rows(load.ssts),
    }


def _describe_block(handle: BlockHandle) -> Json:
    """Return the index entry, without the sequence number that the list of SSTs assigns."""
    described = _described(handle._asdict())
    del described["assigned_seq"]
    return described


def _without_zero(row: Json, name: str) -> Json:
    """A row without a field that older versions did not have."""
    return {key: value for key, value in row.items() if key != name or value}


def _describe_range(entry: Entry) -> Json:
    return {"start": _text(entry.key), "end": _text(entry.value) or None, "seq": entry.seq}


def _rows(rows: Iterable[Any]) -> list[Json]:
    return [_without_zero(_described(asdict(row)), "first_expiry_ms") for row in rows]


def _table(rows: list[Json]) -> SstTable:
    return SstTable.from_infos(SstInfo(**_values(row)) for row in rows)


def _described(values: Json) -> Json:
    result: Json = {}
    for name, value in values.items():
        if name in _IDS:
            result[name] = value.hex() if isinstance(value, bytes) else f"{value:08x}"
        else:
            result[name] = _text(value) if isinstance(value, bytes) else value
    return result


def _values(description: Json) -> Json:
    """The fields as our types have them: the inverse of `_described`."""
    result: Json = {}
    for name, value in description.items():
        if name.endswith("checksum"):
            result[name] = int(value, 16)
        elif name in _IDS:
            result[name] = bytes.fromhex(value)
        else:
            result[name] = _bytes(value) if name in {"first_key", "last_key"} else value
    return result


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
