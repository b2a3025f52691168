"""The status and the slow calls of several processes that share a port, from those of each.

    counters, memory, caches, watches   sums
    header, state of a reader           of the process that is least up to date, or worst
    levels, manifest, snapshots         of the process that was asked: they describe the database

A process that does not answer in time is missing from the sums; `StatusReply.processes` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from shalekv.telemetry.slow_calls import KEPT_MAX
from shalekv.v1 import admin_pb2, kv_pb2

_State = admin_pb2.ReaderStatus.State

# From the best to the worst.
_STATES = (
    _State.STATE_FOLLOWING,
    _State.STATE_LOADING,
    _State.STATE_GAP,
    _State.STATE_FULL,
    _State.STATE_CUT_OFF,
)
_CACHE = ("hits", "misses", "requests", "fetched_bytes", "bytes", "bytes_max")
_DISK = ("hits", "misses")  # the processes share its files
_READS = ("filter_negatives", "filter_false_positives")
_READER = ("snapshots_lost", "wal_objects_applied", "empty_polls", "gaps", "gap_ms", "tails")
_ACCESS = ("denied", "unauthenticated", "quota_exceeded", "audit_lines_lost")
_WATCHES = ("watches", "streams", "buffered_bytes", "commits_told", "catching_up", "cut")
_REQUESTS = ("requests", "failures", "objects", "bytes")


def add_status(whole: admin_pb2.StatusReply, other: admin_pb2.StatusReply) -> None:
    """Add the status of another process to that of the whole."""
    _add_header(whole.header, other.header)
    _add(whole.memtable, other.memtable, ("bytes", "bytes_max"))
    _add_memory(whole.memory, other.memory)
    _add_reads(whole.reads, other.reads)
    _add_reader(whole.reader, other.reader)
    _add(whole.watches, other.watches, _WATCHES)
    _add_requests(whole, other.store_requests)
    add_calls(whole, other.calls)
    if other.HasField("access"):
        add_refusals(whole, other.access)


def add_calls(whole: admin_pb2.StatusReply, calls: Iterable[admin_pb2.CallStatus]) -> None:
    """Add counts of calls to those of the same methods."""
    known = {each.method: each for each in whole.calls}
    for call in calls:
        total = known.get(call.method)
        if total is None:
            whole.calls.append(call)
            continue
        _add(total, call, ("calls", "failures", "total_us"))
        counts = call.histogram_us
        total.histogram_us.extend([0] * (len(counts) - len(total.histogram_us)))
        for number, count in enumerate(counts):
            total.histogram_us[number] += count
    whole.calls.sort(key=lambda each: each.method)


def add_slow_calls(
    whole: admin_pb2.ListSlowCallsReply, calls: Iterable[admin_pb2.SlowCall]
) -> None:
    """Add slow calls of another process; the newest of all are kept, the newest first."""
    found = sorted((*whole.calls, *calls), key=lambda each: -each.ended_at_ms)
    del whole.calls[:]
    whole.calls.extend(found[:KEPT_MAX])


def add_refusals(whole: admin_pb2.StatusReply, refused: admin_pb2.AccessStatus) -> None:
    """Add counts of access control."""
    whole.access.SetInParent()
    _add(whole.access, refused, _ACCESS)


def _add(total: Message, other: Message, names: Sequence[str]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(other, name))


def _add_header(whole: kv_pb2.ReplyHeader, other: kv_pb2.ReplyHeader) -> None:
    staleness_ms = max(whole.staleness_ms, other.staleness_ms)
    if other.seq < whole.seq:
        whole.CopyFrom(other)
    whole.staleness_ms = staleness_ms


def _add_memory(whole: admin_pb2.MemoryStatus, other: admin_pb2.MemoryStatus) -> None:
    _add(whole, other, ("bytes", "bytes_max"))
    known = {part.name: part for part in whole.parts}
    for part in other.parts:
        if part.name in known:
            _add(known[part.name], part, ("bytes", "bytes_max"))
        else:
            whole.parts.append(part)


def _add_reads(whole: admin_pb2.ReadStatus, other: admin_pb2.ReadStatus) -> None:
    _add(whole, other, _READS)
    _add(whole.blocks, other.blocks, _CACHE)
    _add(whole.metadata, other.metadata, _CACHE)
    if other.HasField("disk"):
        _add(whole.disk, other.disk, _DISK)


def _add_reader(whole: admin_pb2.ReaderStatus, other: admin_pb2.ReaderStatus) -> None:
    _add(whole, other, _READER)
    whole.state = max(whole.state, other.state, key=_badness)
    whole.next_wal_id = min(whole.next_wal_id, other.next_wal_id)
    whole.open_ms = max(whole.open_ms, other.open_ms)


def _badness(state: admin_pb2.ReaderStatus.State.ValueType) -> int:
    return _STATES.index(state) if state in _STATES else len(_STATES)


def _add_requests(
    whole: admin_pb2.StatusReply, requests: Iterable[admin_pb2.StoreRequestStatus]
) -> None:
    known = {(each.operation, each.folder): each for each in whole.store_requests}
    for each in requests:
        total = known.get((each.operation, each.folder))
        if total is None:
            whole.store_requests.append(each)
        else:
            _add(total, each, _REQUESTS)
