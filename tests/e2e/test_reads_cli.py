"""The commands that read, at snapshots and at replicas, as processes."""

from __future__ import annotations

import json
from pathlib import Path

from shalekv_client import Client
from tests.e2e.cli import output, run
from tests.kit.processes.processes import Processes


async def test_reads_at_a_snapshot_show_what_was_there(
    processes: Processes, tmp_path: Path
) -> None:
    """By name or by id, at the writer and at a reader; one that is not there is a usage error."""
    url = f"file://{tmp_path}/db"
    writer = await processes.serve(url)
    reader = await processes.read(url)
    async with Client(writer.listen) as client:
        await client.put(b"k", b"then")
        snapshot = await client.create_snapshot("nightly", ttl_s=600)
        await client.put(b"k", b"now")
        await client.put(b"l", b"new")
    for server in (writer, reader):
        for called in ("nightly", snapshot.id.hex()):
            at = ("--snapshot", called)
            assert await output(processes, server, "get", "k", *at) == "then\n"
    assert await output(processes, reader, "scan", "--snapshot", "nightly") == "k\tthen\n"
    path = tmp_path / "nightly.ndjson"
    words = ("--snapshot", "nightly", "--output", str(path))
    await output(processes, reader, "dump", *words)
    assert [json.loads(line)["value"] for line in path.read_text().splitlines()] == ["then"]
    missing = await run(processes, reader, "get", "k", "--snapshot", "weekly")
    assert await missing.exited() == 2, missing.report()
    assert "no snapshot weekly" in missing.stderr()


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


async def test_load_finds_the_writer_among_servers_that_are_gone(
    processes: Processes, tmp_path: Path
) -> None:
    """Of several addresses the first may be dead, as for all other commands that write."""
    writer = await processes.serve(f"file://{tmp_path}/db")
    dead = "127.0.0.1:1"
    words = ("load", "-", "--input-format", "tsv", "--addr", f"{dead},{writer.listen}")
    loaded = await processes.run(*words, stdin=b"k\tv\n")
    assert await loaded.exited() == 0, loaded.report()
    assert await output(processes, writer, "get", "k") == "v\n"
    refused = await processes.run(*words[:-1], f"{dead},127.0.0.1:2", stdin=b"k\tv\n")
    assert await refused.exited() == 9, refused.report()
