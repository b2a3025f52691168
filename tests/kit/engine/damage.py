"""A small database that is made by hand, object by object, sound until damage is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shalekv.format.block_frame import Codec
from shalekv.format.coding import crc32c
from shalekv.format.footer import SstProperties, read_footer
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import level_name, manifest_name, wal_name
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
    load_entry,
    record_key,
)
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.entry import Entry
from shalekv.protocol.lease import leased_sst_id
from shalekv.protocol.manifest import SYSTEM_LEVEL, Lease, Manifest, PendingLoad, Snapshot
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectInfo, StoredObject
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.samples import put, range_tombstone, tombstone

DATABASE_ID = bytes(range(16))
NOW_MS = 1_700_000_000_000
NOW_S = NOW_MS // 1_000
NONCES = {1: b"the first writer", 2: b"the other writer"}
LEASE_ID = bytes.fromhex("0198c0deaaaa700080000000000000aa")
CURRENT, PINNED = 5, 4  # ids of the active manifests
C = 3
LAST_COMPACTED_SEQ = 40
SECOND_SEQ = 2**32 + 41  # of the second writer


def sst_id(number: int) -> bytes:
    return bytes.fromhex("0198c0de000070008000") + number.to_bytes(6, "big")


def sst_name(number: int) -> str:
    return level_name(sst_id(number))


def record(key: bytes, seq: int) -> Entry:
    value = encode_idempotency_record(IdempotencyRecord(bytes(16), 3, ReplyKind.PUT, b""))
    return put(record_key(key), seq, value, NOW_MS + 86_400_000)


L0_SST, LEFT_SST, RIGHT_SST, LOWEST_SST, SYSTEM_SST, OLD_SST, LOADED_SST = range(1, 8)


class Planted:
    """The objects, by which manifests they are named, and how they are damaged."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        """`now_ms` is the time at which snapshots and leases have a minute left."""
        now_s = now_ms // 1_000
        self.objects = MemoryObjects()
        self.store = MemoryStore(lambda: now_ms, name="planted", objects=self.objects)
        self.cas = CasStore(self.store, inline_runtime(), StoreSettings())
        lowest = self.sst(LOWEST_SST, 2, [put(b"a", 1, b"1" * 99), put(b"y", 2, b"2" * 99)])
        left = self.sst(
            LEFT_SST, 1, [put(b"a", 11), put(b"c", 12)], [range_tombstone(b"d", b"m", 13)]
        )
        right = self.sst(RIGHT_SST, 1, [put(b"m", 14), tombstone(b"p", 15)], codec=Codec.ZSTD)
        newest = self.sst(L0_SST, 0, [put(b"a", 40), put(b"p", 31)])
        system = self.sst(SYSTEM_SST, SYSTEM_LEVEL, system=[record(b"k", 35)])
        old = self.sst(OLD_SST, 1, [put(b"b", 5), put(b"x", 6)])
        loaded = self.sst(LOADED_SST, 0, [put(b"f", 0), put(b"g", 0)])
        self.load = PendingLoad("load-1", SstTable.from_infos([loaded]))
        self.batch = PendingLoad("unwritten", SstTable.from_infos([replace(loaded, id=sst_id(8))]))
        self.pinned = Manifest(
            database_id=DATABASE_ID,
            manifest_id=PINNED,
            write_id=bytes(16),
            writer_epoch=2,
            writer_nonce=NONCES[2],
            wal_id_last_compacted=2,
            last_compacted_seq=30,
            leveled_ssts=SstTable.from_infos([old, lowest]),
            pending_loads=(self.batch,),
        )
        self.write_manifest(self.pinned)
        self.current = replace(
            self.pinned,
            manifest_id=CURRENT,
            wal_id_last_compacted=C,
            wal_id_last_seen=6,
            last_compacted_seq=LAST_COMPACTED_SEQ,
            leveled_ssts=SstTable.from_infos([newest, left, right, lowest, system]),
            snapshots=(
                Snapshot(bytes(15) + b"1", PINNED, now_s + 60, "kept", self.checksum(PINNED)),
                Snapshot(bytes(15) + b"2", PINNED - 1, 1, "expired"),
                Snapshot(bytes(15) + b"3", CURRENT, 0),
            ),
            leases=(Lease(LEASE_ID, now_s + 60, "a compaction", 2),),
            pending_loads=(self.load, self.batch),
        )
        self.write_manifest(self.current)
        self.add_level(leased_sst_id(LEASE_ID, bytes(8)), [put(b"unpublished", 39)])
        self.wal(2, [put(b"x", 30)])
        self.wal(3, [put(b"a", 40)])
        self.wal(4, [put(b"b", 41)])
        self.wal(5, epoch=2)
        self.wal(6, [put(b"c", SECOND_SEQ), tombstone(b"d", SECOND_SEQ)], epoch=2)
        self.wal(7, epoch=1)  # of a slow opener
        self.wal(
            8,
            ranges=[range_tombstone(b"q", b"r", SECOND_SEQ + 1)],
            system=[record(b"n", SECOND_SEQ + 1)],
            epoch=2,
            codec=Codec.LZ4,
        )
        self.wal(9, control=[load_entry(self.load, SECOND_SEQ + 2)], epoch=2)

    def save(self, folder: Path) -> str:
        for prefix in ("manifest/", "wal/", "levels/"):
            for info in self.objects.page(prefix, ""):
                path = folder / info.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.data(info.name))
        return f"file://{folder}"

    def write(self, name: str, data: bytes) -> None:
        """Put these bytes in the place of the object."""
        self.objects.remove(name)
        self.objects.add(StoredObject(ObjectInfo(name, len(data), NOW_MS), data))

    def data(self, name: str) -> bytes:
        found = self.objects.find(name)
        assert found is not None
        return found.data

    def lose(self, *names: str) -> None:
        for name in names:
            self.objects.remove(name)

    def flip(self, name: str, at: int) -> None:
        """Damage one bit; a negative place counts from the end."""
        data = bytearray(self.data(name))
        data[at] ^= 1
        self.write(name, bytes(data))

    def checksum(self, manifest_id: int) -> int:
        return crc32c(self.data(manifest_name(manifest_id)))

    def write_manifest(self, manifest: Manifest) -> None:
        """Put it in the place of the one with its id."""
        self.write(manifest_name(manifest.manifest_id), encode_manifest(manifest))

    def edit(self, **changes: object) -> None:
        self.current = replace(self.current, **changes)  # type: ignore[arg-type] # any field
        self.write_manifest(self.current)

    def edit_sst(self, number: int, **changes: object) -> None:
        """Change the entry of one SST in the current manifest."""
        (info,) = (each for each in self.current.leveled_ssts if each.id == sst_id(number))
        self.replace_sst(number, replace(info, **changes))  # type: ignore[arg-type] # any field

    def replace_sst(self, number: int, *infos: SstInfo) -> None:
        """Let the current manifest name these SSTs instead of one."""
        others = [each for each in self.current.leveled_ssts if each.id != sst_id(number)]
        self.edit(leveled_ssts=SstTable.from_infos([*others, *infos]))

    def rewrite(
        self,
        number: int,
        level: int,
        entries: Iterable[Entry] = (),
        ranges: Iterable[Entry] = (),
        system: Iterable[Entry] = (),
    ) -> None:
        """Put another SST in the place of one, also in the current manifest."""
        self.replace_sst(number, self.sst(number, level, entries, ranges, system))

    def sst(
        self,
        number: int,
        level: int,
        entries: Iterable[Entry] = (),
        ranges: Iterable[Entry] = (),
        system: Iterable[Entry] = (),
        *,
        codec: Codec = Codec.NONE,
    ) -> SstInfo:
        """Write an SST of the levels; how a manifest lists it."""
        return replace(
            self.add_level(sst_id(number), entries, ranges, system, codec=codec), level=level
        )

    def add_level(
        self,
        id_: bytes,
        entries: Iterable[Entry] = (),
        ranges: Iterable[Entry] = (),
        system: Iterable[Entry] = (),
        *,
        codec: Codec = Codec.NONE,
    ) -> SstInfo:
        name = level_name(id_)
        data = encode_sst(
            properties(name, 1),
            entries,
            ranges,
            system,
            block_bytes=64,
            codec=codec,
            filter_bits_per_key=10,
        )
        self.write(name, data)
        return read_footer(name, data, len(data), database_id=DATABASE_ID).info(0)

    def wal(
        self,
        wal_id: int,
        entries: Iterable[Entry] = (),
        *,
        ranges: Iterable[Entry] = (),
        system: Iterable[Entry] = (),
        control: Iterable[Entry] = (),
        epoch: int = 1,
        nonce: bytes | None = None,
        codec: Codec = Codec.NONE,
    ) -> None:
        """Write a WAL object; without entries it is a fence."""
        name = wal_name(wal_id)
        made = replace(properties(name, epoch), writer_nonce=nonce or NONCES.get(epoch, bytes(16)))
        self.write(
            name, encode_sst(made, entries, ranges, system, control, block_bytes=64, codec=codec)
        )


def properties(name: str, epoch: int) -> SstProperties:
    return SstProperties(
        name=name,
        database_id=DATABASE_ID,
        writer_epoch=epoch,
        writer_nonce=NONCES.get(epoch, bytes(16)),
        write_id=b"identifies bytes",
        logical_time_ms=NOW_MS,
    )


async def findings(planted: Planted, *, is_deep: bool = False, parallel: int = 2) -> list[Finding]:
    return await gathered(Fsck(planted.cas, parallel=parallel, is_deep=is_deep).findings())


async def found(planted: Planted, *, is_deep: bool = False) -> list[tuple[str, FindingKind]]:
    return sorted((each.name, each.kind) for each in await findings(planted, is_deep=is_deep))


Plant = Callable[[Planted], object]


def case(name: str, plant: Plant, *expected: tuple[str, FindingKind]) -> Any:
    """Damage that is planted, and all that a check finds then."""
    return pytest.param(plant, sorted(expected), id=name)
