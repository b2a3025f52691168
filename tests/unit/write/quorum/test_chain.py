"""Chains of safekeepers that pass records on, and the effect of a broken chain on the writer."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.protocol.quorum_records import Append
from shalekv.write.quorum.links import LinkBroken, NodeStatus
from tests.kit.constants import set_constants
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import QuorumDatabase, Writing, until
from tests.kit.virtual_time import virtual_time

CHAIN: dict[str, Any] = {"safekeeper_transport": "chain"}
TIMEOUT = "shalekv.write.quorum.peer:CHAIN_TIMEOUT_MS"
VALUE = bytes(1_000)
SETTLE_MS = 50
BARRED_MS = 2_500  # longer than a safekeeper stays out of the chain at first


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, {TIMEOUT: 100})


class WithoutStatus(InProcessLinks):
    """Safekeepers that do not answer status requests: they have to report by themselves."""

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        raise LinkBroken(f"{address} {database_id!r}")


def record_bytes(appends: list[Append]) -> int:
    return sum(len(record.payload) for append in appends for record in append.records)


def sent_bytes(writing: Writing) -> int:
    """The payload bytes that the writer has sent to all members."""
    links = writing.links
    return sum(record_bytes(links.appends_to(node.address)) for node in links.nodes)


async def settled(database: QuorumDatabase, writing: Writing) -> None:
    await until(
        lambda: all(log.state.log.last.lsn >= writing.committed_lsn for log in database.logs())
    )


async def chained(database: QuorumDatabase, writing: Writing) -> None:
    """Write until all members are in the chain, so that only the head is sent records."""
    await writing.put(b"first")
    await LoopClock().sleep_ms(SETTLE_MS)
    await writing.put(b"second")
    await settled(database, writing)


@virtual_time(3)
async def test_archive_wait_ends_without_another_write() -> None:
    """A call that waits for the archive ends by the reports of members, without another write."""
    database = await QuorumDatabase.created()
    async with database.writing(WithoutStatus(database.nodes)) as writing:
        await writing.put(b"a")
        await writing.slots.archive()
        report = writing.slots.report()
        assert report.archived_wal_id is not None


@virtual_time(3)
async def test_writer_sends_each_record_once() -> None:
    """In a chain of five safekeepers the writer sends each record once, and all members get it."""
    sent = {}
    for transport in ("direct", "chain"):
        database = await QuorumDatabase.created(count=5)
        async with database.writing(safekeeper_transport=transport) as writing:
            await chained(database, writing)
            before = sent_bytes(writing)
            for number in range(20):
                await writing.put(b"k%02d" % number, VALUE)
            await settled(database, writing)
            sent[transport] = sent_bytes(writing) - before
            relayed = [record_bytes(log.relayed) for log in database.logs()]
            assert (sum(size > 20 * len(VALUE) for size in relayed)) == 4 * (transport == "chain")
    # An object that is ended by its interval may have one more, empty record.
    assert sent["direct"] == 5 * sent["chain"] > 5 * 20 * len(VALUE)


@virtual_time(3)
async def test_chain_that_is_cut() -> None:
    """When members pass nothing on any more, writes continue directly, and the log is complete."""
    database = await QuorumDatabase.created(count=5)
    async with database.writing(**CHAIN) as writing:
        await chained(database, writing)
        addresses = [node.address for node in database.nodes]
        database.nodes.cut_ways = {(a, b) for a in addresses for b in addresses}
        for number in range(20):
            await writing.put(b"k%02d" % number, VALUE)
        await settled(database, writing)
        database.nodes.cut_ways.clear()
        await LoopClock().sleep_ms(BARRED_MS)
        await chained(database, writing)
        before = sent_bytes(writing)
        await writing.put(b"z", VALUE)
        await settled(database, writing)
        assert sent_bytes(writing) - before < 2 * len(VALUE)  # the chain is complete again


@virtual_time(3)
async def test_full_member_leaves_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full member leaves the chain before the timeout, and is filled once it accepts more."""
    database = await QuorumDatabase.created()
    set_constants(monkeypatch, {TIMEOUT: 10_000})
    async with database.writing(**CHAIN) as writing:
        await chained(database, writing)
        head = max(database.logs(), key=lambda log: record_bytes(log.appends))
        head.has_space, begun_ms = False, LoopClock().monotonic_ms()
        await writing.put(b"a", VALUE)
        await writing.put(b"b", VALUE)
        assert LoopClock().monotonic_ms() < begun_ms + 10_000
        head.has_space = True
        await settled(database, writing)


@virtual_time(3)
async def test_late_relays() -> None:
    """Relayed records that are late, repeated or out of order change nothing.

    This holds while their writer leads, and after the next one was elected.
    """
    database = await QuorumDatabase.created()
    async with database.writing(**CHAIN) as old:
        await chained(database, old)
        database.nodes.late = []
        for number in range(5):
            await old.put(b"k%02d" % number, VALUE)
        await settled(database, old)
        for relay in [*reversed(database.nodes.late), *database.nodes.late]:
            relay()
        await old.put(b"y")
        late, database.nodes.late = database.nodes.late, None
        assert late
        old.links.cut()
        lost = old.write(b"lost", VALUE)
        async with database.writing() as new:
            await new.put(b"z")
            logs = [log.state.log for log in database.logs()]
            for relay in late:
                relay()
            assert [log.state.log for log in database.logs()] == logs
            await settled(database, new)
            keys = [key for key, _ in await new.contents()]
            assert keys[-2:] == [b"y", b"z"]
            assert len({log.state.log.last for log in database.logs()}) == 1
        await lost.refusal()


@virtual_time(3)
async def test_commit_point_is_broadcast() -> None:
    """A member that the writer reaches late learns of a commit from another member."""
    for is_on in (True, False):
        database = await QuorumDatabase.created()
        async with database.writing(commit_broadcast=is_on) as writing:
            await writing.put(b"a")
            await settled(database, writing)
            await LoopClock().sleep_ms(SETTLE_MS)
            appends = [append for log in database.logs() for append in log.relayed]
            assert bool(appends) is is_on
            assert not any(append.records for append in appends)
