"""The cases in this process over grpcio: the answers are those of our own wire.

`test_in_levels` plays most files over grpcio; these are the others.
"""

from __future__ import annotations

import pytest

from tests.conformance import test_in_levels
from tests.conformance.cases import Topic, topics
from tests.conformance.runner import caller_to, disagreements
from tests.kit.processes.in_process import memory_store, serving

# They wait for seconds, for what no transport changes.
WAITING = {"scan_views", "slow_log"}
PLAYED = WAITING | {each.name for each in test_in_levels.TOPICS}
TOPICS = [each for each in topics() if each.name not in PLAYED]


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
async def test_topic(topic: Topic) -> None:
    """A server gives the same answers over either transport."""
    groups = topic.groups | {"server": {"wire": "grpcio"}}
    async with (
        serving(memory_store(), **groups) as served,
        caller_to(served.listen) as caller,
    ):
        played = disagreements(caller, topic.cases)
        problems = [f"{case.name}: {problem}" async for case, problem in played if problem]
    assert problems == []
