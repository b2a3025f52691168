"""A safekeeper node: admission, restarts, damage, and the end of a member."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    InvalidRequest,
    InvalidUrl,
    LogDamaged,
    NotAMember,
    StoreBroken,
    StoreRefused,
)
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import manifest_name
from shalekv.format.wal_record import make_record
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Member as Named
from shalekv.protocol.membership import check_generation
from shalekv.protocol.quorum_records import (
    EMPTY_LOG,
    Append,
    Appended,
    Ballot,
    Elected,
    Joined,
    LogHealth,
    LogShape,
    Record,
    Refusal,
    ToAcceptor,
    ToProposer,
    VoteRequest,
)
from shalekv.server.safekeeper.member import LocalMember
from shalekv.server.safekeeper.node import Node
from shalekv.settings import SafekeeperConfig
from shalekv.store.local import LocalStore
from shalekv.write.quorum.links import DatabasePlace
from tests.kit.constants import set_constants
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.inline_runtime import inline_runtime
from tests.kit.quorum.held_log import put_manifest
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    DEADLINE_S,
    REQUEST_ID,
    running_node,
    safekeeper_settings,
)

FIRST = Ballot(1, b"1" * 16)
SECOND = Ballot(2, b"2" * 16)
OTHER_ID = b"o" * 16


def place(folder: Path, name: str = "db", database_id: bytes = DATABASE_ID) -> DatabasePlace:
    return DatabasePlace(database_id, f"file://{folder}/archive/{name}")


async def say(member: LocalMember, stream: int, message: ToAcceptor) -> ToProposer:
    reply = await member.receive(stream, message)
    assert reply is not None
    return reply


async def filled(
    member: LocalMember, ballot: Ballot = FIRST, count: int = 5, log: LogShape = EMPTY_LOG
) -> list[Record]:
    """Win an election, and append records that are committed but for the last."""
    stream = member.open_stream()
    member_id = member.identity.member_id
    assert isinstance(await say(member, stream, Elected(member_id, ballot, log)), Joined)
    records: list[Record] = []
    for number in range(count):
        after = records[-1].mark if records else log.last
        records.append(
            make_record(
                after,
                epoch=ballot.epoch,
                wal_id=after.next_wal_id,
                ends_object=True,
                payload=b"%d" % number * 100,
            )
        )
    committed_lsn = records[-1].lsn - 1
    reply = await say(member, stream, Append(ballot, tuple(records), committed_lsn))
    assert reply == Appended(ballot, records[-1].lsn)
    return records


async def write_manifest(
    folder: Path,
    manifest_id: int,
    *member_ids: bytes,
    name: str = "db",
    database_id: bytes = DATABASE_ID,
    epoch: int = FIRST.epoch,
) -> None:
    """Create the next manifest of a database, which names these members."""
    store = LocalStore(folder / "archive" / name, inline_runtime())
    manifest = Manifest(
        database_id=database_id,
        manifest_id=manifest_id,
        write_id=b"%016d" % manifest_id,
        writer_epoch=epoch,
        writer_nonce=FIRST.nonce,
        wal_mode=WalMode.QUORUM,
        wal_generation=manifest_id,
        wal_members=tuple(str(Named(member_id, "sk:1")) for member_id in member_ids),
    )
    await put_manifest(store, manifest)


def held_by(node: Node) -> set[bytes]:
    return {member.place.database_id for member in node.status().members}


def health_of(node: Node) -> LogHealth:
    return node.find(DATABASE_ID).state.health


def damage(settings: SafekeeperConfig, record: Record) -> None:
    """Change a byte of a record on the disk."""
    folder = Path(settings.safekeeper.data) / DATABASE_ID.hex()
    for path in folder.iterdir():
        data = path.read_bytes()
        at = data.find(record.payload)
        if at >= 0:
            path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
            return
    raise AssertionError("the record is in no file")


SET_ASIDE = f"{DATABASE_ID.hex()}.retired-1"


async def test_admit_is_idempotent(tmp_path: Path) -> None:
    """One request always gets the same id, and so does another as long as nothing was promised."""
    async with running_node(safekeeper_settings(tmp_path)) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        assert await node.admit(place(tmp_path), REQUEST_ID) == member_id
        assert await node.admit(place(tmp_path), OTHER_ID) == member_id
        await filled(node.find(DATABASE_ID))
        assert await node.admit(place(tmp_path), REQUEST_ID) == member_id
        with pytest.raises(DatabaseExists):
            await node.admit(place(tmp_path), OTHER_ID)
    async with running_node(safekeeper_settings(tmp_path)) as node:
        assert await node.admit(place(tmp_path), REQUEST_ID) == member_id


async def test_admit_checks_the_place(tmp_path: Path) -> None:
    """A URL that is not below that of the node is refused, and so is another database."""
    async with running_node(safekeeper_settings(tmp_path)) as node:
        elsewhere = f"file://{tmp_path}/archives/db"
        with pytest.raises(InvalidUrl, match="archives/db is not at or below"):
            await node.admit(DatabasePlace(DATABASE_ID, elsewhere), REQUEST_ID)
        with pytest.raises(InvalidRequest, match="database_id"):
            await node.admit(place(tmp_path, database_id=b"short"), REQUEST_ID)
        await write_manifest(tmp_path, 0)
        with pytest.raises(DatabaseMismatch):
            await node.admit(place(tmp_path, database_id=OTHER_ID), REQUEST_ID)
        await node.admit(place(tmp_path), REQUEST_ID)
        with pytest.raises(DatabaseMismatch):
            await node.admit(place(tmp_path, "moved"), REQUEST_ID)


async def test_one_process_for_a_folder(tmp_path: Path) -> None:
    """A second node on the same folder is refused."""
    async with running_node(safekeeper_settings(tmp_path)):
        with pytest.raises(StoreRefused, match="another safekeeper"):
            async with running_node(safekeeper_settings(tmp_path)):
                pass


def folders_in(settings: SafekeeperConfig) -> set[str]:
    return {path.name for path in Path(settings.safekeeper.data).iterdir() if path.is_dir()}


async def test_retire(tmp_path: Path) -> None:
    """A member is retired on request, if the manifest does not name it."""
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        member = node.find(DATABASE_ID)
        await filled(member)
        with pytest.raises(InvalidRequest, match="nowhere else"):
            await node.retire(DATABASE_ID, member_id)
        await write_manifest(tmp_path, 0, member_id)
        with pytest.raises(InvalidRequest, match="names this member"):
            await node.retire(DATABASE_ID, member_id)
        with pytest.raises(NotAMember):
            await node.retire(DATABASE_ID, OTHER_ID)
        await write_manifest(tmp_path, 1, OTHER_ID)
        waiting = asyncio.create_task(member.wait_committed(99))
        await asyncio.sleep(0)
        await node.retire(DATABASE_ID, member_id)
        with pytest.raises(NotAMember):
            await waiting
        with pytest.raises(NotAMember):
            node.find(DATABASE_ID)
        assert await node.admit(place(tmp_path), REQUEST_ID) != member_id
    assert folders_in(settings) == {DATABASE_ID.hex()}


async def test_a_member_goes_while_the_node_stops(tmp_path: Path) -> None:
    """A request to retire a member is answered while the node stops, without an error."""
    await write_manifest(tmp_path, 0, OTHER_ID)
    async with running_node(safekeeper_settings(tmp_path)) as node:
        for each in (b"1", b"2"):
            await node.admit(place(tmp_path, each.decode(), each * 16), REQUEST_ID)
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        waiting = asyncio.create_task(node.find(DATABASE_ID).wait_committed(99))
        retiring = asyncio.create_task(node.retire(DATABASE_ID, member_id))
        with pytest.raises(NotAMember):
            await waiting  # it is about to go
    await retiring
    assert held_by(node) == {b"1" * 16, b"2" * 16}


async def test_a_backup_was_put_back(tmp_path: Path) -> None:
    """A manifest older than the present writer retires no member."""
    async with running_node(safekeeper_settings(tmp_path)) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID), SECOND)
        await write_manifest(tmp_path, 0, OTHER_ID, epoch=FIRST.epoch)
        with pytest.raises(InvalidRequest, match="older state"):
            await node.retire(DATABASE_ID, member_id)
        await write_manifest(tmp_path, 1, OTHER_ID, epoch=SECOND.epoch)
        await node.retire(DATABASE_ID, member_id)
        assert held_by(node) == set()


async def test_admitted_again(tmp_path: Path) -> None:
    """A log that is not named any more is replaced; its unarchived records are kept."""
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID))
        await write_manifest(tmp_path, 0, OTHER_ID)
        assert await node.admit(place(tmp_path), OTHER_ID) != member_id
        assert node.find(DATABASE_ID).state.log == EMPTY_LOG
    assert folders_in(settings) == {DATABASE_ID.hex(), SET_ASIDE}


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs that are not needed are found within moments."""
    set_constants(monkeypatch, {"shalekv.server.safekeeper.node:LOG_RETIRE_INTERVAL_MS": 10})


@pytest.mark.usefixtures("quick_checks")
async def test_retired_by_itself(tmp_path: Path) -> None:
    """A log that the manifest has ceased to name is removed; its unarchived records are kept, since
    it may be that of a lost member.
    """
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID))
        await write_manifest(tmp_path, 0, member_id)
        await write_manifest(tmp_path, 1, OTHER_ID)
        await until_kept(settings, {SET_ASIDE})
        assert held_by(node) == set()


async def until_kept(settings: SafekeeperConfig, names: set[str]) -> None:
    """Wait until exactly these folders exist."""
    async with asyncio.timeout(DEADLINE_S):
        while folders_in(settings) != names:  # noqa: ASYNC110 - it is seen there alone
            await asyncio.sleep(0)


@pytest.mark.usefixtures("quick_checks")
async def test_what_will_not_be_named_goes(tmp_path: Path) -> None:
    """A member that no writer has used stays while a manifest names it, and goes when there was no
    manifest for long or there is another database.
    """
    named_id, absent_id, displaced_id = b"n" * 16, b"a" * 16, b"p" * 16
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:  # they are looked at in this order
        await node.admit(place(tmp_path, "displaced", displaced_id), REQUEST_ID)
        await node.admit(place(tmp_path, "absent", absent_id), REQUEST_ID)
        member_id = await node.admit(place(tmp_path, "named", named_id), REQUEST_ID)
        await write_manifest(tmp_path, 0, member_id, name="named", database_id=named_id)
        await write_manifest(tmp_path, 0, OTHER_ID, name="displaced", database_id=OTHER_ID)
        await until_kept(settings, {named_id.hex(), absent_id.hex()})
        await until_kept(settings, {named_id.hex()})


@pytest.mark.usefixtures("quick_checks")
async def test_what_may_be_named_goes_when_that_is_ruled_out(tmp_path: Path) -> None:
    """A member that a stalled process may still name goes only after the generation of the manifest
    has changed, by this node or another process.
    """
    moved_id = b"m" * 16
    settings = safekeeper_settings(tmp_path)
    await write_manifest(tmp_path, 0, OTHER_ID)
    await write_manifest(tmp_path, 0, OTHER_ID, name="moved", database_id=moved_id)
    async with running_node(settings) as node:
        await node.admit(place(tmp_path), REQUEST_ID)
        await node.admit(place(tmp_path, "moved", moved_id), REQUEST_ID)
        async with asyncio.timeout(DEADLINE_S):
            while node._hosted[moved_id].generation is None:  # noqa: ASYNC110, SLF001
                await asyncio.sleep(0)
        await write_manifest(tmp_path, 1, OTHER_ID, name="moved", database_id=moved_id)
        await until_kept(settings, {DATABASE_ID.hex()})
        await until_kept(settings, set())
    store = LocalStore(tmp_path / "archive" / "db", inline_runtime())
    before, after = [
        decode_manifest(name, (await store.get(name)).data) for name in map(manifest_name, (0, 1))
    ]
    assert after == replace(before, manifest_id=1, write_id=after.write_id, wal_generation=1)
    with pytest.raises(InvalidRequest, match="dropped the new logs"):
        check_generation(after, before.wal_generation)


async def test_a_record_rots_while_the_node_runs(tmp_path: Path) -> None:
    """A lost record marks the log as damaged, durably, until its writer refills it."""
    settings = safekeeper_settings(tmp_path, recent_bytes_max=0)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        member = node.find(DATABASE_ID)
        records = await filled(member)
        shape, old = member.state.log, member.state.leader
        assert old is not None
        damage(settings, records[2])
        with pytest.raises(LogDamaged):
            await member.records(1, 9, bytes_max=1 << 20)
        assert health_of(node) is LogHealth.DAMAGED
        assert isinstance(await say(member, old, Append(FIRST, (records[4],), 4)), Refusal)
    async with running_node(settings) as node:
        member = node.find(DATABASE_ID)
        assert health_of(node) is LogHealth.DAMAGED
        stream = member.open_stream()
        assert isinstance(await say(member, stream, VoteRequest(member_id, SECOND)), Refusal)
        assert await say(member, stream, Elected(member_id, FIRST, shape)) == Joined(FIRST, 0)
        reply = await say(member, stream, Append(FIRST, tuple(records), 4))
        assert reply == Appended(FIRST, 5)
        assert health_of(node) is LogHealth.SOUND
        assert await member.records(1, 9, bytes_max=1 << 20) == records


async def test_disk_failure(tmp_path: Path) -> None:
    """After a failed sync nothing is acknowledged any more, and the node ends."""
    files = FailingFileSystem()
    async with running_node(safekeeper_settings(tmp_path), filesystem=files) as node:
        await node.admit(place(tmp_path), REQUEST_ID)
        member = node.find(DATABASE_ID)
        files.fail("sync_data", errno.EIO)
        with pytest.raises(StoreBroken):
            await filled(member)
        assert isinstance(await node.ended(), StoreBroken)
        with pytest.raises(StoreBroken):
            member.open_stream()
