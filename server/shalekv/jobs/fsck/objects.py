"""Shared by all parts of a check: scope and progress, active manifests, the audit of one SST.

A large SST is read in pieces, so that only a few megabytes of it are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from shalekv.errors import CorruptObject, ObjectNotFound, StoreError, WrongObject
from shalekv.format.coding import crc32c
from shalekv.format.filter import Filter
from shalekv.format.footer import Footer, needed_tail, read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    MANIFEST_FOLDER,
    manifest_name,
    parse_level_name,
    parse_manifest_name,
)
from shalekv.format.sst import SstAudit, open_filter, read_index
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.lease import protects
from shalekv.protocol.manifest import Manifest, PendingLoad, Snapshot
from shalekv.protocol.snapshot import NEVER, is_expired
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

TAIL_BYTES = 64 << 10  # holds the footer unless its keys are long
PIECE_BYTES = 4 << 20  # of an object that are in memory at once

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class CheckProgress:
    """Progress of a check, and the totals as far as they are known."""

    manifests: int = 0
    wal_objects: int = 0
    fences: int = 0  # among the WAL objects
    ssts: int = 0
    size_bytes: int = 0  # of all objects checked
    objects_total: int = 0
    bytes_total: int = 0
    merged_keys: int = 0  # by a deep check


@dataclass(slots=True)
class Scope:
    """The state that all parts of one check share."""

    store: CasStore
    parallel: int
    progress: CheckProgress = field(default_factory=CheckProgress)
    missing: list[str] = field(default_factory=list)  # to be checked again at the end
    recorded: set[str] = field(default_factory=set)  # ids of loads that the log commits
    origins: Origins = field(init=False)  # locates SSTs in this and other databases

    def __post_init__(self) -> None:
        self.origins = Origins(self.store, b"")  # no manifest is read yet

    def reported_name(self, name: str) -> str:
        """Return the name of an object for a finding: with the URL, if in another database."""
        sst_id = parse_level_name(name)
        if sst_id is None or not self.origins.is_foreign(sst_id):
            return name
        return f"{self.origins.locate(sst_id).store.url}/{name}"


async def in_chunks(
    items: Iterable[ItemT], check: Callable[[ItemT], Awaitable[ResultT]], parallel: int
) -> AsyncIterator[ResultT]:
    """Check all items, `parallel` at once; yield the results in the order of the items."""

    async def run(item: ItemT) -> ResultT:
        return await check(item)

    remaining = iter(items)
    while chunk := list(islice(remaining, parallel)):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(item)) for item in chunk]
        for task in running:
            yield task.result()


@dataclass(slots=True)
class ObjectAudit:
    """The result of the check of one object."""

    name: str
    size_bytes: int
    footer: Footer | None = None  # None: it is unreadable
    loads: list[PendingLoad] = field(default_factory=list)  # that its control records commit
    repeated_key: bytes | None = None  # one that occurs more than once; None: there is none
    findings: list[Finding] = field(default_factory=list)
    is_missing: bool = False

    def add(self, error: CorruptObject) -> None:
        """Add a finding."""
        self.findings.append(finding_of(error))


def finding_of(error: CorruptObject) -> Finding:
    """Convert an error of the format to a finding."""
    return Finding(error.name, FindingKind(error.reason.lower()), error.problem, error.offset)


def unreadable(name: str, error: StoreError) -> Finding:
    """Convert an error of the store to a finding."""
    return Finding(name, FindingKind.UNREADABLE, str(error))


class _Bytes:
    """The bytes of one object; a small object is fetched whole."""

    def __init__(self, store: CasStore, name: str, size_bytes: int) -> None:
        self._store = store
        self._name = name
        self._size_bytes = size_bytes
        self._whole: bytes | None = None

    async def read(self, offset: int, length: int) -> bytes:
        if self._size_bytes > PIECE_BYTES:
            return await self._store.get_range(self._name, offset, length)
        if self._whole is None:
            self._whole = (await self._store.get(self._name)).data
        return self._whole[offset : offset + length]


async def audit_object(
    store: CasStore,
    name: str,
    size_bytes: int,
    *,
    database_id: bytes,
    checksum: int | None = None,
    assigned_seq: int = 0,
) -> ObjectAudit:
    """Check every byte of the SST or WAL object `name`, and that its parts fit together.

    `checksum` is the checksum of the footer in the manifest (None: it has none), `assigned_seq` the
    sequence number that the manifest gives to entries without one. All damage is reported, except
    behind a footer or an index that cannot be read.
    """
    audited = ObjectAudit(name, size_bytes)
    data = _Bytes(store, name, size_bytes)
    try:
        footer = await _footer(data, audited, database_id, checksum)
        audited.footer = footer
        key_filter = await _filter(data, audited, footer)
        layout = footer.layout
        index_bytes = await data.read(layout.index_offset, layout.index_len)
        index = read_index(footer, index_bytes, assigned_seq)
        await _blocks(store, data, audited, SstAudit(footer, index, key_filter), index)
    except CorruptObject as error:
        audited.add(error)
    except ObjectNotFound:
        audited.is_missing = True
    except StoreError as error:
        audited.findings.append(unreadable(name, error))
    return audited


async def _footer(
    data: _Bytes, audited: ObjectAudit, database_id: bytes, checksum: int | None
) -> Footer:
    name, size_bytes = audited.name, audited.size_bytes
    tail_bytes = min(TAIL_BYTES, size_bytes)
    tail = await data.read(size_bytes - tail_bytes, tail_bytes)
    needed = needed_tail(name, tail, size_bytes)
    if tail_bytes < needed <= size_bytes:
        tail = await data.read(size_bytes - needed, needed)
    footer = read_footer(name, tail, size_bytes, database_id=database_id)
    if checksum is not None and footer.checksum != checksum:
        at = footer.layout.index_offset + footer.layout.index_len
        problem = f"checksum of the footer is {footer.checksum:#010x}, expected {checksum:#010x}"
        audited.add(WrongObject(name, at, problem))
    return footer


async def _filter(data: _Bytes, audited: ObjectAudit, footer: Footer) -> Filter | None:
    layout = footer.layout
    try:
        return open_filter(footer, await data.read(layout.filter_offset, layout.filter_len))
    except CorruptObject as error:
        audited.add(error)
        return None


async def _blocks(
    store: CasStore, data: _Bytes, audited: ObjectAudit, audit: SstAudit, index: BlockIndex
) -> None:
    for numbers, (offset, length) in index.pieces(PIECE_BYTES):
        piece = await data.read(offset, length)
        for error in await store.runtime.workers.run(audit.check_blocks, numbers, piece):
            audited.add(error)
    audited.repeated_key = audit.repeated_key
    audited.loads = audit.loads
    contradiction = audit.check_contents()
    if contradiction is not None:
        audited.add(contradiction)


@dataclass(frozen=True, slots=True)
class NamedSst:
    """An SST that a manifest references."""

    info: SstInfo
    by: str  # the name of the manifest
    pending: str | None = None  # the id of its load, until that is compacted


@dataclass(slots=True)
class ActiveManifestSet:
    """The active manifests, as far as they are readable, at one time of the store's clock.

    These are the current manifest, and those of snapshots that have not expired. Damage is a
    finding here, while `store.active_manifests.ActiveManifests` raises it.
    """

    now_s: float = 0.0
    current: Manifest | None = None  # if it is damaged, the newest one that is not
    manifests: dict[int, Manifest] = field(default_factory=dict)  # including the current one
    findings: list[Finding] = field(default_factory=list)
    sizes_bytes: int = 0
    is_complete: bool = True  # whether all of them are readable

    @property
    def first_wal_id(self) -> int:
        """The first WAL slot that must exist: the last compacted object of an active manifest, or
        an older one that a lease keeps.
        """
        firsts = [manifest.wal_id_last_compacted or 0 for manifest in self.readable()]
        leases = self.current.leases if self.current is not None else ()
        kept = [lease.wal_id_min for lease in leases if lease.wal_id_min is not None]
        return min([*firsts, *kept], default=0)

    def readable(self) -> Iterator[Manifest]:
        """Yield the manifests whose WAL is kept: not those of snapshots that keep only SSTs."""
        snapshots = self.current.snapshots if self.current is not None else ()
        full = {each.manifest_id for each in snapshots if not each.ssts_only}
        for manifest_id, manifest in self.manifests.items():
            if manifest is self.current or manifest_id in full:
                yield manifest

    def ssts(self) -> Iterator[NamedSst]:
        """Yield all SSTs that a manifest references, newest manifest first; some are repeated."""
        for manifest in sorted(self.manifests.values(), key=_newest_first):
            name = manifest_name(manifest.manifest_id)
            for info in manifest.leveled_ssts:
                yield NamedSst(info, name)
            for load in manifest.pending_loads:
                for info in load.ssts:
                    yield NamedSst(info, name, load.load_id)

    def protects(self, sst_id: bytes) -> bool:
        """Return whether a lease protects an SST, even if no manifest references it."""
        leases = self.current.leases if self.current is not None else ()
        return any(protects(lease.id, sst_id) for lease in leases)


async def read_active(store: CasStore, *, may_ask_time: bool = True) -> ActiveManifestSet:
    """Read the active manifests. Raises `DatabaseNotFound`.

    Some stores tell their time by a write: without `may_ask_time`, a lower bound of it counts.
    """
    active = ActiveManifestSet()
    for manifest_id in await _ids(store):
        data = await _read(store, active, manifest_name(manifest_id))
        if data is None:
            continue  # an older one is better than none
        current = await _decode(store, active, manifest_id, data)
        if current is not None:
            active.current = current
            lower_s = current.logical_time_ms / 1_000
            active.now_s = await _now_s(store, current) if may_ask_time else lower_s
            await _read_snapshots(store, active, current)
            break
    return active


async def _now_s(store: CasStore, current: Manifest) -> float:
    """Return the store's time, or a lower bound: a read-only copy of a database has no clock."""
    if all(snapshot.snapshot_expire_time_s == NEVER for snapshot in current.snapshots):
        return 0.0
    try:
        return await store.now_ms() / 1_000
    except StoreError:
        return current.logical_time_ms / 1_000


async def _ids(store: CasStore) -> list[int]:
    """Return the ids of all manifests, newest first."""
    ids = []
    async for info in store.list(MANIFEST_FOLDER):
        manifest_id = parse_manifest_name(info.name)
        if manifest_id is not None:
            ids.append(manifest_id)
    if not ids:
        await StoredManifest(store).refresh()  # raises `DatabaseNotFound`
    return sorted(ids, reverse=True)


async def _read_snapshots(store: CasStore, active: ActiveManifestSet, current: Manifest) -> None:
    for snapshot in current.snapshots:
        manifest_id = snapshot.manifest_id
        if is_expired(snapshot, active.now_s) or manifest_id >= current.manifest_id:
            continue
        if manifest_id in active.manifests:
            continue  # read for another snapshot
        data = await _read(store, active, manifest_name(manifest_id), snapshot)
        if data is None or await _decode(store, active, manifest_id, data) is None:
            continue
        if snapshot.manifest_checksum:
            _compare(active, snapshot, data)


def _compare(active: ActiveManifestSet, snapshot: Snapshot, data: bytes) -> None:
    found = crc32c(data)
    if found == snapshot.manifest_checksum:
        return
    problem = (
        f"its checksum is {found:#010x}, snapshot {snapshot.id.hex()} is of one with "
        f"{snapshot.manifest_checksum:#010x}"
    )
    name = manifest_name(snapshot.manifest_id)
    active.findings.append(Finding(name, FindingKind.SNAPSHOT_CHECKSUM, problem))


async def _read(
    store: CasStore, active: ActiveManifestSet, name: str, snapshot: Snapshot | None = None
) -> bytes | None:
    """Read the bytes of a manifest; None: unreadable, which is added to the findings."""
    try:
        return (await store.get(name)).data
    except ObjectNotFound:
        if snapshot is None:
            return None  # collected since it was listed
        problem = f"is missing, and snapshot {snapshot.id.hex()} is of it"
        finding = Finding(name, FindingKind.MISSING, problem)
    except StoreError as error:
        finding = unreadable(name, error)
    active.findings.append(finding)
    active.is_complete = False
    return None


async def _decode(
    store: CasStore, active: ActiveManifestSet, manifest_id: int, data: bytes
) -> Manifest | None:
    try:
        manifest = await store.runtime.workers.run(
            decode_manifest, manifest_name(manifest_id), data
        )
    except CorruptObject as error:
        active.findings.append(finding_of(error))
        active.is_complete = False
        return None
    active.manifests[manifest_id] = manifest
    active.sizes_bytes += len(data)
    return manifest


def same_sst(one: SstInfo, other: SstInfo) -> bool:
    """Return whether two manifests describe the same object.

    Its level and sequence numbers may differ, and its expiry, which one of them may not know.
    """
    ignored = {"level": 0, "min_seq": 0, "max_seq": 0, "first_expiry_ms": 0}
    return replace(one, **ignored) == replace(other, **ignored)  # type: ignore[arg-type] # numbers


def _newest_first(manifest: Manifest) -> int:
    return -manifest.manifest_id
