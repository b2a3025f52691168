"""`shalekv watch` as a process against real servers, some of which are killed."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from shalekv_client import Client
from tests.e2e.cli import output, run
from tests.kit.processes.child import EXIT_S, Child
from tests.kit.processes.processes import Processes
from tests.servers.process import free_port

COUNT = 40


def told(watch: Child) -> list[dict[str, Any]]:
    """The commits that were printed whole."""
    text = watch.stdout()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


async def until_told(watch: Child, count: int, address: str) -> list[dict[str, Any]]:
    """Wait until so many commits are printed, while the server at `address` answers."""
    async with asyncio.timeout(EXIT_S), Client(address) as client:
        while len(found := told(watch)) < count:
            assert watch.running, watch.report()
            await client.status()
    return found


async def test_commits_are_printed_as_they_come(processes: Processes, tmp_path: Path) -> None:
    """Whole, of the range, with what was there before; Ctrl-C ends well and tells how to go on."""
    server = await processes.serve(f"file://{tmp_path}/db")
    async with Client(server.listen) as client:
        await client.put(b"a1", b"before")
        argv = ("watch", "a", "--from-seq", "1", "--previous", "--format", "json")
        watch = processes.start(*argv, env={"SHALEKV_ADDR": server.listen})
        await until_told(watch, 1, server.listen)
        await client.put(b"b1", b"of another range")
        await client.put(b"a1", b"after")
        last = await client.delete(b"a1")
    found = await until_told(watch, 3, server.listen)
    watch.send(signal.SIGINT)
    assert await watch.exited() == 0, watch.report()
    assert watch.stderr() == f"To go on: --from-seq {last.seq + 1}\n"
    changes = [change for commit in found for change in commit["changes"]]
    assert [(each["kind"], each["key"], each.get("value")) for each in changes] == [
        ("put", "a1", "before"),
        ("put", "a1", "after"),
        ("delete", "a1", None),
    ]
    assert [each["previous"] and each["previous"]["value"] for each in changes[1:]] == [
        "before",
        "after",
    ]


async def test_the_rest_goes_on_where_the_first_part_ended(
    processes: Processes, tmp_path: Path
) -> None:
    """With the number from stderr nothing is printed twice; for a consumer nothing is left out."""
    server = await processes.serve(f"file://{tmp_path}/db")
    async with Client(server.listen) as client:
        for number in range(6):
            await client.put(b"k%d" % number, b"v")
        first = await run(processes, server, "watch", "--from-seq", "2", "--limit", "2")
        assert first.stdout() == "2\tput\tk1\tv\n3\tput\tk2\tv\n"
        words = first.stderr().split()
        assert words[-2:] == ["--from-seq", "4"]
        rest = await output(processes, server, "watch", *words[-2:], "--limit", "1")
        assert rest == "4\tput\tk3\tv\n"
        named = ("watch", "--consumer", "mirror", "--limit", "3")
        begun = await output(processes, server, *named, "--from-seq", "1")
        assert [line.split("\t")[0] for line in begun.splitlines()] == ["1", "2", "3"]
        # The WAL is kept by the object: its last commits may come again.
        rest = await output(processes, server, *named)
        numbers = [int(line.split("\t")[0]) for line in rest.splitlines()]
        assert numbers[0] in {3, 4}
        assert numbers == list(range(numbers[0], numbers[0] + 3))


async def test_another_server_goes_on_when_the_writer_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """Every commit is printed once, and in order, across the kill of the server that told it."""
    url = f"file://{tmp_path}/db"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    server = await processes.serve(url, "--listen", addresses[0])
    argv = ["watch", "--from-seq", "1", "--format", "json"]
    watch = processes.start(*argv, "--address", ",".join(addresses))
    async with Client(addresses) as client:
        for number in range(COUNT):
            await client.put(b"%d" % number, b"v")
            if number == COUNT // 2:
                await until_told(watch, 1, server.listen)
                await server.kill()
                server = await processes.serve(url, "--listen", addresses[1], create=False)
    found = await until_told(watch, COUNT, server.listen)
    watch.send(signal.SIGINT)
    assert await watch.exited() == 0, watch.report()
    assert [commit["changes"][0]["key"] for commit in found] == [str(n) for n in range(COUNT)]
    numbers = [commit["seq"] for commit in found]
    assert numbers == sorted(set(numbers))


async def test_a_watch_of_nowhere_ends(processes: Processes) -> None:
    """Without any server it ends soon, with the exit code of that."""
    watch = await processes.run("watch", "--addr", f"127.0.0.1:{free_port()}")
    assert await watch.exited() == 9, watch.report()
    assert "Does it run there?" in watch.stderr()
