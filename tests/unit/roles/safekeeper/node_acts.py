"""What tests of nodes do: win a member and fill it, write manifests, damage files."""

from __future__ import annotations

from pathlib import Path

from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum.membership import Member as Named
from shalekv.core.quorum.messages import (
    Append,
    Appended,
    Elected,
    Health,
    Joined,
    ToAcceptor,
    ToProposer,
)
from shalekv.core.quorum.record import EMPTY_LOG, Ballot, LogShape, Record
from shalekv.engine.quorum.links import DatabasePlace
from shalekv.format.wal_record import make_record
from shalekv.roles.safekeeper.member import Member
from shalekv.roles.safekeeper.node import Node
from shalekv.settings import SafekeepSettings
from shalekv.store.local import LocalStore
from tests.kit.inline_runtime import inline_runtime
from tests.kit.quorum.held_log import put_manifest
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
)

FIRST = Ballot(1, b"1" * 16)
SECOND = Ballot(2, b"2" * 16)
OTHER_ID = b"o" * 16


def place(folder: Path, name: str = "db", database_id: bytes = DATABASE_ID) -> DatabasePlace:
    """A database below the archive of the node."""
    return DatabasePlace(database_id, f"file://{folder}/archive/{name}")


async def say(member: Member, stream: int, message: ToAcceptor) -> ToProposer:
    """The reply to a message."""
    reply = await member.receive(stream, message)
    assert reply is not None
    return reply


async def filled(
    member: Member, ballot: Ballot = FIRST, count: int = 5, log: LogShape = EMPTY_LOG
) -> list[Record]:
    """Win, and append records that are committed but for the last."""
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
    """Make a manifest current that names these members of a database."""
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
    """The databases of which it has logs."""
    return {member.place.database_id for member in node.status().members}


def health_of(node: Node) -> Health:
    """What the log of the database is worth."""
    return node.find(DATABASE_ID).state.health


def damage(settings: SafekeepSettings, record: Record) -> None:
    """Change a byte of a record on the disk."""
    folder = Path(settings.safekeeper.data) / DATABASE_ID.hex()
    for path in folder.iterdir():
        data = path.read_bytes()
        at = data.find(record.payload)
        if at >= 0:
            path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
            return
    raise AssertionError("the record is in no file")
