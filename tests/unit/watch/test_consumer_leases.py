"""Leases of consumers: what they keep from collectors, for how long, and invalid requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shalekv.errors import InvalidRequest, WalUnprotected
from shalekv.format import names
from shalekv.store.api import RequestKind
from shalekv.watch.consumers import NAME_CHARS_MAX
from tests.kit.constants import constants
from tests.kit.engine.collection import TTL_S, CollectedDatabase


async def compacted(c: int = 4) -> CollectedDatabase:
    database = await CollectedDatabase.created()
    await database.wal(8)
    await database.compact(c)
    return database


def wal_ids(database: CollectedDatabase) -> list[int]:
    found = map(names.parse_wal_name, database.names())
    return sorted(wal_id for wal_id in found if wal_id is not None)


async def test_held_wal_stays_until_the_lease_is_moved_on() -> None:
    """A consumer keeps the WAL that it still needs, however old, and frees it step by step."""
    database = await compacted()
    consumers = database.consumers(ttl_s=1_000)
    await consumers.hold("mirror", 4)
    await database.compact(7)
    database.pass_time()
    await database.collecting().collect()
    assert wal_ids(database) == [4, 5, 6, 7]
    await consumers.hold("mirror", 6)
    await database.collecting().collect()
    assert wal_ids(database) == [6, 7]
    await consumers.release("mirror")
    await database.collecting().collect()
    assert wal_ids(database) == [7]
    before = await database.manifest()
    await consumers.release("mirror")
    assert await database.manifest() == before


async def test_lease_expires_by_the_clock_of_the_store() -> None:
    """A lease lives on when renewed; once expired, the collector removes it and what it kept."""
    database = await compacted()
    consumers = database.consumers()
    await consumers.hold("mirror", 4)
    await database.compact(7)
    database.pass_time(TTL_S - 1)
    await consumers.hold("mirror", 4)
    database.pass_time(TTL_S - 1)
    await database.collecting().collect()
    assert wal_ids(database) == [4, 5, 6, 7]
    database.pass_time(3)
    report = await database.collecting().collect()
    assert report.dropped_leases == 1
    assert wal_ids(database) == [7]
    assert await consumers.find("mirror") is None


async def test_what_may_be_deleted_cannot_be_held() -> None:
    """WAL below c that no lease keeps cannot be leased, even by a consumer that had released it."""
    database = await compacted()
    consumers = database.consumers()
    with pytest.raises(WalUnprotected) as refused:
        await consumers.hold("mirror", 3)
    assert refused.value.first_wal_id == 4
    assert await consumers.find("mirror") is None
    await consumers.hold("mirror", 4)
    await database.compact(7)
    await consumers.hold("other", 4)
    await consumers.release("mirror")
    await consumers.release("other")
    with pytest.raises(WalUnprotected):
        await consumers.hold("mirror", 4)


async def test_retained_wal_can_be_leased_later() -> None:
    """WAL that the collector retains, as recorded in the manifest, can be leased."""
    database = await compacted()
    retaining: dict[str, Any] = {"wal_retention_s": 100}
    await database.collecting(**retaining).collect()
    await database.compact(7)
    database.pass_time()
    await database.collecting(**retaining).collect()
    consumers = database.consumers(ttl_s=1_000)
    await consumers.hold("late", 5)
    database.pass_time(200)
    await database.collecting(**retaining).collect()
    assert wal_ids(database) == [5, 6, 7]
    await database.collecting().collect()
    assert wal_ids(database) == [5, 6, 7]


async def test_a_principal_has_so_many_consumers_and_no_more() -> None:
    """Or its names would fill the manifest. Those of others, and those of nobody, do not count."""
    database = await compacted()
    consumers = database.consumers()
    with constants({"shalekv.watch.consumers:CONSUMERS_MAX": 2}):
        for name, principal in (("a", ""), ("a", "uri:b"), ("a", "uri:a"), ("b", "uri:a")):
            await consumers.hold(name, 4, principal=principal)
        before = await database.manifest()
        with pytest.raises(InvalidRequest, match="uri:a has 2 consumers"):
            await consumers.hold("c", 4, principal="uri:a")
        assert await database.manifest() == before
        await consumers.hold("b", 5, principal="uri:a")
        await consumers.release("a", principal="uri:a")
        await consumers.hold("c", 5, principal="uri:a")
        for name in "bcd":
            await consumers.hold(name, 5)


async def test_hold_that_changes_nothing_edits_nothing() -> None:
    """Until half of its life is over, holding a lease where it is costs no write."""
    database = await compacted()
    consumers = database.consumers()
    await consumers.hold("mirror", 5)
    before = Counter(database.store.sent.by_kind)
    for _ in range(3):
        await consumers.hold("mirror", 5)
        await consumers.hold("mirror", 4)
    spent = Counter(database.store.sent.by_kind) - before
    assert spent[RequestKind.WRITE] == 0
    database.pass_time(TTL_S / 2 + 1)
    await consumers.hold("mirror", 4)
    lease = await consumers.find("mirror")
    assert lease is not None
    assert (lease.wal_id_min, lease.holder) == (5, "consumer mirror")
    assert lease.expire_time_s >= database.now_s + TTL_S


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * (NAME_CHARS_MAX + 1)])
async def test_names_are_checked(name: str) -> None:
    """A name that is empty, too long or not printable is refused."""
    database = await compacted()
    with pytest.raises(InvalidRequest, match="consumer: expected"):
        await database.consumers().hold(name, 4)
