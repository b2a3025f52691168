"""Databases written by servers of this and earlier versions are opened, read and written to."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shalekv.errors import DatabaseMismatch
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.quorum.member_files import CONTROL_BYTES, decode_control, encode_control
from shalekv.format.sst import open_sst
from shalekv.jobs.fsck.check import Fsck
from shalekv.protocol.manifest import SYSTEM_LEVEL, CasMode, Manifest, Version
from shalekv.protocol.membership import Member
from shalekv.protocol.origins import foreign_ids, is_pin, pin_name
from shalekv.server.compactor import Compactor
from shalekv.settings import (
    KIB,
    CompactorConfig,
    CompactorSettings,
    LevelSettings,
    StoreSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore, named_objects
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv_client import Client, Entry
from tests.golden.databases import DATABASES, MEMORY, NAMES, described, description_of, store_of
from tests.golden.make_quorum import DATABASE, DESCRIPTION, MEMBERS, SAFEKEEPER, SMALL
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.in_process import real_runtime, serving
from tests.kit.processes.processes import Processes

DEADLINE_S = 30


def test_there_are_golden_databases() -> None:
    """The tests below have something to read."""
    assert {
        *("v0_1", "v0_2_before_levels", "v0_3_levels", "v0_4_two_phase", "v0_5_clone"),
        *("v0_6_bulk", "v0_8_levels"),
    } <= {*NAMES}
    switched = ["v0_7_switched", "v0_8_switched"]  # without and with ids that were left out
    assert [folder.name for folder in FOLDERS] == ["v0_7_quorum", *switched]


@pytest.mark.parametrize("name", NAMES)
async def test_a_golden_database_is_read(name: str) -> None:
    """A scan and gets show what the database held when it was left, to the sequence number."""
    async with asyncio.timeout(DEADLINE_S):
        await check(store_of(name), description_of(name))


@pytest.mark.parametrize("name", NAMES)
async def test_a_repeated_request_is_known(name: str) -> None:
    """Requests that were made with an idempotency key get their first reply."""
    repeats = description_of(name)["repeats"]
    async with serving(store_of(name)) as served, Client(served.listen) as client:
        for repeat in repeats:
            key, value, once = (repeat[part].encode("latin-1") for part in ("key", "value", "once"))
            assert (await client.put(key, value, idempotency_key=once)).seq == repeat["seq"]
        expected = {"v0_1": 0, "v0_2_before_levels": 1}
        assert len(repeats) == expected.get(name, 2)


@pytest.mark.parametrize("name", NAMES)
async def test_a_golden_database_is_sound(name: str) -> None:
    """Every object of it is as it has to be; of those that were merged some are still there."""
    with real_runtime() as runtime:
        fsck = Fsck(CasStore(store_of(name), runtime, StoreSettings()), parallel=4, is_deep=True)
        found = [finding async for finding in fsck.findings()]
    assert [finding for finding in found if finding.kind.is_damage] == []


@pytest.mark.parametrize("name", NAMES)
async def test_a_golden_database_is_compacted(name: str) -> None:
    """It reads the same when all of it was compacted, and when more was written and compacted."""
    store, description = store_of(name), description_of(name)
    async with asyncio.timeout(DEADLINE_S):
        await compact(store, seed=2)
        await check(store, description)
        async with serving(store) as served, Client(served.listen) as client:
            for number in range(50):
                await client.put(b"~%d" % number, b"more")
            await client.delete_range(start=b"~")
        await compact(store, seed=3)
        await check(store, description)


async def test_the_levels_have_every_kind_of_object() -> None:
    """The newest database has L0, sorted runs, records, a snapshot and loads, compacted or not."""
    store = store_of("v0_3_levels")
    manifest = await manifest_of(store)
    version = Version.of(manifest)
    assert version.l0
    assert version.runs
    assert version.system
    assert {each.name for each in manifest.snapshots} >= {"kept"}
    assert len(manifest.pending_loads) == 1
    assert {each.level for each in manifest.leveled_ssts} >= {0, SYSTEM_LEVEL}
    log = [
        open_sst(info.name, (await store.get(info.name)).data, database_id=None)
        async for info in store.list(names.WAL_FOLDER)
    ]
    first = manifest.first_uncompacted_wal_id
    tail = [sst for sst in log if wal_id_of(sst.properties.name) >= first]
    assert any([*sst.control_entries()] for sst in tail)
    assert any([*sst.range_tombstones()] for sst in tail)
    assert any([*sst.system_entries()] for sst in tail)


async def test_a_database_keeps_to_its_mode() -> None:
    """One that was created in two phases has its records, and is not written to without them."""
    store = store_of("v0_4_two_phase")
    assert (await manifest_of(store)).cas_mode is store.cas_mode is CasMode.TWO_PHASE
    assert isinstance(store, TwoPhaseStore)
    names_there = {info.name async for info in store.list(names.WAL_FOLDER)}
    records = [each async for each in store.records.list(store.url, uncommitted_only=False)]
    assert names_there <= {each.destination.name for each in records if each.is_committed}
    with pytest.raises(DatabaseMismatch):
        await compact(store.plain, seed=4)


async def test_the_clone_shares_and_has_its_own() -> None:
    """The clone reads SSTs of its parent, which keeps them, beside its own and those of a load."""
    store = store_of("v0_5_clone")
    manifest = await manifest_of(store)
    (origin,) = manifest.origins
    shared = foreign_ids(manifest.origins)
    own = {info.id for info in manifest.leveled_ssts} - shared
    assert shared
    assert own
    assert any(info.min_seq == info.max_seq for info in manifest.leveled_ssts if info.id in shared)
    in_memory = MemoryStore(lambda: 0, objects=named_objects(origin.url.removeprefix(MEMORY)))
    parent = await manifest_of(in_memory)
    (pin,) = (each for each in parent.snapshots if each.id == origin.snapshot_id)
    assert is_pin(pin)
    assert pin.name == pin_name(manifest.database_id)
    assert parent.database_id == origin.database_id


async def test_the_bulk_loads_are_remembered() -> None:
    """One is in the levels, with values that expire, and one is committed in the log alone."""
    manifest = await manifest_of(store_of("v0_6_bulk"))
    assert [each.load_id for each in manifest.recent_loads] == ["golden, the first"]
    assert "golden, the second" in [each.load_id for each in manifest.pending_loads]
    assert any(info.first_expiry_ms for info in manifest.leveled_ssts)


async def check(store: ObjectStore, description: dict[str, Any]) -> None:
    """Open the database, and read all of it by scans in both directions and by gets."""
    expected = description["entries"]
    async with serving(store) as served, Client(served.listen) as client:
        found = [entry async for entry in client.scan()]
        assert [*map(row, found)] == expected
        backwards = [entry async for entry in client.scan(reverse=True)]
        assert backwards == found[::-1]
        for entry, got in zip(found, await client.batch_get([e.key for e in found]), strict=True):
            assert got is not None
            assert (got.value, got.seq) == (entry.value, entry.seq)
        assert await client.get(b"plain01") is None


def row(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key.decode("latin-1"),
        "value": described(entry.value),
        "seq": entry.seq,
        "expire_at_ms": entry.expire_at_ms or 0,
    }


async def compact(store: ObjectStore, *, seed: int) -> None:
    settings = CompactorConfig(
        levels=LevelSettings(sst_bytes=64 * KIB, block_bytes=1 * KIB),
        compactor=CompactorSettings(
            wal_trigger_age_ms=0, l0_trigger_count=1, base_level_bytes=64 * KIB
        ),
    )
    # the clock is constant: only the seed makes ids differ
    with real_runtime(seed=seed) as runtime:
        hurry = asyncio.Event()
        compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
        await compactor.run(is_once=True)
        await compactor.close()
    assert not Version.of(await manifest_of(store)).l0


async def manifest_of(store: ObjectStore) -> Manifest:
    with real_runtime() as runtime:
        return await StoredManifest(CasStore(store, runtime, StoreSettings())).refresh()


def wal_id_of(name: str) -> int:
    wal_id = names.parse_wal_name(name)
    assert wal_id is not None
    return wal_id


FOLDERS = sorted(path.parent for path in DATABASES.glob(f"*/{DESCRIPTION}"))


def restored(folder: Path, cluster: Cluster) -> None:
    """Copy bucket and logs; the bucket and the members are at other places than they were."""
    shutil.copytree(folder / DATABASE, cluster.folder)
    for path in (cluster.folder / "manifest").glob("*.manifest"):
        name = f"manifest/{path.name}"
        manifest = decode_manifest(name, path.read_bytes())
        members = map(Member.parse, manifest.wal_members)  # none before a switch
        moved = [
            str(member._replace(address=address))
            for member, address in zip(members, cluster.addresses, strict=False)
        ]
        path.write_bytes(encode_manifest(replace(manifest, wal_members=tuple(moved))))
    for number in range(MEMBERS):
        shutil.copytree(folder / SAFEKEEPER.format(number), cluster.data(number))
        for path in cluster.data(number).glob("*/control"):
            path.write_bytes(moved_control(path.read_bytes(), cluster.url))


def moved_control(data: bytes, url: str) -> bytes:
    """A control file whose archive is at another URL; of its slots some may be empty."""
    slots = [data[at : at + CONTROL_BYTES] for at in range(0, len(data), CONTROL_BYTES)]
    return b"".join(_moved_slot(slot, url) if any(slot) else slot for slot in slots)


def _moved_slot(slot: bytes, url: str) -> bytes:
    control = decode_control("control", slot)
    return encode_control(replace(control, identity=replace(control.identity, url=url)))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
async def test_a_golden_quorum_database_is_opened(
    folder: Path, processes: Processes, tmp_path: Path
) -> None:
    """It has what is archived, and what only the safekeepers have; and it can be written to."""
    cluster = Cluster(processes, tmp_path, count=MEMBERS)
    restored(folder, cluster)
    archived = len([*(cluster.folder / "wal").iterdir()])
    await cluster.start(*SMALL)
    writer = await cluster.serve(create=False)
    described: Any = json.loads((folder / DESCRIPTION).read_text("ascii"))["entries"]
    async with Client(writer.listen) as client:
        found = [[e.key.decode(), e.value.decode(), e.seq] async for e in client.scan()]
        assert found == described
        await client.put(b"and", b"more")
    assert await writer.stop() == 0, writer.report()
    reported = (await cluster.status()).values()
    assert all(each["health"] == "sound" for each in reported)
    assert all(each["last_lsn"] > archived for each in reported)
    await cluster.run("fsck", "--deep")
