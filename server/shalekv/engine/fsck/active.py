"""The manifests that count: the current one, and those of snapshots that have not expired."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shalekv.errors import CorruptObject, ObjectNotFound, StoreError
from shalekv.format.coding import crc32c
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import MANIFEST_FOLDER, manifest_name, parse_manifest_name
from shalekv.jobs.fsck.objects import finding_of, unreadable
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.lease import protects
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.snapshot import NEVER, is_expired
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest


@dataclass(frozen=True, slots=True)
class NamedSst:
    """An SST as a manifest names it."""

    info: SstInfo
    by: str  # the name of that manifest
    pending: str | None = None  # the id of the load that it is part of, until that is compacted


@dataclass(slots=True)
class Active:
    """What could be read of the manifests, at one time of the store's clock."""

    now_s: float = 0.0
    current: Manifest | None = None  # if it is damaged, the newest one that is not
    manifests: dict[int, Manifest] = field(default_factory=dict)  # the current one, too
    findings: list[Finding] = field(default_factory=list)
    sizes_bytes: int = 0
    is_complete: bool = True  # all of them could be read

    @property
    def first_wal_id(self) -> int:
        """The WAL must be there from here on: c itself is still kept, and leases may keep more."""
        firsts = [manifest.wal_id_last_compacted or 0 for manifest in self.readable()]
        leases = self.current.leases if self.current is not None else ()
        kept = [lease.wal_id_min for lease in leases if lease.wal_id_min is not None]
        return min([*firsts, *kept], default=0)

    def readable(self) -> Iterator[Manifest]:
        """All but those of which snapshots keep the SSTs alone, for clones that were made."""
        snapshots = self.current.snapshots if self.current is not None else ()
        full = {each.manifest_id for each in snapshots if not each.ssts_only}
        for manifest_id, manifest in self.manifests.items():
            if manifest is self.current or manifest_id in full:
                yield manifest

    def ssts(self) -> Iterator[NamedSst]:
        """All SSTs that a manifest names, those of the current one first; some come twice."""
        for manifest in sorted(self.manifests.values(), key=_newest_first):
            name = manifest_name(manifest.manifest_id)
            for info in manifest.leveled_ssts:
                yield NamedSst(info, name)
            for load in manifest.pending_loads:
                for info in load.ssts:
                    yield NamedSst(info, name, load.load_id)

    def protects(self, sst_id: bytes) -> bool:
        """Whether a lease protects an SST that nothing names."""
        leases = self.current.leases if self.current is not None else ()
        return any(protects(lease.id, sst_id) for lease in leases)


async def read_active(store: CasStore) -> Active:
    """Read them. Raises `DatabaseNotFound`."""
    active = Active()
    for manifest_id in await _ids(store):
        data = await _read(store, active, manifest_name(manifest_id))
        if data is None:
            continue  # an older one tells something, too
        current = await _decode(store, active, manifest_id, data)
        if current is not None:
            active.current = current
            active.now_s = await _now_s(store, current)
            await _read_snapshots(store, active, current)
            break
    return active


async def _now_s(store: CasStore, current: Manifest) -> float:
    """The store's time, or what is not above it: a copy that cannot be written has no clock."""
    if all(snapshot.snapshot_expire_time_s == NEVER for snapshot in current.snapshots):
        return 0.0
    try:
        return await store.reads.now_ms() / 1_000
    except StoreError:
        return current.logical_time_ms / 1_000


async def _ids(store: CasStore) -> list[int]:
    """The ids of all manifests, the newest first."""
    ids = []
    async for info in store.reads.list(MANIFEST_FOLDER):
        manifest_id = parse_manifest_name(info.name)
        if manifest_id is not None:
            ids.append(manifest_id)
    if not ids:
        await StoredManifest(store).refresh()  # says that there is no database
    return sorted(ids, reverse=True)


async def _read_snapshots(store: CasStore, active: Active, current: Manifest) -> None:
    for snapshot in current.snapshots:
        manifest_id = snapshot.manifest_id
        if is_expired(snapshot, active.now_s) or manifest_id >= current.manifest_id:
            continue
        if manifest_id in active.manifests:
            continue  # of another snapshot
        data = await _read(store, active, manifest_name(manifest_id), snapshot)
        if data is None or await _decode(store, active, manifest_id, data) is None:
            continue
        if snapshot.manifest_checksum:
            _compare(active, snapshot, data)


def _compare(active: Active, snapshot: Snapshot, data: bytes) -> None:
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
    store: CasStore, active: Active, name: str, snapshot: Snapshot | None = None
) -> bytes | None:
    """The bytes of a manifest; None: they cannot be read, which is told."""
    try:
        return (await store.reads.get(name)).data
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
    store: CasStore, active: Active, manifest_id: int, data: bytes
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
    """Whether two manifests speak of one object; only its place may differ, and its number.

    And what one of them does not know.
    """
    place = {"level": 0, "min_seq": 0, "max_seq": 0, "first_expiry_ms": 0}
    return replace(one, **place) == replace(other, **place)  # type: ignore[arg-type] # numbers


def _newest_first(manifest: Manifest) -> int:
    return -manifest.manifest_id
