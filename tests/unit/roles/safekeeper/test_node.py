"""A node over its lives: admission, restarts, damage, and the end of a member."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shalekv.core.quorum.messages import (
    Greet,
    Greeting,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.core.quorum.record import EMPTY_LOG
from shalekv.engine.quorum.links import DatabasePlace
from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    InvalidRequest,
    InvalidUrl,
    NotAMember,
    StoreRefused,
)
from shalekv.settings import SafekeepSettings
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    DEADLINE_S,
    REQUEST_ID,
    running_node,
    safekeeper_settings,
)
from tests.unit.roles.safekeeper.node_acts import (
    FIRST,
    OTHER_ID,
    SECOND,
    filled,
    held_by,
    place,
    say,
    write_manifest,
)

SET_ASIDE = f"{DATABASE_ID.hex()}.retired-1"


async def test_admit_is_idempotent(tmp_path: Path) -> None:
    """One request gets one id, again and again, and so does another while nothing was promised."""
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
    """A URL that is not below that of the node is refused by name, and so is another database."""
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


async def test_restart(tmp_path: Path) -> None:
    """Promise, records and commit point outlive a process that ends at any moment."""
    async with running_node(safekeeper_settings(tmp_path)) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        member = node.find(DATABASE_ID)
        records = await filled(member)
        stream = member.open_stream()
        assert isinstance(await say(member, stream, VoteRequest(member_id, SECOND)), Vote)
    async with running_node(safekeeper_settings(tmp_path), settles=False) as node:
        member = node.find(DATABASE_ID)
        assert await member.records(1, 9, bytes_max=1 << 20) == records
        stream = member.open_stream()
        greeting = await say(member, stream, Greet())
        assert isinstance(greeting, Greeting)
        assert (greeting.member_id, greeting.promise) == (member_id, SECOND)
        assert greeting.committed_lsn == 4
        assert isinstance(await say(member, stream, VoteRequest(member_id, FIRST)), Refusal)


async def test_one_process_for_a_folder(tmp_path: Path) -> None:
    """A second node on the same folder is refused."""
    async with running_node(safekeeper_settings(tmp_path)):
        with pytest.raises(StoreRefused, match="another safekeeper"):
            async with running_node(safekeeper_settings(tmp_path)):
                pass


def folders_in(settings: SafekeepSettings) -> set[str]:
    """The folders of members, whole or half gone."""
    return {path.name for path in Path(settings.safekeeper.data).iterdir() if path.is_dir()}


async def test_retire(tmp_path: Path) -> None:
    """A member goes when it is asked to and the manifest does not name it, and no sooner."""
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


async def test_a_backup_was_put_back(tmp_path: Path) -> None:
    """A manifest of before the present writer says nothing of who is of use: no log goes by it."""
    async with running_node(safekeeper_settings(tmp_path)) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID), SECOND)
        await write_manifest(tmp_path, 0, OTHER_ID, epoch=FIRST.epoch)
        with pytest.raises(InvalidRequest, match="older state"):
            await node.retire(DATABASE_ID, member_id)
        await write_manifest(tmp_path, 1, OTHER_ID, epoch=SECOND.epoch)
        await node.retire(DATABASE_ID, member_id)
        assert held_by(node) == set()


async def test_admitted_anew(tmp_path: Path) -> None:
    """A log that the manifest does not name any more makes way for a new one of the database. Its
    records, which are not archived, are kept.
    """
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID))
        await write_manifest(tmp_path, 0, OTHER_ID)
        assert await node.admit(place(tmp_path), OTHER_ID) != member_id
        assert node.find(DATABASE_ID).state.log == EMPTY_LOG
    assert folders_in(settings) == {DATABASE_ID.hex(), SET_ASIDE}


async def test_retired_by_itself(tmp_path: Path) -> None:
    """A log that the manifest has ceased to name goes; one that is new may be named yet. It may be
    that of a lost member: its records, which are not archived, are kept.
    """
    new_id = b"n" * 16
    settings = safekeeper_settings(tmp_path, retire_interval_ms=10)
    async with running_node(settings) as node:
        await node.admit(place(tmp_path, "new", new_id), REQUEST_ID)  # it is looked at first
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        await filled(node.find(DATABASE_ID))
        await write_manifest(tmp_path, 0, member_id)
        await write_manifest(tmp_path, 0, OTHER_ID, name="new", database_id=new_id)
        await write_manifest(tmp_path, 1, OTHER_ID)
        async with asyncio.timeout(DEADLINE_S):
            while SET_ASIDE not in folders_in(settings):  # noqa: ASYNC110 - it is seen there alone
                await asyncio.sleep(0)
        assert held_by(node) == {new_id}
    assert folders_in(settings) == {new_id.hex(), SET_ASIDE}
