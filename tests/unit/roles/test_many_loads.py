"""Loads that are not compacted are bounded: each is one more layer of every read."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.errors import MemtableFull
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.letting_go import follow
from tests.kit.serving.messages import put
from tests.kit.serving.roles import serving
from tests.kit.serving.sweeping import compact

SMALL: dict[str, Any] = {
    "skip_memtable_bytes": 65_536,
    "uncompacted_loads_max_count": 2,
    "queue_wait_ms": 0,
}


def large(key: bytes) -> kv_pb2.WriteRequest:
    """A batch that becomes a load."""
    return kv_pb2.WriteRequest(changes=[put(key, bytes(100_000))])


async def test_loads_wait_for_compaction_and_are_refused() -> None:
    """Past the bound a large batch is refused with advice, until loads are compacted."""
    database = await Database.created()
    async with serving(database, **SMALL) as writer:
        for key in (b"a", b"b"):
            await writer.ask(large(key))
        with pytest.raises(MemtableFull, match="loads are not compacted"):
            await writer.ask(large(b"c"))
        writer.check_idle()
        await compact(database)
        await follow(writer)
        await writer.ask(large(b"c"))
        assert [(await writer.get(key)).found for key in (b"a", b"b", b"c")] == [True] * 3
