"""Disk space of a database on `file://`, measured while it is written.

Everything is read from its files, not from reports of a server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.protocol.manifest import Manifest, Version
from tests.kit.processes.wal_contents import manifest_ids, manifest_path


@dataclass(slots=True)
class Footprint:
    """The most that was seen of each, and all WAL objects that were seen."""

    folder: Path
    l0_count_max: int = 0
    open_wal_bytes_max: int = 0  # of WAL objects that are not compacted
    needed_bytes: int = 0  # at the last measurement: the levels, and the WAL that is not compacted
    disk_bytes_max: int = 0  # of all files, including those that wait for the collector
    _wal_bytes: dict[int, int] = field(default_factory=dict)  # of each object ever seen

    @property
    def wal_bytes(self) -> int:
        return sum(self._wal_bytes.values())

    def look(self) -> Version:
        """Measure the files; return the version of the newest manifest."""
        sizes = self._sizes()
        manifest = self._newest_manifest()
        version = Version.of(manifest)
        wal_bytes = {
            wal_id: size_bytes
            for name, size_bytes in sizes.items()
            if (wal_id := names.parse_wal_name(name)) is not None
        }
        self._wal_bytes |= wal_bytes
        after = -1 if version.wal_id is None else version.wal_id
        open_bytes = sum(size for wal_id, size in wal_bytes.items() if wal_id > after)
        self.needed_bytes = tree_bytes(version) + open_bytes
        self.l0_count_max = max(self.l0_count_max, len(version.l0))
        self.open_wal_bytes_max = max(self.open_wal_bytes_max, open_bytes)
        self.disk_bytes_max = max(self.disk_bytes_max, sum(sizes.values()))
        return version

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for file in self.folder.rglob("*"):
            try:
                if file.is_file():
                    sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
            except FileNotFoundError:  # collected meanwhile
                continue
        return sizes

    def _newest_manifest(self) -> Manifest:
        while True:
            path = manifest_path(self.folder, manifest_ids(self.folder)[-1])
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # collected meanwhile: there is a newer one
                continue
            return decode_manifest(path.relative_to(self.folder).as_posix(), data)


def tree_bytes(version: Version) -> int:
    runs = [info for run in version.runs for info in run.ssts]
    return sum(info.size_bytes for info in (*version.l0, *runs))
