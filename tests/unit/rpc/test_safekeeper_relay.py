"""What safekeepers tell a writer unasked and pass on to each other, over real sockets and files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shalekv.core.quorum.messages import Append, Appended, Archived, RelayTarget
from shalekv.rpc.safekeeper_links import GrpcLinks
from tests.kit.quorum.safekeepers import DATABASE_ID, Safekeeper, Writer, safekeeper
from tests.servers.process import free_ports


@asynccontextmanager
async def safekeepers(folder: Path, count: int) -> AsyncIterator[Sequence[Safekeeper]]:
    """So many that serve, each with a member of the database."""
    async with AsyncExitStack() as stack:
        them = []
        for number in range(count):
            path = folder / f"{number}"
            path.mkdir()
            it = await stack.enter_async_context(safekeeper(path))
            await it.admit()
            them.append(it)
        yield them


async def led(them: Sequence[Safekeeper], epoch: int = 1) -> list[Writer]:
    """The streams of one writer to all."""
    return [await it.lead(epoch) for it in them]


async def pass_on(links: GrpcLinks, to: Writer, append: Append, *, then: Append) -> None:
    """Say as another safekeeper would what `append` and then `then` tell a member."""
    link = await links.relay(to.address)
    await link.send(DATABASE_ID, b"?" * 16, append)  # for a member that is not there
    await link.send(DATABASE_ID, to.member_id, append)
    await link.send(DATABASE_ID, to.member_id, then)


async def test_the_archive_is_told_unasked(tmp_path: Path) -> None:
    """When it has moved, and after each election once."""
    async with safekeeper(tmp_path) as it:
        await it.admit()
        writer = await it.lead(1)
        assert await writer.append(b"one") == Appended(writer.ballot, 1)
        member = it.node.find(DATABASE_ID)
        await member.note_archived(0, member.state.log.base)
        assert await writer.hear() == Archived(writer.ballot, 0)
        assert await writer.append(b"two") == Appended(writer.ballot, 2, 0)
        await member.note_archived(0, member.state.log.base)
        await member.note_archived(1, member.state.log.base)
        assert await writer.hear() == Archived(writer.ballot, 1)
        after = await it.lead(2, writer.log)
        assert await after.hear() == Archived(after.ballot, 1)
        assert await after.append(b"three") == Appended(after.ballot, 3, 1)


async def test_a_chain(tmp_path: Path) -> None:
    """Records sent to one go on to the next and the one behind it, and each answers the writer."""
    async with safekeepers(tmp_path, 3) as them:
        first, *others = await led(them)
        for payload in (b"one", bytes(3 << 20), b"three"):
            records = first.make(payload)
            reply = await first.send(records, committed_lsn=records[0].lsn - 1, relays=others)
            assert reply == Appended(first.ballot, records[0].lsn)
            for other in others:
                assert await other.hear() == reply
        for it in them:
            state = it.node.find(DATABASE_ID).state
            assert (state.log, state.committed_lsn) == (first.log, 2)


async def test_a_gap(tmp_path: Path) -> None:
    """What leaves one is dropped without a word, and what the writer sends fills it."""
    async with safekeepers(tmp_path, 2) as them:
        first, second = await led(them)
        one, two, three = first.make(b"one", b"two", b"three")
        await first.send([one])
        await first.send([two], relays=[second])
        assert await second.send([one, two]) == Appended(second.ballot, 2)
        await first.send([three], relays=[second])
        assert await second.hear() == Appended(second.ballot, 3)


async def test_a_relay_of_an_old_leader(tmp_path: Path) -> None:
    """After the next writer was elected it changes nothing, nor does one of a writer that was not
    elected here, or for another member.
    """
    async with safekeepers(tmp_path, 1) as [it]:
        old = await it.lead(1)
        old.make(b"one")
        await old.send(old.records)
        late = Append(old.ballot, old.make(b"late"), 2)
        new = await it.lead(2, it.node.find(DATABASE_ID).state.log)
        [record] = new.make(b"two")
        await pass_on(it.links, new, late, then=Append(new.ballot, (record,), 0))
        assert await new.hear() == Appended(new.ballot, 2)
        state = it.node.find(DATABASE_ID).state
        assert (state.log, state.committed_lsn) == (new.log, 0)


async def test_a_commit_point_is_broadcast(tmp_path: Path) -> None:
    """Who hears of one tells its peers, who need not hear of it from the writer."""
    async with safekeepers(tmp_path, 3) as them:
        first, *others = streams = await led(them)
        records = first.make(b"one")
        for stream in streams:
            await stream.send(records)
        peers = tuple(RelayTarget(each.member_id, each.address) for each in others)
        await first.link.send(Append(first.ballot, (), 1, commit_peers=peers))
        for it in them:
            assert await it.node.find(DATABASE_ID).wait_committed(0) == 1


async def test_nobody_to_pass_on_to(tmp_path: Path) -> None:
    """A member that is not reached holds up neither the writer nor the others."""
    async with safekeepers(tmp_path, 2) as them:
        first, second = await led(them)
        gone = Writer(first.link, first.ballot)
        [port] = free_ports(1)
        gone.member_id, gone.address = b"g" * 16, f"127.0.0.1:{port}"
        for payload in (b"one", b"two"):
            records = first.make(payload)
            reply = await first.send(records, relays=[gone, second])
            assert reply == Appended(first.ballot, records[0].lsn)
        assert await second.send(first.records) == Appended(second.ballot, 2)
