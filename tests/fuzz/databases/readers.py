"""Who reads which object, and how: the pieces of the product that take it apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shalekv.core.manifest import Manifest
from shalekv.core.sst_table import SstInfo
from shalekv.engine.backup.checking import check_copy
from shalekv.errors import CorruptObject
from shalekv.format.backup import decode_backup
from shalekv.format.backup_names import parse_backup_name, parse_copy
from shalekv.format.election import decode_lease
from shalekv.format.footer_codec import read_footer
from shalekv.format.load_record import decode_load
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    level_name,
    manifest_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_temporary_name,
    parse_wal_name,
)
from shalekv.format.sst import open_sst, read_block
from shalekv.format.sst_metadata import metadata_range, read_metadata
from tests.kit.engine.backups import Place

Read = Callable[[bytes], object]
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Readers:
    """The readers of one database, which know what its manifests say."""

    database_id: bytes
    rows: Mapping[str, SstInfo]  # how a manifest lists an SST; of one that none lists, the footer

    @classmethod
    def of(cls, place: Place, manifest: Manifest) -> Readers:
        """Of the database with this manifest."""
        rows: dict[str, SstInfo] = {}
        for name in place.names():
            data = place.data(name)
            if parse_level_name(name) is not None:
                footer = read_footer(name, data, len(data), database_id=None)
                rows[name] = footer.info(0)
        for info in all_rows(manifest):
            rows[level_name(info.id)] = info
        return cls(manifest.database_id, rows)

    def read(self, name: str, data: bytes) -> object:
        """What is in an object, or `REFUSED`. Any error but a typed one is raised."""
        try:
            return self._read(name, data)
        except CorruptObject:
            return REFUSED

    def _read(self, name: str, data: bytes) -> object:
        temporary = parse_temporary_name(name)
        if temporary is not None:  # it is copied, and read under the other name
            return self._read(temporary.destination, data)
        if parse_manifest_name(name) is not None:
            return decode_manifest(name, data)
        if parse_wal_name(name) is not None:
            return self._wal(name, data)
        if parse_level_name(name) is not None:
            return self._level(self.rows[name], data)
        if parse_backup_name(name) is not None:
            return decode_backup(name, data)
        lease_id = parse_election_name(name)
        if lease_id is not None:
            return decode_lease(lease_id, data) or REFUSED
        copy = parse_copy(name)
        assert copy is not None, name
        return check_copy(copy, len(data), data)

    def _wal(self, name: str, data: bytes) -> object:
        """As a replay reads it."""
        sst = open_sst(name, data, database_id=self.database_id)
        sections = (sst.entries(), sst.range_tombstones(), sst.system_entries())
        loads = [decode_load(name, entry) for entry in sst.control_entries()]
        return sst.footer, [[*section] for section in sections], loads

    def _level(self, info: SstInfo, data: bytes) -> object:
        """As lookups, scans and compactions read it, piece by piece."""
        piece = data[metadata_range(info).start :]
        metadata = read_metadata(info, piece, database_id=self.database_id)
        columns = []
        for number, handle in enumerate(metadata.index):
            block = data[handle.offset : handle.offset + handle.length]
            columns.append(read_block(metadata.index, number, block).columns())
        return metadata.footer, [*metadata.index], columns


def all_rows(manifest: Manifest) -> Iterator[SstInfo]:
    """The SSTs of the levels, and those of loads that are pending."""
    yield from manifest.leveled_ssts
    for load in manifest.pending_loads:
        yield from load.ssts


def reachable(place: Place, current: Manifest) -> frozenset[str]:
    """The objects that checks read: what the current manifest and those of snapshots need."""
    manifests = [current, *(_manifest(place, each.manifest_id) for each in current.snapshots)]
    first = min(each.wal_id_last_compacted or 0 for each in manifests)
    return _needs(place, manifests, first)


def read_by(place: Place, current: Manifest, snapshot_ids: Collection[bytes]) -> frozenset[str]:
    """The objects that somebody reads who opens the database, and these snapshots."""
    chosen = [each.manifest_id for each in current.snapshots if each.id in snapshot_ids]
    manifests = [current, *(_manifest(place, each) for each in chosen)]
    return _needs(place, manifests, min(each.first_uncompacted_wal_id for each in manifests))


def _needs(place: Place, manifests: Sequence[Manifest], first_wal_id: int) -> frozenset[str]:
    own = {manifest_name(each.manifest_id) for each in manifests}
    rows = {level_name(info.id) for each in manifests for info in all_rows(each)}
    ids = {name: parse_wal_name(name) for name in place.names()}
    wal = {name for name, wal_id in ids.items() if wal_id is not None and wal_id >= first_wal_id}
    return frozenset({*own, *rows, *wal})


def _manifest(place: Place, manifest_id: int) -> Manifest:
    name = manifest_name(manifest_id)
    return decode_manifest(name, place.data(name))
