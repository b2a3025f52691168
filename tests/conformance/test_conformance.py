"""Every case of the conformance files against a server process, over its socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.cases import Case, Topic, topics
from tests.conformance.playing import play
from tests.conformance.runner import caller_to, new_prefix
from tests.kit.processes.processes import Processes

TOPICS = topics()
CASES = [(topic, case) for topic in TOPICS for case in topic.cases]


class Servers:
    """A server for each set of settings that a file wants, started when it is first needed."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes = processes
        self._folder = folder
        self._addresses: dict[str, str] = {}

    def address_for(self, topic: Topic) -> str:
        """HOST:PORT of a server with the settings of the topic."""
        name = topic.name if topic.settings else "default"
        if name not in self._addresses:
            url = f"file://{self._folder}/{name}"
            variables = {
                f"SHALEKV_{key.replace('.', '__').upper()}": str(value)
                for key, value in topic.settings.items()
            }
            child = self._processes.start_serve(url, env=variables)
            self._addresses[name] = child.wait_until_ready()
        return self._addresses[name]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that end with the tests of this file."""
    with Processes() as processes:
        yield Servers(processes, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize(("topic", "case"), CASES, ids=[f"{t.name}: {c.name}" for t, c in CASES])
async def test_case(servers: Servers, topic: Topic, case: Case) -> None:
    """The server does what the case says."""
    async with caller_to(servers.address_for(topic)) as caller:
        await play(caller, case, new_prefix())
