"""The cases in this process, by a writer whose memory is compacted away before each step.

They are played over grpcio, as those of `test_over_grpcio`; `test_conformance` plays all of them
over our own wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from tests.conformance.cases import Topic, topics
from tests.conformance.runner import caller_to, disagreements
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.in_process import memory_store, serving
from tests.kit.serving.roles import NEVER_POLLED
from tests.kit.serving.sweeping import compact_store

# The other files with settings are about what is in memory, and how much of it.
WITH_SETTINGS = {"large_batches", "small_limits", "small_snapshots"}
TOPICS = [each for each in topics() if not each.settings or each.name in WITH_SETTINGS]


@asynccontextmanager
async def in_levels(topic: Topic) -> AsyncIterator[tuple[str, Any]]:
    """The address of a writer with the settings of the topic, and what compacts its memory."""
    groups = topic.groups
    groups["writer"] = {**NEVER_POLLED, **groups.get("writer", {})}
    groups["server"] = {"wire": "grpcio"}
    store = memory_store()
    async with serving(store, **groups) as served:
        engine = served.writer.engine
        runtime = Runtime(LoopClock(), Random(1), InlineWorkers())

        async def compacted() -> None:
            while engine.memtable.key_count:  # again if something was written meanwhile
                state = engine.newest_seq, engine.watermark.seq
                await compact_store(store, runtime)
                await engine.ownership.confirm()
                # It is seen from outside alone. What became durable meanwhile was not compacted.
                while engine.memtable.key_count and state == (  # noqa: ASYNC110
                    engine.newest_seq,
                    engine.watermark.seq,
                ):
                    await asyncio.sleep(0)

        yield served.listen, compacted


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
async def test_topic(topic: Topic) -> None:
    """Answers from the levels equal those from memory."""
    async with in_levels(topic) as (address, compacted), caller_to(address) as caller:
        played = disagreements(caller, topic.cases, before_step=compacted)
        problems = [f"{case.name}: {problem}" async for case, problem in played if problem]
    assert problems == []
