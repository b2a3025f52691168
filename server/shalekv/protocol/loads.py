"""Loads: ready-made SSTs that become one commit (server/docs/protocol.md, "Loads"). Pure.

A *pending load* in the manifest names the files of a load before they are committed, so that they
are kept. One control record in the WAL is the commit. When that record is compacted, the files
become rows of L0, in the same edit that removes the pending load. All entries of a load have one
sequence number, which is unknown when the files are written. It is in the rows and in the record
instead of in the files.

Committed loads are remembered, so that none is applied twice. Ids of the form ``<stream>-<number>``
are those of a stream's batches, which come in order: the highest of each stream covers all below
it. A bounded number of streams is remembered, those with the latest commits, and as many other
loads. A load that may be one of those that were forgotten is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

from shalekv.errors import IllegalState, InvalidRequest, LeaseLost, LoadUnknown
from shalekv.protocol.lease import protects
from shalekv.protocol.manifest import L0, Manifest, PendingLoad, RecentLoad, SortedRun, Version
from shalekv.protocol.sst_table import SstInfo, SstTable

LOAD_ID_BYTES_MAX = 256
OWN_PREFIX = "shalekv:"  # of the loads that a writer makes of large batches, which never repeat
# Largest difference of the clocks that date a load's commit and its files.
CLOCK_MARGIN_MS = 60_000
_RUN_LEVEL = 1  # of a load as a version of its own: any level that is a sorted run
_BATCH = re.compile(r"(?s)(.+)-(0|[1-9][0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class CommittedLoad:
    """A load whose record is in the WAL. Its `ssts` have no sequence numbers yet."""

    load_id: str
    ssts: SstTable
    seq: int
    wal_id: int


def level_rows(load: CommittedLoad) -> list[SstInfo]:
    """Return the rows of L0 that the load becomes when its record is compacted."""
    return [replace(info, level=L0, min_seq=load.seq, max_seq=load.seq) for info in load.ssts]


def load_version(load: CommittedLoad) -> Version:
    """Return the load as a version of one sorted run, which can be read like any other."""
    ssts = [replace(info, level=_RUN_LEVEL) for info in level_rows(load)]
    return Version(
        manifest_id=0,
        wal_id=load.wal_id,
        last_seq=load.seq,
        l0=(),
        runs=[SortedRun.of(_RUN_LEVEL, ssts)],
        system=(),
    )


def check_load_id(load_id: str) -> str:
    """Return the id of a load, 1 to 256 bytes of UTF-8. Raises `InvalidRequest`."""
    length = len(load_id.encode("utf-8", "replace"))
    if not 1 <= length <= LOAD_ID_BYTES_MAX:
        problem = f"{length} bytes, and a load id has 1 to {LOAD_ID_BYTES_MAX}"
        raise InvalidRequest("load_id", problem)
    if any("\ud800" <= letter <= "\udfff" for letter in load_id):
        raise InvalidRequest("load_id", "has half of a surrogate pair, which is not a character")
    if load_id.startswith(OWN_PREFIX):
        raise InvalidRequest("load_id", f"ids that begin with {OWN_PREFIX!r} are the writer's own")
    return load_id


def check_single_load_id(load_id: str) -> str:
    """Return the id of a load that is not a batch of a stream. Raises `InvalidRequest`."""
    if batch_of(check_load_id(load_id)) is not None:
        problem = (
            f"{load_id!r} is the id of a stream's batch, with which all batches before count as "
            "committed: let the id not end in - and a number"
        )
        raise InvalidRequest("load_id", problem)
    return load_id


def files_problem(ssts: Sequence[SstInfo]) -> tuple[int, str] | None:
    """Return the index of an invalid file in the list of a load, and the problem; None if all fit.

    Only the list is checked, not the contents of the files.
    """
    for at, info in enumerate(ssts):
        if info.level or info.min_seq or info.max_seq:
            return at, "level and sequence numbers are given by the commit: leave them 0"
        if not info.entry_count or not info.size_bytes or not info.block_meta_len:
            return at, "entry_count, size_bytes and block_meta_len say that it is empty"
        if not info.last_key or info.last_key < info.first_key:
            return at, "the last key is below the first key, or empty"
    for at, (before, after) in enumerate(pairwise(ssts), 1):
        if after.first_key <= before.last_key:
            return at, "the first key is not above the last key of the file before it"
    ids = [info.id for info in ssts]
    if len({*ids}) != len(ids):
        return next(at for at, id_ in enumerate(ids) if id_ in ids[:at]), "is listed twice"
    return None


def find_load(loads: Iterable[RecentLoad | CommittedLoad], load_id: str) -> int | None:
    """Return the sequence number of the load, or of a later batch of its stream; None: neither."""
    own = batch_of(load_id)
    for load in loads:
        if load.load_id == load_id:
            return load.seq
        other = batch_of(load.load_id) if own else None
        if own and other and other[0] == own[0] and other[1] >= own[1]:
            return load.seq
    return None


def check_known(manifest: Manifest, load_id: str, *, oldest_ms: int) -> None:
    """Raise `LoadUnknown` if the load may have been committed and forgotten.

    `oldest_ms` is when the oldest of its files was written, by the store's clock. Files that are
    younger than all forgotten loads cannot have been part of one. No load of a remembered stream
    was forgotten, and a writer makes each of its own loads only once. REQUIRES: `find_load` has not
    found the load.
    """
    if not manifest.loads_forgotten_ms or load_id.startswith(OWN_PREFIX):
        return
    stream = _stream_of(load_id)
    if stream and any(_stream_of(each.load_id) == stream for each in manifest.recent_loads):
        return
    if oldest_ms <= manifest.loads_forgotten_ms + CLOCK_MARGIN_MS:
        message = (
            f"load {load_id!r}: its files are older than loads that are not remembered any more, "
            "so it may be one of those. Read to find out; if it is not, write its files again"
        )
        raise LoadUnknown(message)


def register_load(manifest: Manifest, load: PendingLoad, *, oldest_ms: int) -> Manifest:
    """Return the manifest in which the load is pending, so that its files are kept.

    One of the following must hold (F3): the files do not exist yet, so that no collector can have
    decided to delete them (then `oldest_ms` is now, by the store's clock); leases protect them; or
    the oldest of them was written at `oldest_ms`, later than all objects that a collector may have
    deleted. A repeated edit leaves one pending load. Raises `LeaseLost`, and `LoadUnknown` if the
    load or a file of it may have been committed before.
    """
    check_known(manifest, load.load_id, oldest_ms=oldest_ms)
    is_new = load.load_id.startswith(OWN_PREFIX)  # no file of it is written before this edit
    is_old = not is_new and oldest_ms < manifest.gc_cutoff_ms
    if is_old and not _are_leased(manifest, load.ssts):
        message = (
            f"load {load.load_id!r}: its files are covered by no lease in manifest "
            f"{manifest.manifest_id}, and so old that a collector may have deleted them. Nothing "
            "was committed: write them again"
        )
        raise LeaseLost(message)
    if not is_new and manifest.leveled_ssts.holds_any(info.id for info in load.ssts):
        message = (
            f"load {load.load_id!r}: a file of it is in the levels already, so it was committed "
            "before, under this id or another"
        )
        raise LoadUnknown(message)
    others = _without(manifest.pending_loads, {load.load_id})
    ids = {info.id for info in load.ssts}
    same = next((each for each in others if not is_new and each.ssts.holds_any(ids)), None)
    if same is not None:
        message = (
            f"load {load.load_id!r}: a file of it belongs to load {same.load_id!r}, which was "
            "committed before, or is on its way"
        )
        raise LoadUnknown(message)
    return replace(manifest, pending_loads=(*others, load))


def is_pending(manifest: Manifest, load_id: str) -> bool:
    """Return whether the load is registered and its record is not compacted."""
    return any(load.load_id == load_id for load in manifest.pending_loads)


def drop_pending(manifest: Manifest, load_ids: Collection[str]) -> Manifest:
    """Return the manifest without these pending loads. Ids that it does not have are ignored.

    REQUIRES: no record of them is in the WAL, or in flight.
    """
    return replace(manifest, pending_loads=_without(manifest.pending_loads, load_ids))


def drop_unrecorded(manifest: Manifest, recorded: Iterable[str]) -> Manifest:
    """Return the manifest without the pending loads that no record commits.

    `recorded` are the ids of the loads of all records in the WAL. REQUIRES: no other record can
    follow, because older writers are fenced, as in an opening, or because the WAL is a copy.
    """
    kept = {*recorded}
    dropped = {load.load_id for load in manifest.pending_loads if load.load_id not in kept}
    return drop_pending(manifest, dropped)


def with_committed(
    manifest: Manifest, load: CommittedLoad, *, logical_time_ms: int, max_count: int
) -> Manifest:
    """Return the manifest after the record of a load is compacted: not pending, but remembered.

    `logical_time_ms` is that of the WAL object. At most `max_count` streams and other loads each
    are remembered. REQUIRES: the same edit puts `level_rows` into the levels and raises c. Raises
    `IllegalState` if the load is not pending: its files may be gone.
    """
    if not is_pending(manifest, load.load_id):
        message = (
            f"load {load.load_id!r} of WAL object {load.wal_id} is not pending in manifest "
            f"{manifest.manifest_id}: nothing has protected its files. Check the database with "
            "`shalekv fsck`"
        )
        raise IllegalState(message)
    dropped = drop_pending(manifest, {load.load_id})
    if load.load_id.startswith(OWN_PREFIX):
        return dropped
    return _remember(dropped, RecentLoad(load.load_id, load.seq, logical_time_ms), max_count)


def batch_of(load_id: str) -> tuple[str, int] | None:
    """Return stream and number of a load that is a batch of a stream; None for any other load."""
    match = _BATCH.fullmatch(load_id)
    return None if match is None else (match[1], int(match[2]))


def _stream_of(load_id: str) -> str:
    """Return the stream of which the load is a batch; empty: none."""
    batch = batch_of(load_id)
    return batch[0] if batch else ""


def _remember(manifest: Manifest, recent: RecentLoad, max_count: int) -> Manifest:
    """Return the manifest that remembers one more load, and forgets the oldest beyond the bound."""
    own = batch_of(recent.load_id)
    others = []
    for load in manifest.recent_loads:
        other = batch_of(load.load_id)
        is_same = load.load_id == recent.load_id
        if is_same or (own and other and own[0] == other[0] and other[1] < own[1]):
            continue
        others.append(load)
    loads = [*others, recent] if find_load(others, recent.load_id) is None else others
    loads.sort(key=attrgetter("seq"))
    streams = [each for each in loads if batch_of(each.load_id)]
    singles = [each for each in loads if not batch_of(each.load_id)]
    forgotten = {
        *streams[: max(len(streams) - max_count, 0)],
        *singles[: max(len(singles) - max_count, 0)],
    }
    forgotten_ms = max((each.logical_time_ms for each in forgotten), default=0)
    return replace(
        manifest,
        recent_loads=tuple(each for each in loads if each not in forgotten),
        loads_forgotten_ms=max(manifest.loads_forgotten_ms, forgotten_ms),
    )


def _are_leased(manifest: Manifest, ssts: Iterable[SstInfo]) -> bool:
    return all(any(protects(lease.id, info.id) for lease in manifest.leases) for info in ssts)


def _without(loads: Iterable[PendingLoad], load_ids: Collection[str]) -> tuple[PendingLoad, ...]:
    return tuple(load for load in loads if load.load_id not in load_ids)
