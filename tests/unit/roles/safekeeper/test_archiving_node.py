"""A node that archives the logs it has on its disk, and lets go of what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from shalekv.core.quorum.messages import Append, Elected, Joined
from shalekv.core.quorum.record import Ballot, Record
from shalekv.engine.quorum.links import DatabasePlace
from shalekv.format import names
from shalekv.roles.safekeeper.member import Member
from shalekv.store.local import LocalStore
from tests.kit.inline_runtime import inline_runtime
from tests.kit.quorum.held_log import (
    DATABASE_ID,
    DEADLINE_S,
    EAGER,
    EPOCH,
    NONCE,
    Written,
    manifest_of,
    put_manifest,
)
from tests.kit.quorum.safekeepers import REQUEST_ID, running_node, safekeeper_settings

BALLOT = Ballot(EPOCH, NONCE)


async def append(
    member: Member, stream: int, records: Sequence[Record], *, archiver_id: bytes
) -> None:
    """Records that a majority has, and nothing behind them."""
    lsn = records[-1].lsn
    await member.receive(stream, Append(BALLOT, tuple(records), lsn - len(records), archiver_id))
    await member.receive(stream, Append(BALLOT, (), lsn, archiver_id))


async def trimmed(member: Member, lsn: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while member.state.log.base.lsn < lsn:  # noqa: ASYNC110 - it is seen from outside alone
            await asyncio.sleep(0)


async def test_a_node_archives_its_logs(tmp_path: Path) -> None:
    """What is complete gets into the archive and out of the log: of one that is appointed, and,
    after a restart, of one that nobody has told anything.
    """
    settings = safekeeper_settings(tmp_path).model_copy(update={"archiving": EAGER})
    store = LocalStore(tmp_path / "archive" / "db", inline_runtime())
    written = Written()
    async with running_node(settings) as node:
        place = DatabasePlace(DATABASE_ID, f"file://{tmp_path}/archive/db")
        member_id = await node.admit(place, REQUEST_ID)
        await put_manifest(store, manifest_of(0, member_id))
        member = node.find(DATABASE_ID)
        stream = member.open_stream()
        elected = await member.receive(stream, Elected(member_id, BALLOT, member.state.log))
        assert isinstance(elected, Joined)
        await append(member, stream, written.write("00.11-.2"), archiver_id=member_id)
        await trimmed(member, 5)
        assert member.archiving.is_archiver
        await append(member, stream, written.write("2.3."), archiver_id=b"")
        await append(member, stream, written.write("4"), archiver_id=b"")
    async with running_node(settings) as node:
        member = node.find(DATABASE_ID)
        await trimmed(member, 8)
        (status,) = node.status().members
        assert (status.archived_wal_id, status.archive_problem) == (3, "")
    for wal_id in range(4):
        assert (await store.get(names.wal_name(wal_id))).data == written.object(wal_id)
