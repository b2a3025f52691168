"""A node when disks lose or refuse something, or a member goes: the others do not notice."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shalekv.core.quorum.messages import (
    Append,
    Appended,
    Elected,
    Health,
    Joined,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.core.quorum.record import Ballot
from shalekv.errors import (
    LogDamaged,
    StoreBroken,
)
from tests.kit.disks.failing import FailingFileSystem
from tests.kit.quorum.safekeepers import (
    DATABASE_ID,
    REQUEST_ID,
    running_node,
    safekeeper_settings,
)
from tests.unit.roles.safekeeper.node_acts import (
    FIRST,
    SECOND,
    damage,
    filled,
    health_of,
    place,
    say,
)


async def test_damaged_log(tmp_path: Path) -> None:
    """A log that lost records does not vote, shows nothing, and is sound when it is full again."""
    settings = safekeeper_settings(tmp_path)
    async with running_node(settings) as node:
        member_id = await node.admit(place(tmp_path), REQUEST_ID)
        records = await filled(node.find(DATABASE_ID))
        shape = node.find(DATABASE_ID).state.log
    damage(settings, records[2])
    with capture_logs() as lines:
        async with running_node(settings):
            (line,) = [line for line in lines if line["event"] == "records were lost"]
    assert (line["log_level"], line["health"]) == ("error", "damaged")
    assert "record" in line["problem"]
    async with running_node(settings) as node:
        member = node.find(DATABASE_ID)
        assert health_of(node) is Health.DAMAGED
        stream = member.open_stream()
        assert isinstance(await say(member, stream, VoteRequest(member_id, SECOND)), Refusal)
        with pytest.raises(LogDamaged):
            await member.records(1, 9, bytes_max=1 << 20)
        with pytest.raises(LogDamaged):
            member.first_of_object(0)
        elected = Elected(member_id, SECOND, shape)
        assert await say(member, stream, elected) == Joined(SECOND, 0)
        assert await say(member, stream, Append(SECOND, tuple(records[:4]), 4)) == Appended(
            SECOND, 4
        )
        assert health_of(node) is Health.REFILLING
        third = Ballot(3, b"3" * 16)
        voter = member.open_stream()
        assert isinstance(await say(member, voter, VoteRequest(member_id, third)), Refusal)
        assert await say(member, stream, Append(SECOND, (records[4],), 4)) == Appended(SECOND, 5)
        assert isinstance(await say(member, voter, VoteRequest(member_id, third)), Vote)
    async with running_node(settings) as node:
        member = node.find(DATABASE_ID)
        assert (member.state.health, member.state.promise) == (Health.SOUND, third)
        assert await member.records(1, 9, bytes_max=1 << 20) == records


async def test_a_record_rots_while_the_node_runs(tmp_path: Path) -> None:
    """What is found to be lost makes the log a damaged one, durably: its writer fills it anew."""
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
        assert health_of(node) is Health.DAMAGED
        assert isinstance(await say(member, old, Append(FIRST, (records[4],), 4)), Refusal)
    async with running_node(settings) as node:
        member = node.find(DATABASE_ID)
        assert health_of(node) is Health.DAMAGED
        stream = member.open_stream()
        assert isinstance(await say(member, stream, VoteRequest(member_id, SECOND)), Refusal)
        assert await say(member, stream, Elected(member_id, FIRST, shape)) == Joined(FIRST, 0)
        reply = await say(member, stream, Append(FIRST, tuple(records), 4))
        assert reply == Appended(FIRST, 5)
        assert health_of(node) is Health.SOUND
        assert await member.records(1, 9, bytes_max=1 << 20) == records


async def test_disk_failure(tmp_path: Path) -> None:
    """When a sync fails nothing is acknowledged any more, and the node ends."""
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
