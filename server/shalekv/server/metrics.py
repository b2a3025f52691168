"""Metrics of a role: the counts of its status, by the names of `telemetry.metrics`.

A status has what operators ask for, and is made of counters that are there anyway; so metrics and
statuses agree. What only metrics have is added by the parts themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from shalekv.protocol.retention import PinnedBytes
from shalekv.telemetry.metrics import Metrics
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.wording import MS_PER_S
from shalekv.write.quorum.links import NodeStatus

_ROLES = {kv_pb2.ROLE_WRITER: "writer", kv_pb2.ROLE_READER: "reader"}


def role_of(header: kv_pb2.ReplyHeader) -> str:
    """Return the role of the process that has made a header."""
    return _ROLES[header.role]


def add_status(metrics: Metrics, status: admin_pb2.StatusReply) -> None:
    """Add what a status says; its snapshots, calls and requests are left to others."""
    _add_progress(metrics, status)
    _add_levels(metrics, status)
    _add_reads(metrics, status.reads)
    for part in status.memory.parts:
        component = part.name.removesuffix("_max").removesuffix("_bytes")
        metrics.add("memory_bytes", part.bytes, component)
        metrics.add("memory_max_bytes", part.bytes_max, component)
    metrics.add("watches", status.watches.watches)
    metrics.add("watch_buffered_bytes", status.watches.buffered_bytes)
    metrics.add("watches_cut", status.watches.cut)
    if status.HasField("quorum"):
        _add_quorum(metrics, status.quorum)


def add_pins(metrics: Metrics, pinned: Iterable[PinnedBytes], now_ms: int) -> None:
    """Add the snapshots that have not expired. `now_ms` is logical time."""
    alone, oldest_ms = list[int | None](), now_ms
    for each in pinned:
        alone.append(each.alone_bytes)
        oldest_ms = min(oldest_ms, each.snapshot.created_ms or now_ms)
    metrics.add("snapshots", len(alone))
    if None not in alone:  # else it is not known yet
        metrics.add("pinned_bytes", sum(filter(None, alone)))
    metrics.add("oldest_pin_age_seconds", (now_ms - oldest_ms) / MS_PER_S)


def add_node(metrics: Metrics, node: NodeStatus) -> None:
    """Add the logs of a safekeeper."""
    metrics.add("safekeeper_disk_free_bytes", node.disk_free_bytes)
    for member in node.members:
        database = member.place.database_id.hex()
        metrics.add("safekeeper_log_bytes", member.log_bytes, database)
        metrics.add("safekeeper_unarchived_objects", member.unarchived_objects, database)


def _add_progress(metrics: Metrics, status: admin_pb2.StatusReply) -> None:
    header = status.header
    metrics.add("sequence_number", header.seq)
    metrics.add("database_epoch", header.epoch)
    metrics.add("staleness_seconds", header.staleness_ms / MS_PER_S)
    metrics.add("ready", status.read_readiness.is_ready, "reads")
    if status.HasField("write_readiness"):
        metrics.add("ready", status.write_readiness.is_ready, "writes")
    if status.HasField("writer"):
        metrics.add("wal_objects_in_flight", status.writer.wal_objects_in_flight)
    if status.HasField("reader"):
        metrics.add("reader_gaps", status.reader.gaps)
        metrics.add("reader_gap_seconds", status.reader.gap_ms / MS_PER_S)


def _add_levels(metrics: Metrics, status: admin_pb2.StatusReply) -> None:
    compaction, levels = status.compaction, status.levels
    metrics.add("uncompacted_bytes", compaction.uncompacted_bytes)
    metrics.add("uncompacted_wal_objects", compaction.wal_objects)
    metrics.add("compaction_debt_bytes", compaction.debt_bytes)
    metrics.add("read_amplification", levels.read_amplification)
    metrics.add("space_amplification", levels.space_amplification)
    for level in levels.levels:
        metrics.add("level_ssts", level.ssts, str(level.level))
        metrics.add("level_bytes", level.bytes, str(level.level))


def _add_reads(metrics: Metrics, reads: admin_pb2.ReadStatus) -> None:
    caches = {"block": reads.blocks, "metadata": reads.metadata}
    if reads.HasField("disk"):
        caches["disk"] = reads.disk
    for name, cache in caches.items():
        metrics.add("cache_lookups", cache.hits, name, "hit")
        metrics.add("cache_lookups", cache.misses, name, "miss")
        metrics.add("cache_bytes", cache.bytes, name)
        metrics.add("cache_max_bytes", cache.bytes_max, name)
    metrics.add("filter_lookups", reads.filter_negatives, "negative")
    metrics.add("filter_lookups", reads.filter_false_positives, "false_positive")


def _add_quorum(metrics: Metrics, quorum: admin_pb2.QuorumStatus) -> None:
    metrics.add("quorum_unarchived_bytes", quorum.unarchived_bytes)
    for member in quorum.members:
        metrics.add("safekeeper_connected", member.is_connected, member.address)
        lag = max(quorum.last_lsn - member.flushed_lsn, 0)
        metrics.add("safekeeper_lag_records", lag, member.address)
