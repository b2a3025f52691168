"""The commands that read, at snapshots and at replicas, as processes."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cli import output
from tests.kit.processes.processes import Processes


async def test_reads_at_a_replica_are_as_new_as_they_must_be(
    processes: Processes, tmp_path: Path
) -> None:
    """A reader that hardly polls waits for the commit, and writes find the writer through it."""
    url = f"file://{tmp_path}/db"
    await processes.serve(url)
    reader = await processes.read(url, "--poll-interval-ms", "3600000")
    for number in range(3):
        seq = (await output(processes, reader, "put", "k", f"v{number}")).split()[1]
        found = await output(processes, reader, "get", "k", "--min-seq", seq)
        assert found == f"v{number}\n"
    assert await output(processes, reader, "get", "k", "--max-staleness", "5s") == "v2\n"
    assert await output(processes, reader, "scan", "--reads", "writer") == "k\tv2\n"
